"""The sections of a run report that say where the change happened, what it cost, and how it came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrank.evaluation.comparison import Settings
from headrank.experiments.cells import Cell
from headrank.method.heads import HeadSet
from headrank.methods import method_kind, method_name
from headrank.reports.analyses import CellAnalyses
from headrank.reports.contests import Contest, changes, condition_name, headline_opponents
from headrank.reports.grids import Grid
from headrank.reports.page import Block, Bullets, Paragraph, Picture
from headrank.reports.sections import list_blocks, pareto_blocks
from headrank.reports.training_curves import find_training_logs, read_training_log


@dataclass
class RunReport:
    """What is being written: the cells, where figures go, and the facts collected for report.json."""

    cells: Sequence[Cell]
    output: Path
    measure: str | None = None
    challenger: str | None = None
    head_sets: Mapping[str, HeadSet] = field(default_factory=dict)
    queries: Mapping[str, str] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def figures(self) -> Path:
        """Where PNG and PDF files go."""
        return self.output / "figures"


def where_blocks(report: RunReport, contests: Sequence[Contest]) -> list[Block]:
    """Which queries gained and lost, and what happened inside the lists."""
    from headrank.reports.figures import draw_query_changes

    blocks: list[Block] = []
    for place, contest in enumerate(contests):
        opponent = headline_opponents(contest)[0]
        moved = changes(contest, opponent)
        title = f"{contest.challenger} against {opponent}, {condition_name(contest)}"
        png, _ = draw_query_changes(moved, contest.measure, report.figures / f"changes_{place}", title)
        up, down = sum(value > 0 for value in moved.values()), sum(value < 0 for value in moved.values())
        blocks.append(
            Picture(
                png, f"{up} queries gained and {down} lost.", f"Change of {contest.measure} of every query: {title}."
            )
        )
        blocks.append(_extremes_grid(report, moved, contest.measure, title))
        analyses = CellAnalyses.by_label(condition_name(contest), contest.cells)
        models = {cell.model for cell in contest.cells.values()}
        blocks += list_blocks(analyses, report.figures / f"lists_{place}", condition_name(contest), models)
    return blocks


def _extremes_grid(report: RunReport, moved: Mapping[str, float], measure: str, title: str, count: int = 3) -> Grid:
    """The queries that gained and lost most, with their words where the collection was given."""
    ordered = sorted(moved.items(), key=lambda item: (-item[1], item[0]))
    shown = [item for item in ordered[:count] if item[1] > 0] + [item for item in ordered[-count:] if item[1] < 0]
    has_text = bool(report.queries)
    rows = tuple(
        (query_id, f"{100 * value:+.1f}", report.queries.get(query_id, ""))[: 2 + has_text] for query_id, value in shown
    )
    return Grid(f"Queries that moved most: {title}", ("Query", f"{measure} change", "Text")[: 2 + has_text], rows)


def cost_blocks(report: RunReport, contests: Sequence[Contest]) -> list[Block]:
    """Seconds, tokens, memory, layers and format success of every row, and the Pareto figure."""
    blocks: list[Block] = []
    for place, contest in enumerate(contests):
        rows = []
        for label, cell in contest.cells.items():
            facts = cell.metrics
            tokens, seconds = facts.get("tokens_per_query"), seconds_of(cell)
            memory = facts.get("peak_memory_bytes") if method_kind(cell.method) != "first-stage" else None
            success = facts.get("success_rate")
            rows.append(
                (
                    label,
                    f"{seconds:.3f}" if seconds else "",
                    f"{tokens:.0f}" if tokens else "",
                    f"{memory / 2**30:.2f}" if memory else "",
                    f"{facts['layers_used']} of {facts['num_layers']}"
                    if facts.get("layers_used") and facts.get("num_layers")
                    else "",
                    f"{100 * success:.1f}" if success is not None else "",
                )
            )
        headers = (
            "Method",
            "Seconds per query",
            "Tokens per query",
            "Peak memory (GiB)",
            "Layers",
            "Format success (%)",
        )
        blocks.append(Grid(f"Costs on {condition_name(contest)}", headers, tuple(rows)))
        analyses = CellAnalyses.by_label(condition_name(contest), contest.cells)
        blocks += pareto_blocks(analyses, contest.measure, report.figures / f"costs_{place}", condition_name(contest))
    return blocks


def seconds_of(cell: Cell) -> float | None:
    """Seconds a query; None for a first stage, whose list was only read here and not made."""
    seconds = cell.metrics.get("seconds_per_query")
    return None if seconds is None or method_kind(cell.method) == "first-stage" else float(seconds)


def training_blocks(folder: Path, report: RunReport) -> list[Block]:
    """Learning curves of every training log below the folder."""
    from headrank.reports.figures import draw_learning_curves

    blocks: list[Block] = []
    for place, path in enumerate(find_training_logs(folder)):
        events = read_training_log(path)
        if "train" in events:
            png, _ = draw_learning_curves(events, report.figures / f"training_{place}")
            steps = max(step for points in events["train"].values() for step, _ in points)
            name = path.parent.relative_to(folder).as_posix()
            blocks.append(
                Picture(png, f"Learning curves over {steps} iterations.", f"Training of {name}: {steps} iterations.")
            )
    return blocks


def provenance_blocks(report: RunReport) -> list[Block]:
    """Versions once, then the command, prompt hash and query count of every row."""
    versions: dict[str, str] = {}
    rows = []
    for cell in report.cells:
        versions |= {str(key): str(value) for key, value in (cell.metrics.get("versions") or {}).items()}
        command = cell.metrics.get("command") or []
        shown = " ".join(command) if isinstance(command, list) else str(command)
        rows.append(
            (
                f"{method_name(cell.method)}, {cell.benchmark}",
                str(cell.metrics.get("prompt_hash") or ""),
                str(cell.metrics.get("num_queries", "")),
                shown,
            )
        )
    blocks: list[Block] = [Bullets(tuple(f"{name} {value}" for name, value in versions.items()))] if versions else []
    settings = report.settings
    blocks.append(
        Paragraph(
            f"Intervals are {100 * settings.level:g}% percentile bootstrap over queries ({settings.resamples} "
            "resamples, seed "
            f"{settings.seed}); "
            f"tests are paired {settings.test}, two-sided, Holm-corrected over the rows of a benchmark. "
            "Middle zone: retrieval ranks in the 25th-75th percentile; unjudged documents count as irrelevant."
        )
    )
    return [*blocks, Grid("Commands", ("Row", "Prompt", "Queries", "headrank ..."), tuple(rows))]
