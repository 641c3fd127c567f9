"""The figure of quality against bytes: its statistics are those of a forward, its forms shrink as they say, its
files are written.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import store_bytes, store_growth
from headrank.commands import main
from headrank.formats import Collection
from headrank.passage_store.store import PassageStore
from headrank.selection.readout_statistics import LateStatistics
from tests.tiny_models import make_tiny_model
from tests.unit.test_index_command import write_corpus
from tests.unit.test_late_reranker import HEADS, QUERIES, texts


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, a judged collection, and a store of every pair of its first three layers."""
    place = tmp_path_factory.mktemp("bytes")
    make_tiny_model(place / "model", "llama")
    write_corpus(place / "corpus.jsonl", texts(12))
    (place / "queries.tsv").write_text("".join(f"q{number}\t{query}\n" for number, query in enumerate(QUERIES)))
    (place / "run.bm25.txt").write_text(
        "".join(f"q{q} Q0 d{n} {n + 1} {50 - n} bm25\n" for q in range(3) for n in range(12))
    )
    (place / "qrels.txt").write_text("".join(f"q{q} 0 d{n} {(n + q) % 3}\n" for q in range(3) for n in range(12)))
    HEADS.save(place / "heads.json")
    command = [
        "index",
        "--model",
        str(place / "model"),
        "--heads",
        str(place / "heads.json"),
        "--collection",
        str(place),
    ]
    command += ["--store", str(place / "store"), "--pairs", "all", "--dtype", "fp32", "--device", "cpu"]
    assert main(command) == 0
    return place


def test_statistics_from_a_store_are_those_of_a_forward(place: Path) -> None:
    lists = store_bytes.StoredLists(
        PassageStore(place / "store"), str(place / "model"), [Collection.open(place)], [], 12
    )
    expected = LateStatistics(lists.late.reader, lists.late.heads.prompt, 3)
    exact, rounded, pooled = lists.ratios("fp32", 1), lists.ratios("int8", 1), lists.ratios("int8", 4)
    for index, one in enumerate(lists.lists):
        reference = expected.of(one.query, one.documents).ratios_NKR
        deviation = float(reference.astype(np.float32).std())
        assert np.abs(exact[index] - reference).max() < 0.01 * deviation + 0.01, "float16 rounds the reference"
        assert (
            0 < np.abs(rounded[index] - exact[index]).mean() < np.abs(pooled[index] - exact[index]).mean() < deviation
        )


def test_points_and_figure_are_written(place: Path, tmp_path: Path) -> None:
    output = tmp_path / "bytes.png"
    command = [
        "--store",
        str(place / "store"),
        "--model",
        str(place / "model"),
        "--collection",
        str(place),
        "--depth",
        "12",
    ]
    assert store_bytes.main([*command, "--pairs", "2", "4", "--folds", "3", "--output", str(output)]) == 0
    written = json.loads(output.with_suffix(".json").read_text())
    assert output.stat().st_size > 5000 and written["queries"] == 3 and written["layers"] == 3
    sizes = {(point["pairs"], point["dtype"], point["pool"]): point["bytes_per_token"] for point in written["points"]}
    assert sizes[2, "int8", 1] == 16 and sizes[4, "int8", 4] == 8 and sizes[12, "fp32", 1] == 384 and len(sizes) == 12
    assert all(0 < point["quality"] <= 100 for point in written["points"])


def test_growth_is_measured_on_every_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_growth, "AXES", {"passages": (2, 4), "tokens": (3,), "pairs": (1, 2), "queries": (1, 2)})
    monkeypatch.setattr(store_growth, "BASE", {"passages": 3, "tokens": 5, "pairs": 2, "queries": 1})
    assert store_growth.main(["--rounds", "1", "--output", str(tmp_path / "growth.png")]) == 0
    found = json.loads((tmp_path / "growth.json").read_text())
    assert {axis: [size for size, _ in points] for axis, points in found.items()} == {
        axis: list(sizes) for axis, sizes in store_growth.AXES.items()
    }
    assert all(milliseconds > 0 for points in found.values() for _, milliseconds in points)
