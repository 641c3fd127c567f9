"""The reranker's interface and its answers to bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from headrank import HeadRankReranker, HeadSet, InputError, PromptTemplate
from headrank.generation.generation import LocalGenerator
from headrank.placement import resolve_device
from headrank.reranking.reranker import choose_heads
from tests.tiny_models import make_tiny_model

HEADS = HeadSet(((0, 1), (2, 3)), "test", "tiny", 4, 8)
DOCUMENTS = [
    "The flea lives two months.",
    {"title": "Floors", "text": "Concrete costs six dollars."},
    "Rosin helps the bow grip.",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def reranker(directory: Path) -> HeadRankReranker:
    return HeadRankReranker.from_pretrained(directory, HEADS)


def test_rank_has_the_shape_of_cross_encoder_rank(reranker: HeadRankReranker) -> None:
    rows = reranker.rank("how long does a flea live", DOCUMENTS, return_documents=True)
    assert sorted(row["corpus_id"] for row in rows) == [0, 1, 2]
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    assert all(row["text"] is DOCUMENTS[row["corpus_id"]] for row in rows)
    assert reranker.rank("how long does a flea live", DOCUMENTS, top_k=1) == [
        {k: rows[0][k] for k in ("corpus_id", "score")}
    ]


def test_rank_batch_equals_rank_for_each_whatever_the_batch_size(reranker: HeadRankReranker) -> None:
    requests = [("flea", DOCUMENTS), ("how much do concrete floors cost", DOCUMENTS[:2]), ("rosin", DOCUMENTS[1:])]
    batched = reranker.rank_batch(requests, batch_size=3)
    for (query, documents), rows in zip(requests, batched, strict=True):
        alone = reranker.rank(query, documents)
        assert [row["corpus_id"] for row in alone] == [row["corpus_id"] for row in rows]
        assert np.allclose([row["score"] for row in alone], [row["score"] for row in rows], atol=1e-6)


def test_reversed_order_maps_scores_back_to_the_given_order(directory: Path) -> None:
    straight = HeadRankReranker.from_pretrained(directory, HEADS)
    backwards = HeadRankReranker.from_pretrained(directory, HEADS, prompt=PromptTemplate(order="reversed"))
    given = backwards.score_batch([("flea", DOCUMENTS)])[0].scores
    by_hand = straight.score_batch([("flea", DOCUMENTS[::-1])])[0].scores[::-1]
    assert np.array_equal(given, by_hand)
    detailed = backwards.explain("flea", DOCUMENTS)
    assert np.allclose(detailed.scores, given, atol=1e-6)
    assert [tokens.text.split("\n")[-1] for tokens in detailed.tokens] == [
        d if isinstance(d, str) else d["text"] for d in DOCUMENTS
    ]


def test_all_heads_is_icr(directory: Path) -> None:
    icr = HeadRankReranker.from_pretrained(directory, "all")
    assert len(icr.heads.heads) == 32 and icr.layers_used == 4


@pytest.mark.parametrize(
    ("query", "documents", "message"),
    [
        ("  ", ["a"], "empty query"),
        ("flea", [], "no documents"),
        ("flea", [3], "must be a string or a mapping"),
        ("flea", [{"title": "x"}], "must be a string or a mapping"),
        ("flea", [{"title": 3, "text": "x"}], "must be a string or a mapping"),
        ("flea", "one string", "must be a list"),
        ("flea", None, "must be a list"),
        (None, ["a"], "a query must be a string"),
        ("flea", ["a\ud800"], "half a surrogate pair"),
    ],
)
def test_bad_requests_are_one_clear_line(reranker: HeadRankReranker, query: str, documents: list, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reranker.rank(query, documents)


def test_no_requests_give_no_results_and_a_batch_has_at_least_one(reranker: HeadRankReranker) -> None:
    assert reranker.rank_batch([]) == []
    with pytest.raises(InputError, match="`batch_size` -1"):
        reranker.rank_batch([("flea", DOCUMENTS)], batch_size=-1)


def test_one_document_and_empty_documents_are_ranked_not_lost(reranker: HeadRankReranker) -> None:
    assert [row["corpus_id"] for row in reranker.rank("flea", ["only one"])] == [0]
    rows = reranker.rank("flea", ["", *DOCUMENTS, "   "])
    assert {row["corpus_id"] for row in rows[-2:]} == {0, 4} and len(rows) == 5


def test_heads_of_another_model_are_refused(directory: Path) -> None:
    with pytest.raises(InputError, match="L9-H1 does not exist"):
        HeadRankReranker.from_pretrained(directory, HeadSet(((9, 1),), "test", "bigger", 12, 8))
    with pytest.raises(InputError, match="L1-H12 does not exist"):
        HeadRankReranker.from_pretrained(directory, HeadSet(((1, 12),), "test", "wider", 4, 16))


def test_a_model_without_heads_says_what_to_give(directory: Path) -> None:
    with pytest.raises(InputError, match="no headrank.json"):
        HeadRankReranker.from_pretrained(directory)


def test_nan_weights_are_named_and_not_ranked(directory: Path, tmp_path: Path) -> None:
    broken = make_tiny_model(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="not finite"):
        HeadRankReranker.from_pretrained(broken, HEADS).rank("flea", DOCUMENTS)


def test_layers_above_the_deepest_head_are_never_read_from_the_file(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    for name in list(weights):
        if name.startswith("model.layers.3."):
            del weights[name]  # a loader that wanted them would fail or invent them
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    reranker = HeadRankReranker.from_pretrained(directory, HEADS)
    assert reranker.reader.loaded_layers == 3
    assert not any(parameter.is_meta for parameter in reranker.reader.model.parameters())
    whole = make_tiny_model(tmp_path / "whole")
    expected = HeadRankReranker.from_pretrained(whole, HEADS).score_batch([("flea", DOCUMENTS)])[0].scores
    assert np.array_equal(reranker.score_batch([("flea", DOCUMENTS)])[0].scores, expected)


def test_bfloat16_ranks_close_to_float32(directory: Path, reranker: HeadRankReranker) -> None:
    low = HeadRankReranker.from_pretrained(directory, HEADS, dtype=torch.bfloat16)
    assert np.allclose(
        low.score_batch([("flea", DOCUMENTS)])[0].scores,
        reranker.score_batch([("flea", DOCUMENTS)])[0].scores,
        atol=0.05,
    )


def test_a_missing_model_is_one_clear_line() -> None:
    with pytest.raises(InputError, match="no model there"):
        HeadRankReranker.from_pretrained("/does/not/exist", HEADS)


def _drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _cut_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])


def _widen_the_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))


def _lose_the_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_a_weight, "1 weights are missing.*layers.0.self_attn.q_proj.weight"),
        (_cut_the_weights, r"model.safetensors: cannot be read|are its files complete"),
        (_widen_the_config, "of another shape than config.json"),
        (_lose_the_tokenizer, "tokenizer"),
    ],
)
def test_a_damaged_model_is_one_clear_line_and_nothing_is_invented(
    directory: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = shutil.copytree(directory, tmp_path / "damaged")
    damage(folder)
    with pytest.raises(InputError, match=message):
        HeadRankReranker.from_pretrained(folder, HEADS)
    with pytest.raises(InputError, match=message):
        LocalGenerator.load(folder)


def test_an_encoder_is_refused(directory: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(directory, tmp_path / "bert")
    config = BertConfig(
        vocab_size=416, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
    )
    BertModel(config).save_pretrained(folder)
    with pytest.raises(InputError, match="needs a causal decoder"):
        HeadRankReranker.from_pretrained(folder, "all").rank("flea", DOCUMENTS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"format": "headrank/1"}', "headrank.json: the heads must be an object"),
        (b'{"format": "headrank/1", "heads": {"heads": [[0, "a"]]}}', "headrank.json: field 'heads'"),
        (b"\xff\xfe", "headrank.json: not a JSON file"),
    ],
)
def test_a_broken_headrank_json_is_named(directory: Path, tmp_path: Path, content: bytes, message: str) -> None:
    folder = shutil.copytree(directory, tmp_path / "exported")
    (folder / "headrank.json").write_bytes(content)
    with pytest.raises(InputError, match=message):
        HeadRankReranker.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"prompt": {"max_words": "many"}}, "max_words must be a int"), ({"table": [1]}, "'table' must hold objects")],
)
def test_a_wrong_field_of_heads_json_is_named(tmp_path: Path, changes: dict, message: str) -> None:
    (tmp_path / "heads.json").write_text(json.dumps(HEADS.to_dict() | changes))
    with pytest.raises(InputError, match=f"heads.json: .*{message}"):
        HeadSet.load(tmp_path / "heads.json")


@pytest.mark.parametrize(("device", "dtype"), [("gpu", None), ("cuda:99", None), ("cpu", "float7"), ("cpu", "cat")])
def test_a_device_or_number_format_that_is_not_there_is_one_clear_line(device: str, dtype: str | None) -> None:
    with pytest.raises(InputError, match="`dtype`" if dtype else "`device`"):
        resolve_device(device, dtype)


def test_processes_of_one_machine_get_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank, expected in (("0", "cuda:0"), ("1", "cuda:1"), ("2", "cuda:0")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert str(resolve_device(None, None)[0]) == str(resolve_device("cuda", None)[0]) == expected
    assert str(resolve_device("cuda:1", None)[0]) == "cuda:1"


def test_without_heads_a_folder_and_a_name_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no headrank.json beside this model; give `heads`"):
        choose_heads(tmp_path, None)
    with pytest.raises(InputError, match="runs/dmeo/model: not a folder here.*give `heads`"):
        choose_heads("runs/dmeo/model", None)
