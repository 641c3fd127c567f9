"""Cells done: what a cell is made from, its reranking and its measures, and the phases of a matrix.

A cell has two stamps. cell.json says what its ranking was made from, measured.json what it was measured by; so new
judgements or other measures cost a measurement and no reranking. Cells that share a forward are one phase, in a process
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrank.artifacts import Artifact
from headrank.evaluation.measures import evaluate_run
from headrank.experiments.cells import METRICS, RUN, SCORES
from headrank.experiments.matrix_plan import MatrixCell
from headrank.experiments.metrics_file import META, read_facts, write_metrics
from headrank.experiments.phases import Call, Phase
from headrank.files import plain_or_gzipped, write_json, write_jsonl
from headrank.formats import Collection, read_qrels, read_query_ids, read_run, write_run
from headrank.method.published_prompts import published_prompt
from headrank.reranking import shipped_readouts
from headrank.reranking.rerank_job import RerankJob, rerank
from headrank.reranking.rerank_outputs import Target

RANKED, MEASURED = "cell.json", "measured.json"  # the stamps


@dataclass(frozen=True)
class CellSettings:
    """How cells are reranked; what all cells of one command have in common, or those of one benchmark of a study."""

    query_rows: str | None = None
    max_words: int | None = None
    document_layout: str | None = None
    dtype: str | None = None
    device: str | None = None
    batch_size: int | None = None
    shuffle_seed: int = 0
    only: str | None = None
    api_base: str | None = None
    store: str | None = None  # of passages, for HeadRank in the late layout
    prompt: str | None = None  # of a published method: a name of published_prompts.py
    instruction: str | None = None
    command: tuple[str, ...] = ()  # what a person typed, for metrics.json

    def of_the_ranking(self) -> dict[str, Any]:
        """The settings that decide scores; null ones are left out, so that a new setting makes no old cell stale."""
        # they change no score of a query; 'only' counts through its file's content, see _reads
        left_out = ("device", "batch_size", "only", "command")
        return {name: value for name, value in asdict(self).items() if name not in left_out and value is not None}


@dataclass(frozen=True)
class CellGroup:
    """Cells that are read off one forward, or a single one."""

    cells: tuple[MatrixCell, ...]
    settings: CellSettings
    output: Path

    def ranking(self, cell: MatrixCell) -> Artifact:
        """run.txt, and what it depends on."""
        folder = self.output / cell.folder
        return Artifact(folder / RUN, folder / RANKED, self._settings(cell), self._reads(cell))

    def measurement(self, cell: MatrixCell) -> Artifact:
        """metrics.json: what the ranking depends on, judgements and measures besides."""
        folder = self.output / cell.folder
        settings = {
            **self._settings(cell),
            "measures": list(cell.benchmark.measures),
            "missing": cell.benchmark.missing,
        }
        qrels = cell.benchmark.collection / "qrels.txt"
        return Artifact(
            folder / METRICS, folder / MEASURED, settings, (*self._reads(cell), qrels, qrels.with_name("qrels.txt.gz"))
        )

    def _settings(self, cell: MatrixCell) -> dict[str, Any]:
        return {"cell": cell.identity(), "how": self.settings.of_the_ranking() if cell.model is not None else {}}

    def _reads(self, cell: MatrixCell) -> tuple[Path, ...]:
        """Candidates and query ids; for a reranker texts, heads and the files of the model, too."""
        names = ("run.bm25.txt", *(("queries.tsv", "corpus.jsonl") if cell.model is not None else ()))
        paths: list[Path | str | None] = [
            cell.benchmark.collection / f"{name}{end}" for name in names for end in ("", ".gz")
        ]
        paths.append(self.settings.only)
        if cell.model is not None:
            paths += shipped_readouts.files(cell.heads) or [cell.heads]
            # a model that an earlier phase makes is read although it is not there yet: its state is looked at when its
            # turn comes
            paths += [cell.model.path] if Path(cell.model.path).is_dir() or cell.model.is_made_here else []
        return tuple(Path(path) for path in paths if path)

    def phase(self, needs: Sequence[str] = (), external: Sequence[Path] = ()) -> Phase:
        """The phase that makes these cells."""
        first, *others = self.cells
        artifacts = [make(cell) for make in (self.ranking, self.measurement) for cell in self.cells]
        more = f" and {', '.join(cell.method for cell in others)} off the same forward" if others else ""
        model = f" on {first.model.path}" if first.model is not None else ""
        text = (
            f"rerank {first.benchmark.collection} by {first.method}{more}{model}, top {first.depth} in "
            f"{first.order} order"
        )
        return Phase(
            f"cells/{first.folder.as_posix()}",
            Call(run_cells, (self,), text),
            tuple(artifacts),
            tuple(needs),
            tuple(external),
        )


def run_cells(group: CellGroup, do: Callable[[RerankJob], None] = rerank) -> None:
    """Rerank the cells whose stamp is not complete, and measure all of them."""
    # by the stamp alone: the runner removed what is stale before this process began
    pending = [cell for cell in group.cells if not ((stamp := group.ranking(cell).stamp) and stamp.is_complete)]
    if pending and pending[0].model is None:
        for cell in pending:
            _write_first_stage(cell, group.output / cell.folder)
    elif pending:
        do(rerank_job(pending, group))
    for cell in group.cells:
        measure(cell, group)


def rerank_job(cells: Sequence[MatrixCell], group: CellGroup) -> RerankJob:
    """One job for the cells of one model over the same lists."""
    first, how = cells[0], group.settings
    assert first.model is not None, "first-stage cells are not reranked"
    # the order 'retriever' is that of the prompt, which a published one may turn round
    prompt: dict[str, Any] = {
        "query_rows": how.query_rows,
        "max_words": how.max_words,
        "document_layout": how.document_layout,
        "instruction": how.instruction,
        "order": "reversed" if first.order == "reversed" else None,
    }
    published = published_prompt(how.prompt, first.benchmark.name) if how.prompt is not None else {}
    return RerankJob(
        model=first.model.path,
        targets=tuple(_target(cell, group.output / cell.folder) for cell in cells),
        collection=str(first.benchmark.collection),
        depth=first.depth,
        shuffle=how.shuffle_seed if first.order == "shuffled" else None,
        only=how.only,
        prompt=published | {name: value for name, value in prompt.items() if value is not None},
        device=how.device,
        dtype=how.dtype,
        batch_size=how.batch_size,
        api_base=how.api_base,
        store=how.store if first.base_method == "headrank" else None,
        command=how.command,
    )


def _target(cell: MatrixCell, folder: Path) -> Target:
    return Target(cell.base_method, str(folder / RUN), cell.heads, str(folder / SCORES), str(folder / META))


def measure(cell: MatrixCell, group: CellGroup) -> None:
    """metrics.json of a cell whose run is there."""
    folder = group.output / cell.folder
    facts = read_facts(folder / RUN) | {"method": cell.method, "depth": cell.depth, "order": cell.order}
    facts |= {"model": cell.model.name if cell.model else None, "seed": cell.model.seed if cell.model else None}
    qrels = read_qrels(plain_or_gzipped(cell.benchmark.collection, "qrels.txt"))
    only = read_query_ids(group.settings.only) if group.settings.only else None
    # read back from the file: what is measured is what anybody can measure again
    evaluation = evaluate_run(
        read_run(folder / RUN), qrels, cell.benchmark.measures, missing=cell.benchmark.missing, query_ids=only
    )
    write_metrics(folder / RUN, facts, evaluation, qrels, cell.benchmark.name)


def _write_first_stage(cell: MatrixCell, folder: Path) -> None:
    """A first-stage cell: the run as it is, its scores cut to the depth, no time and no model."""
    candidates = Collection.open(cell.benchmark.collection).run()
    write_run(
        folder / RUN,
        {query_id: [(row.doc_id, row.score) for row in rows] for query_id, rows in candidates.items()},
        cell.method,
    )
    lists = {query_id: rows[: cell.depth] for query_id, rows in candidates.items()}
    nothing = {"seconds": 0.0, "tokens": 0, "is_shortened": False}
    lines = (
        {
            "query_id": query_id,
            "doc_ids": [row.doc_id for row in rows],
            "scores": [row.score for row in rows],
            "ranks": [row.rank for row in rows],
            **nothing,
        }
        for query_id, rows in lists.items()
    )
    write_jsonl(folder / SCORES, lines)
    write_json(folder / META, {"method": cell.method, "num_queries": len(candidates)})
