"""The readouts that come with the package: what they promise, and that the embedded model works with nothing else given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrank import HeadRankReranker, HeadSet, InputError
from headrank.reranking import shipped_readouts
from headrank.reranking.model_sources import is_embedded
from headrank.reranking.reranker import choose_heads
from tests.tiny_models import make_tiny_model

QUERY = "why does a violin bow need rosin"
PASSAGES = ["The price of concrete rose again.", "Rosin makes the violin bow grip the string.", "A cycle lasts a month.", ""]
MAY_BE_SHIPPED = {
    "train-wikifactoid",
    "train-biomed",
    "train-multihop",
    "train-squad",
    "train-feverdev",
    "train-code-cosqa",
    "train-health",
}


@pytest.mark.parametrize("name", shipped_readouts.NAMES)
def test_a_shipped_readout_is_late_says_how_it_was_fitted_and_on_nothing_that_may_not_be_shipped(name: str) -> None:
    heads = HeadSet.load(shipped_readouts.shipped_path(name))
    assert heads.prompt.is_late and heads.prompt.branch_position == 512 and heads.prompt.instruction == "Query: "
    assert (heads.num_layers, heads.num_heads, heads.model) == (30, 9, "embedded")
    assert heads.readout is not None and heads.readout.kind == "log-mass"
    facts = heads.readout.fit
    assert facts["lists"] and set(facts["lists"]) <= MAY_BE_SHIPPED
    assert facts["teacher"] and all(len(file["sha256"]) == 64 and "/" not in file["file"] for file in facts["teacher"])
    if name == "fast":
        assert heads.l_max < 20 and len({(layer, head // 3) for layer, head in heads.heads}) <= 16


def test_names_belong_to_the_embedded_model_only(tmp_path: Path) -> None:
    assert choose_heads("embedded", None) == choose_heads("embedded", "full") != choose_heads("embedded", "fast")
    other = make_tiny_model(tmp_path / "tiny")
    assert is_embedded("embedded") and not is_embedded(other)
    with pytest.raises(InputError, match="are a readout of the embedded model"):
        choose_heads(other, "fast")
    with pytest.raises(InputError, match="no headrank.json"):
        choose_heads(other, None)


def test_the_embedded_model_reranks_at_once_with_either(embedded_model: Path) -> None:
    by_default = HeadRankReranker.from_pretrained("embedded", dtype="float32")
    fast = HeadRankReranker.from_pretrained("embedded", "fast", dtype="float32")
    assert by_default.heads == choose_heads(embedded_model, "full") and fast.layers_used <= 20
    for reranker in (by_default, fast):
        assert [row["corpus_id"] for row in reranker.rank(QUERY, PASSAGES)][::3] == [1, 3]
        scores = reranker.score(QUERY, PASSAGES[:3])
        np.testing.assert_array_equal(scores[1:2], reranker.score(QUERY, PASSAGES[1:2]))
