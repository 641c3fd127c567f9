"""Which rows of a set of cells to set against each other, and what to say about the outcome in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrank.evaluation.comparison import Comparison, Pairing, Settings, compare
from headrank.evaluation.measures import Evaluation
from headrank.experiments.cells import Cell
from headrank.methods import method_kind, method_name, method_order

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Contest:
    """The cells of one benchmark and condition compared on one measure: the challenger against each of the others."""

    benchmark: str
    measure: str
    cells: Mapping[str, Cell]  # label -> cell, in table order
    challenger: str
    comparison: Comparison

    def against(self, label: str) -> Pairing:
        """The pairing in which the challenger met ``label``; positive differences mean the challenger is better."""
        return next(pairing for pairing in self.comparison.pairings if pairing.baseline == label)

    @property
    def opponents(self) -> list[str]:
        """Everybody but the challenger, in table order."""
        return [label for label in self.cells if label != self.challenger]


def label_cells(cells: Sequence[Cell]) -> dict[str, Cell]:
    """Short labels that tell the cells apart: the method alone, with the model or the seed where that is needed."""
    labelled: dict[str, Cell] = {}
    for cell in cells:
        label, seed = method_name(cell.method), cell.metrics.get("seed")
        twins = [other for other in cells if other.method == cell.method]
        if len(twins) > 1 and cell.model:
            label += f", {cell.model}"
        if sum(other.model == cell.model for other in twins) > 1 and seed is not None:
            label += f", seed {seed}"
        while label in labelled:
            label += "'"
        labelled[label] = cell
    return labelled


def choose_challenger(cells: Mapping[str, Cell], wanted: str | None = None) -> str:
    """The row the report is about: the one wanted, by label or method, where it is there, else plain HeadRank, else
    the last reranker.
    """
    for label, cell in cells.items():
        if wanted in (label, cell.method):
            return label
    ours = [label for label, cell in cells.items() if cell.method == "headrank"]
    variants = [label for label, cell in cells.items() if cell.method.startswith("headrank+")]
    return (ours or variants or list(cells))[-1]


def compare_methods(
    cells: Sequence[Cell], measure: str, challenger: str | None = None, settings: Settings | None = None
) -> Contest | None:
    """Compare cells of one benchmark and condition; None when fewer than two have per-query values of the measure."""
    ordered = sorted(
        cells,
        key=lambda cell: (
            method_kind(cell.method) != "first-stage",
            method_order(cell.method),
            cell.model,
            str(cell.path),
        ),
    )
    labelled = {label: cell for label, cell in label_cells(ordered).items() if cell.per_query(measure)}
    if len(labelled) < 2:
        return None
    chosen = choose_challenger(labelled, challenger)
    evaluations = {label: Evaluation({measure: cell.per_query(measure)}, 0, 0, 0) for label, cell in labelled.items()}
    reversed_pairs = compare(evaluations, settings, chosen)
    # compare() tests everything against one baseline; here the one row is the challenger of everything
    turned = [swap_sides(pairing) for pairing in reversed_pairs.pairings]
    comparison = Comparison(
        reversed_pairs.evaluations, reversed_pairs.intervals, tuple(turned), reversed_pairs.settings
    )
    return Contest(ordered[0].benchmark, measure, labelled, chosen, comparison)


def swap_sides(pairing: Pairing) -> Pairing:
    """The same pairing seen from the other side, so that the report's row is the challenger."""
    return Pairing(
        measure=pairing.measure,
        challenger=pairing.baseline,
        baseline=pairing.challenger,
        difference=-pairing.difference,
        interval=(-pairing.interval[1], -pairing.interval[0]),
        p_value=pairing.p_value,
        p_holm=pairing.p_holm,
        wins=pairing.losses,
        losses=pairing.wins,
        ties=pairing.ties,
    )


def verdict(pairing: Pairing) -> str:
    """better, worse or not distinguishable, at 5% after Holm's correction."""
    if pairing.p_holm >= SIGNIFICANT:
        return "not distinguishable"
    return "better" if pairing.difference > 0 else "worse"


def p_text(p_value: float) -> str:
    """'p = 0.03', or 'p < 0.001' below that."""
    return f"p = {p_value:.2g}" if p_value >= 0.001 else "p < 0.001"


def sentence(contest: Contest, opponent: str) -> str:
    """One sentence a person can repeat, with the numbers that support it."""
    pairing = contest.against(opponent)
    mine = contest.comparison.evaluations[contest.challenger].mean(contest.measure)
    theirs = contest.comparison.evaluations[opponent].mean(contest.measure)
    low, high = pairing.interval
    judged = {"better": "is better than", "worse": "is worse than"}.get(verdict(pairing), "cannot be told from")
    return (
        f"On {condition_name(contest)}, {contest.challenger} {judged} {opponent}: "
        f"{contest.measure} {100 * mine:.1f} against {100 * theirs:.1f}, "
        f"{100 * pairing.difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}], {p_text(pairing.p_holm)} (Holm), "
        f"{pairing.wins} queries up, {pairing.losses} down, {pairing.ties} equal."
    )


def best_training_free(contest: Contest) -> str | None:
    """The attention method without training that did best, None when there is none."""
    rivals = [
        label
        for label in contest.opponents
        if method_kind(contest.cells[label].method) == "attention"
        and not contest.cells[label].method.startswith("headrank")
    ]
    return max(rivals, key=lambda label: contest.comparison.evaluations[label].mean(contest.measure), default=None)


def changes(contest: Contest, opponent: str) -> dict[str, float]:
    """Query id -> challenger minus opponent on the queries both have."""
    mine = contest.comparison.evaluations[contest.challenger].values[contest.measure]
    theirs = contest.comparison.evaluations[opponent].values[contest.measure]
    return {query_id: mine[query_id] - theirs[query_id] for query_id in mine if query_id in theirs}


def moved_most(contest: Contest, opponent: str) -> str:
    """The query with the largest change, a gain before a loss of the same size, then the smaller id."""
    moved = changes(contest, opponent)
    return min(moved, key=lambda query_id: (-abs(moved[query_id]), -moved[query_id], query_id))


def condition_name(contest: Contest) -> str:
    """'dl19, top 40' with the order where it is not the retriever's."""
    depth, order = contest.cells[contest.challenger].condition
    return contest.benchmark + (f", top {depth}" if depth else "") + ("" if order == "retriever" else f", {order}")


def headline_opponents(contest: Contest) -> list[str]:
    """First stage, then the best training-free attention method, then HeadRank's own variants; else whoever is
    there.
    """
    first = [label for label in contest.opponents if method_kind(contest.cells[label].method) == "first-stage"]
    rival = best_training_free(contest)
    own = [label for label in contest.opponents if contest.cells[label].method.startswith("headrank")]
    return list(dict.fromkeys([*first, *([rival] if rival else []), *own])) or contest.opponents[:1]
