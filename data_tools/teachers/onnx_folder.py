"""A cross-encoder as an ONNX folder (model.onnx, tokenizer.json) on onnxruntime: int8 models run fast on a CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from data_tools.teachers.teacher import QueryList, TeacherSpec, onnx_file, passage_text
from headrank.artifacts import content_digest
from headrank.errors import InputError


class OnnxTeacher:
    """Scores pairs with an ONNX session.

    A batch never holds passages of two queries. Dynamically quantised models scale activations per batch, so their
    scores depend a little on what else is in it; this way a label depends on its own list and not on where a run was
    interrupted. On a CPU a batch is one passage unless told otherwise: nothing is padding, and a label depends on its
    own pair alone.
    """

    def __init__(self, spec: TeacherSpec) -> None:
        """Open the session; one thread per OMP_NUM_THREADS, which onnxruntime itself does not read."""
        import onnxruntime

        folder = Path(spec.name)
        model = onnx_file(folder)
        if model is None or not (folder / "tokenizer.json").is_file():
            raise InputError(
                f"{folder}: no ONNX cross-encoder; it needs model.onnx (or onnx/model.onnx) and tokenizer.json"
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS") or 0)
        try:
            self._session = onnxruntime.InferenceSession(
                str(model), options, providers=onnxruntime.get_available_providers()
            )
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # both libraries raise their own bare exceptions for files that are not theirs
            raise InputError(
                f"{folder}: cannot be loaded ({str(error).splitlines()[0][:200]}); is the download complete?"
            ) from error
        self._inputs = {one.name for one in self._session.get_inputs()}
        self._tokenizer.enable_truncation(spec.max_tokens)
        self._tokenizer.no_padding()
        self._pad = self._tokenizer.token_to_id("[PAD]") or 0
        self._batch_size = spec.batch_size or (1 if self._session.get_providers() == ["CPUExecutionProvider"] else 16)
        self._max_words = spec.max_words
        self._identity = {
            "kind": "onnx",
            "name": folder.resolve().name,
            "model_sha256": content_digest(model),
            "tokenizer_sha256": content_digest(folder / "tokenizer.json"),
            "max_tokens": spec.max_tokens,
            "max_words": spec.max_words,
            "batch_size": self._batch_size,
            "scores": "raw logits",
        }

    def identity(self) -> dict[str, Any]:
        """The model's and tokenizer's bytes, the truncation, and the batch size, on which int8 scores depend a
        little.
        """
        return self._identity

    def score_lists(self, lists: Sequence[QueryList]) -> list[np.ndarray]:
        """Raw logits, list by list."""
        return [
            self._score(query, [passage_text(document, self._max_words) for document in documents])
            for query, documents in lists
        ]

    def _score(self, query: str, passages: Sequence[str]) -> np.ndarray:
        """Batches of similar length, so that little is padding."""
        encoded = self._tokenizer.encode_batch([(query, passage) for passage in passages])
        scores = np.empty(len(encoded))
        by_length = sorted(range(len(encoded)), key=lambda index: len(encoded[index].ids))
        for start in range(0, len(by_length), self._batch_size):
            chosen = by_length[start : start + self._batch_size]
            logits = self._session.run(None, self._feed([encoded[index] for index in chosen]))[0]
            if logits.size != len(chosen):
                raise InputError(
                    f"{self._identity['name']}: gives {logits.shape} values for {len(chosen)} pairs; a reranker "
                    "gives one each"
                )
            scores[chosen] = logits.reshape(-1)
        return scores

    def _feed(self, batch: Sequence[Encoding]) -> dict[str, np.ndarray]:
        """Padded int64 arrays of what the model asks for."""
        shape = (len(batch), max(len(one.ids) for one in batch))
        feed = {
            "input_ids": np.full(shape, self._pad, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "token_type_ids": np.zeros(shape, np.int64),
        }
        for row, one in enumerate(batch):
            length = len(one.ids)
            feed["input_ids"][row, :length] = one.ids
            feed["attention_mask"][row, :length] = 1
            feed["token_type_ids"][row, :length] = one.type_ids
        return {name: values for name, values in feed.items() if name in self._inputs}
