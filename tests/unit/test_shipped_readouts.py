"""The readouts that come with the package: what they promise, and that the embedded model works with nothing else
given.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrank import HeadRankReranker, HeadSet, InputError
from headrank.reranking import shipped_readouts
from headrank.reranking.exported_model import read_headrank_json
from headrank.reranking.model_sources import is_embedded
from headrank.reranking.reranker import choose_heads
from tests.tiny_models import make_tiny_model

QUERY = "why does a violin bow need rosin"
PASSAGES = [
    "The price of concrete rose again.",
    "Rosin makes the violin bow grip the string.",
    "A cycle lasts a month.",
    "",
]
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
    assert (heads.num_layers, heads.num_heads) == (30, 9)
    assert heads.readout is not None and heads.readout.kind == "log-mass"
    facts = heads.readout.fit
    assert facts["lists"] and set(facts["lists"]) <= MAY_BE_SHIPPED
    assert facts["teacher"] and all(len(file["sha256"]) >= 16 and "/" not in file["file"] for file in facts["teacher"])
    if name.endswith("fast"):
        assert heads.l_max < 20 and len({(layer, head // 3) for layer, head in heads.heads}) <= 16


def test_the_shipped_adapter_names_its_base_its_teacher_and_only_collections_that_may_be_shipped() -> None:
    from headrank.reranking.peft_folder import PeftAdapter

    adapter = PeftAdapter.read(shipped_readouts.ADAPTER)
    about = read_headrank_json(shipped_readouts.ADAPTER)
    assert about is not None and about["base"] == "embedded"
    trained_on = about["training"]["trained_on"]
    assert set(trained_on) <= MAY_BE_SHIPPED and all("labels of" in text for text in trained_on.values())
    deepest = max(HeadSet.load(shipped_readouts.shipped_path(name)).l_max for name in shipped_readouts.TRAINED)
    assert adapter.factors.keys() == adapter.below(deepest + 1), (
        "the adapter changes layers that no readout of it reads"
    )
    assert sum(path.stat().st_size for path in shipped_readouts.ADAPTER.iterdir()) < 8e6
    assert str(Path.home()) not in (shipped_readouts.ADAPTER / "README.md").read_text()


def test_names_belong_to_the_embedded_model_only(tmp_path: Path) -> None:
    assert choose_heads("embedded", None) == choose_heads("embedded", "fast") != choose_heads("embedded", "full")
    other = make_tiny_model(tmp_path / "tiny")
    assert is_embedded("embedded") and not is_embedded(other)
    for name in ("fast", "untrained-fast"):
        with pytest.raises(InputError, match="are a readout of the embedded model"):
            choose_heads(other, name)
    with pytest.raises(InputError, match="no headrank.json"):
        choose_heads(other, None)


def test_the_embedded_name_is_the_trained_model_unless_other_heads_say_otherwise(
    embedded_model: Path, tmp_path: Path
) -> None:
    for heads in (None, "full", "fast"):
        assert shipped_readouts.model_to_read("embedded", heads) == str(shipped_readouts.ADAPTER)
    for heads in (
        "untrained-full",
        "all",
        tmp_path / "heads.json",
        HeadSet.load(shipped_readouts.shipped_path("fast")),
    ):
        assert shipped_readouts.model_to_read("embedded", heads) == str(embedded_model)
    assert shipped_readouts.model_to_read("org/model", None) == "org/model"


def test_the_embedded_model_reranks_at_once_with_any_of_them(embedded_model: Path) -> None:
    by_default = HeadRankReranker.from_pretrained("embedded", dtype="float32")
    full = HeadRankReranker.from_pretrained("embedded", "full", dtype="float32")
    untrained = HeadRankReranker.from_pretrained("embedded", "untrained-fast", dtype="float32")
    assert (
        by_default.heads == choose_heads("embedded", "fast") and full.layers_used <= 20 and untrained.layers_used <= 20
    )
    for reranker in (by_default, full, untrained):
        assert [row["corpus_id"] for row in reranker.rank(QUERY, PASSAGES)][::3] == [1, 3]
        scores = reranker.score(QUERY, PASSAGES[:3])
        np.testing.assert_array_equal(scores[1:2], reranker.score(QUERY, PASSAGES[1:2]))
    assert np.abs(by_default.score(QUERY, PASSAGES[:3]) - untrained.score(QUERY, PASSAGES[:3])).max() > 0.01


def test_the_words_that_readme_begins_with_rank_the_answer_first(embedded_model: Path) -> None:
    ranked = HeadRankReranker.from_pretrained("embedded").rank(
        "why is the sea salty", ["Rivers carry minerals into the sea.", "The Dead Sea Scrolls were found in caves."]
    )
    assert [row["corpus_id"] for row in ranked] == [0, 1]


def test_benchmark_run_takes_a_shipped_readout_by_name() -> None:
    from headrank.commands.benchmark_run import _heads

    assert _heads(["fast"], ["headrank"]) == {"headrank": "fast"}
