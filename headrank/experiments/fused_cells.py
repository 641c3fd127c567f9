"""A cell that another cell and its first stage make together: no model is read, so it is a phase of its own that
takes moments.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrank.artifacts import Artifact
from headrank.evaluation.scored_lists import read_scores
from headrank.experiments.cell_jobs import MEASURED, CellGroup, CellSettings, measure
from headrank.experiments.cells import METRICS, RUN, SCORES
from headrank.experiments.matrix_plan import MatrixCell
from headrank.experiments.metrics_file import META
from headrank.experiments.phases import Call, Phase
from headrank.files import plain_or_gzipped, write_jsonl
from headrank.formats import read_run, write_run


@dataclass(frozen=True)
class FusedCell:
    """``cell`` is ``weight`` times the scores of ``source`` and 1 - ``weight`` times those of the first stage."""

    source: MatrixCell
    cell: MatrixCell
    settings: CellSettings
    output: Path
    weight: float

    def phase(self, needs: Sequence[str]) -> Phase:
        """The phase that makes it."""
        folder, collection = self.output / self.cell.folder, self.cell.benchmark.collection
        reads = [self.output / self.source.folder / RUN, *(collection / f"run.bm25.txt{end}" for end in ("", ".gz"))]
        reads += [collection / f"qrels.txt{end}" for end in ("", ".gz")] + (
            [Path(self.settings.only)] if self.settings.only else []
        )
        settings = {"cell": self.cell.identity(), "weight": self.weight, "measures": list(self.cell.benchmark.measures)}
        made = Artifact(folder / METRICS, folder / MEASURED, settings, tuple(reads))
        text = f"fuse {self.source.folder.as_posix()} with its first stage, weight {self.weight:g}"
        return Phase(f"cells/{self.cell.folder.as_posix()}", Call(fuse_cell, (self,), text), (made,), tuple(needs))


def fuse_cell(fused: FusedCell) -> None:
    """run.txt, scores.jsonl, meta.json and metrics.json of the fused cell."""
    from headrank.reranking.fusion import fuse_runs

    source, folder = fused.output / fused.source.folder, fused.output / fused.cell.folder
    first_stage = read_run(plain_or_gzipped(fused.cell.benchmark.collection, "run.bm25.txt"))
    runs = fuse_runs(first_stage, read_run(source / RUN), fused.cell.depth, fused.weight)
    folder.mkdir(parents=True, exist_ok=True)
    write_run(folder / RUN, runs, "fused")
    write_jsonl(
        folder / SCORES, (_with_scores(row.to_dict(), dict(runs[row.query_id])) for row in read_scores(source / SCORES))
    )
    shutil.copyfile(source / META, folder / META)  # what it cost is what the reranking cost
    measure(fused.cell, CellGroup((fused.cell,), fused.settings, fused.output))


def _with_scores(row: dict[str, Any], scores: dict[str, float]) -> dict[str, Any]:
    return row | {"scores": [scores[doc_id] for doc_id in row["doc_ids"]]}
