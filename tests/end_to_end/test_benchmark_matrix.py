"""`headrank benchmark run` for real: a tiny model, its own rerank processes, resumption, and the report made from
the cells.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrank.commands import main
from headrank.experiments.cells import find_cells
from tests.result_cells import make_heads
from tests.tiny_models import make_tiny_model
from tests.toy_collections import make_collection


def test_a_matrix_runs_resumes_and_becomes_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])))
    model = make_tiny_model(tmp_path / "tiny-1M")
    make_collection(tmp_path / "toy", {"1": [0, 2, None, 1, 0, 0, 1, 0], "2": [1, 0, 3, 0, 0, 2, 0, 0]})
    make_heads((1, 2), (2, 5), model="tiny", num_layers=4, num_heads=8).save(tmp_path / "heads.json")
    words = [
        "benchmark",
        "run",
        "--models",
        str(model),
        "--methods",
        "bm25",
        "headrank",
        "--heads",
        str(tmp_path / "heads.json"),
    ]
    words += [
        "--benchmarks",
        str(tmp_path / "toy"),
        "--depths",
        "8",
        "--orders",
        "shuffled",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(words) == 0
    cells = {cell.method: cell for cell in find_cells(tmp_path / "out")}
    facts = cells["headrank"].metrics
    assert (facts["model"], facts["layers_used"], facts["num_layers"], facts["order"]) == ("tiny-1M", 3, 4, "shuffled")
    assert facts["heads"] == [[1, 2], [2, 5]]
    assert facts["seconds_per_query"] > 0
    assert facts["peak_memory_bytes"] > 0
    rows = cells["headrank"].scores()
    assert [sorted(row.positions) for row in rows] == [list(range(1, 9))] * 2
    assert any(row.positions != row.ranks for row in rows)  # the prompt was shuffled, the ranks are the retriever's
    before = (cells["headrank"].path / "metrics.json").stat().st_mtime_ns
    assert main(words) == 0
    assert (cells["headrank"].path / "metrics.json").stat().st_mtime_ns == before
    assert main(["report", "--matrix", str(tmp_path / "out")]) == 0
    table = (tmp_path / "out" / "report" / "tables" / "overview_top_8_shuffled.md").read_text()
    assert "HeadRank" in table
    assert "BM25" in table
