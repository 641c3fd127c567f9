"""`headrank report --run`: one page about one experiment: did it get better, where, at what cost, which heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.experiments.cells import Cell
from headrank.formats import write_json
from headrank.reports.conditions import group_cells
from headrank.reports.contests import (
    Contest,
    changes,
    compare_methods,
    condition_name,
    headline_opponents,
    moved_most,
    p_text,
    sentence,
    verdict,
)
from headrank.reports.grids import Grid
from headrank.reports.head_report import head_blocks
from headrank.reports.page import Block, Bullets, Page, Paragraph, Picture
from headrank.reports.run_sections import (
    RunReport,
    cost_blocks,
    provenance_blocks,
    seconds_of,
    training_blocks,
    where_blocks,
)


def write_run_report(folder: Path, report: RunReport, title: str | None = None) -> list[Path]:
    """Write report.md, report.html, report.json and figures/ for the cells below ``folder``; returns the written
    pages.
    """
    page = Page(title or f"HeadRank report: {folder.resolve().name}")
    contests = _contests(report)
    page.add("Did it get better?", _outcome_blocks(report, contests))
    page.add("Where?", where_blocks(report, contests))
    page.add("At what cost?", cost_blocks(report, contests))
    page.add("Which heads?", head_blocks(report.head_sets, report.figures) if report.head_sets else [])
    page.add("How did training go?", training_blocks(folder, report))
    page.add("How was this made?", provenance_blocks(report))
    write_json(report.output / "report.json", report.facts)
    return [*page.write(report.output), report.output / "report.json"]


def leading_measure(cells: Sequence[Cell]) -> str:
    """The measure a benchmark is judged by: the first that its cells list."""
    return next(iter(cells[0].metrics["measures"]))


def _contests(report: RunReport) -> list[Contest]:
    """One contest for each benchmark and condition that has at least two comparable rows."""
    known = dict.fromkeys(measure for cell in report.cells for measure in cell.metrics["measures"])
    if report.measure is not None and report.measure not in known:
        raise InputError(
            f"`measure` {report.measure}: no result has it, they have {', '.join(known)}; evaluate with `measures` "
            "first"
        )
    contests = []
    for group in group_cells(report.cells):
        for benchmark in dict.fromkeys(cell.benchmark for cell in group.cells):
            chosen = [cell for cell in group.cells if cell.benchmark == benchmark]
            contest = compare_methods(
                chosen, report.measure or leading_measure(chosen), report.challenger, report.settings
            )
            if contest is not None:
                contests.append(contest)
    _require_challenger(report.challenger, contests)
    return contests


def _require_challenger(wanted: str | None, contests: Sequence[Contest]) -> None:
    """Refuse a challenger that no contest has; contests that lack it are about their default row."""
    if wanted is None or not contests:
        return
    if not any(wanted in (contest.challenger, contest.cells[contest.challenger].method) for contest in contests):
        rows = dict.fromkeys(label for contest in contests for label in contest.cells)
        raise InputError(f"`challenger` {wanted!r} is not among the results: {', '.join(rows)}")


def _outcome_blocks(report: RunReport, contests: Sequence[Contest]) -> list[Block]:
    from headrank.reports.figures import draw_measures

    blocks: list[Block] = []
    if not contests:
        return [
            Paragraph("Fewer than two comparable results with per-query values were found, so nothing can be compared.")
        ]
    for place, contest in enumerate(contests):
        told = [sentence(contest, opponent) for opponent in headline_opponents(contest)]
        blocks.append(Paragraph(told[0], is_lead=place == 0))
        if told[1:]:
            blocks.append(Bullets(tuple(told[1:])))
        blocks.append(_contest_grid(contest))
        rows = [
            (
                cell.method,
                label,
                contest.comparison.evaluations[label].mean(contest.measure),
                contest.comparison.intervals[label][contest.measure],
            )
            for label, cell in contest.cells.items()
        ]
        queries = len(contest.comparison.evaluations[contest.challenger].values[contest.measure])
        png, _ = draw_measures(
            rows, contest.measure, report.figures / f"measures_{place}", f"{condition_name(contest)}, {queries} queries"
        )
        told_means = ", ".join(f"{label} {100 * mean:.1f}" for _, label, mean, _ in rows)
        blocks.append(
            Picture(
                png,
                f"{contest.measure}: {told_means}.",
                f"{contest.measure} on {condition_name(contest)} with 95% bootstrap intervals.",
            )
        )
        report.facts.setdefault("contests", []).append(_contest_facts(contest))
    return blocks


def _contest_grid(contest: Contest) -> Grid:
    rows = []
    for label, cell in contest.cells.items():
        evaluation, (low, high) = (
            contest.comparison.evaluations[label],
            contest.comparison.intervals[label][contest.measure],
        )
        against = ("", "", "")
        if label != contest.challenger:
            pairing = contest.against(label)
            against = (
                f"{100 * pairing.difference:+.2f}",
                p_text(pairing.p_holm).removeprefix("p ").removeprefix("= "),
                verdict(pairing),
            )
        layers, total = cell.metrics.get("layers_used"), cell.metrics.get("num_layers")
        seconds = seconds_of(cell)
        rows.append(
            (
                label,
                f"{100 * evaluation.mean(contest.measure):.2f} [{100 * low:.1f}, {100 * high:.1f}]",
                *against,
                f"{seconds:.2f}" if seconds else "",
                f"{layers} of {total}" if layers and total else "",
            )
        )
    name = contest.challenger
    headers = (
        "Method",
        f"{contest.measure} × 100",
        f"{name} minus this",
        "p (Holm)",
        f"{name} is",
        "Seconds per query",
        "Layers used",
    )
    return Grid(f"{condition_name(contest)}: {contest.measure}, and {name} against each row", headers, tuple(rows))


def _contest_facts(contest: Contest) -> dict[str, Any]:
    opponent = headline_opponents(contest)[0]
    query_id = moved_most(contest, opponent)
    return {
        "benchmark": contest.benchmark,
        "condition": list(contest.cells[contest.challenger].condition),
        "measure": contest.measure,
        "challenger": contest.challenger,
        "means": {
            label: evaluation.mean(contest.measure) for label, evaluation in contest.comparison.evaluations.items()
        },
        "moved_most": {"query_id": query_id, "against": opponent, "change": changes(contest, opponent)[query_id]},
        "comparisons": [vars(pairing) for pairing in contest.comparison.pairings],
    }
