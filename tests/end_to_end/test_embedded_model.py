"""The embedded model is right: it knows English, continues text, and its tokenizer keeps offsets. Skipped without
it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrank.reranking import embedded_model as embedded

pytestmark = pytest.mark.embedded

PARAGRAPH = (
    "The Great Barrier Reef is the world's largest coral reef system. It stretches for over 2,300 kilometres along "
    "the coast of "
    "Queensland, Australia, and is home to thousands of species of fish, corals and other animals. Rising sea "
    "temperatures cause "
    "corals to expel the algae that live in their tissues, a process known as bleaching."
)
# Measured once: 1.496 nats a token. A swapped pair of matrices or a wrong rotary base gives more than 3, an untrained
# model 10.8.
EXPECTED_LOSS, LOSS_TOLERANCE = 1.496, 0.02


@pytest.fixture(scope="module")
def loaded(embedded_model: Path) -> Iterator[tuple[Any, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with torch.inference_mode():
        yield AutoTokenizer.from_pretrained(embedded_model), AutoModelForCausalLM.from_pretrained(embedded_model).eval()


def test_the_next_token_loss_on_a_paragraph_is_that_of_a_trained_model(loaded: tuple[Any, Any]) -> None:
    tokenizer, model = loaded
    ids = tokenizer(PARAGRAPH, return_tensors="pt")["input_ids"]
    assert float(model(ids, labels=ids).loss) == pytest.approx(EXPECTED_LOSS, abs=LOSS_TOLERANCE)


def test_it_continues_text_sensibly(loaded: tuple[Any, Any]) -> None:
    tokenizer, model = loaded
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    continued = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(continued[0]).startswith("The capital of France is Paris")


def test_its_chat_template_makes_it_answer(loaded: tuple[Any, Any]) -> None:
    tokenizer, model = loaded
    question = [{"role": "user", "content": "What is the boiling point of water at sea level?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    answer = tokenizer.decode(model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :])
    assert "100" in answer


def test_the_tokenizer_splits_digits_and_its_offsets_join(loaded: tuple[Any, Any]) -> None:
    tokenizer, _ = loaded
    encoded = tokenizer(PARAGRAPH, return_offsets_mapping=True)
    assert "".join(PARAGRAPH[start:end] for start, end in encoded["offset_mapping"]) == PARAGRAPH
    assert tokenizer.decode(encoded["input_ids"]) == PARAGRAPH
    assert [tokenizer.decode([token]) for token in tokenizer("2300")["input_ids"]] == ["2", "3", "0", "0"]
    assert tokenizer.decode(tokenizer("a  7")["input_ids"][1:2]) == "  "


def test_its_shape_is_the_published_one(loaded: tuple[Any, Any]) -> None:
    _, model = loaded
    config = model.config
    shape = (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.vocab_size,
    )
    assert shape == (30, 576, 9, 3, 49152)
    assert config.tie_word_embeddings and config.rope_parameters["rope_theta"] == 100000.0


def test_two_real_conversions_at_once_give_the_cached_model(embedded_model: Path, tmp_path: Path) -> None:
    wheel = embedded_model.parents[1] / "wheels" / embedded.WHEEL_NAME
    if not wheel.is_file():
        pytest.skip(f"{wheel} is not in the cache")
    (tmp_path / "wheels").mkdir()
    os.symlink(wheel, tmp_path / "wheels" / wheel.name)
    command = [
        sys.executable,
        "-c",
        "from headrank.reranking.embedded_model import embedded_model_directory as f; print(f())",
    ]
    environment = {
        **os.environ,
        "HEADRANK_CACHE": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    printed = {process.communicate(timeout=500)[0].strip() for process in running}
    made = tmp_path / "models" / embedded.MODEL_NAME
    assert printed == {str(made)}
    # only the weights: config and tokenizer name the version of transformers that wrote them
    hashes = {
        json.loads((directory / "manifest.json").read_text())["files"]["model.safetensors"]["sha256"]
        for directory in (made, embedded_model)
    }
    assert len(hashes) == 1 and not embedded.find_damage(made)
