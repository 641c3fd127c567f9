"""Which cells may stand in one table: those of one document order, at one depth or each benchmark at its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from headrank.errors import InputError
from headrank.experiments.cells import Cell
from headrank.methods import method_kind


@dataclass(frozen=True)
class CellGroup:
    """Cells that may be compared, the first-stage runs of their benchmarks among them."""

    name: str
    key: str  # the same for file names
    order: str
    depths: tuple[int, ...]  # more than one where every benchmark has its own
    cells: tuple[Cell, ...]


def group_cells(cells: Sequence[Cell], own_depths: Mapping[str, int] | None = None) -> list[CellGroup]:
    """The groups in print order: for each document order, every benchmark at its own depth, then depth by depth.

    A benchmark's own depth is that of ``own_depths`` where it was run so, else the only depth it was run at. The group
    of own depths exists only where they differ (never with ``own_depths`` None), and a depth whose cells all stand in
    it is not repeated. First-stage runs alone make no group.
    """
    rerankers = [cell for cell in cells if method_kind(cell.method) != "first-stage"]
    groups: list[CellGroup] = []
    for order in sorted({cell.condition[1] for cell in rerankers}, key=lambda order: (order != "retriever", order)):
        mine = [cell for cell in rerankers if cell.condition[1] == order]
        own = [] if own_depths is None else _at_own_depth(mine, own_depths)
        suffix = "" if order == "retriever" else f", {order}"
        # where all benchmarks share a depth this group would be a copy of that depth's
        is_mixed = len({cell.condition[0] for cell in own}) > 1
        if is_mixed:
            groups.append(_group(f"each benchmark's own depth{suffix}", "own_depths", order, own, cells))
        for depth in sorted({cell.condition[0] for cell in mine}):
            chosen = [cell for cell in mine if cell.condition[0] == depth]
            if not is_mixed or not all(cell in own for cell in chosen):
                name = f"top {depth}" if depth else "any depth"
                groups.append(_group(name + suffix, name.replace(" ", "_"), order, chosen, cells))
    return groups


def _at_own_depth(cells: Sequence[Cell], own_depths: Mapping[str, int]) -> list[Cell]:
    depths: dict[str, set[int]] = {}
    for cell in cells:
        depths.setdefault(cell.benchmark, set()).add(cell.condition[0])
    own = {
        name: own_depths[name] if own_depths.get(name) in found else next(iter(found))
        for name, found in depths.items()
        if own_depths.get(name) in found or len(found) == 1
    }
    return [cell for cell in cells if own.get(cell.benchmark) == cell.condition[0]]


def _group(name: str, key: str, order: str, rerankers: Sequence[Cell], cells: Sequence[Cell]) -> CellGroup:
    """The rerankers with one first-stage run per benchmark and method, of the same depth if possible: no prompt
    order changes it.
    """
    depths = {cell.benchmark: cell.condition[0] for cell in rerankers}
    first: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        if method_kind(cell.method) == "first-stage" and cell.benchmark in depths:
            row = (cell.benchmark, cell.method)
            # a first stage is the same run at every depth; that of the rerankers' depth has their scores.jsonl
            if row not in first or cell.condition[0] == depths[cell.benchmark] != first[row].condition[0]:
                first[row] = cell
    # by identity: cells of two seeds may be equal in all that they hold
    chosen = {id(cell) for cell in (*rerankers, *first.values())}
    return CellGroup(
        name,
        key + ("" if order == "retriever" else f"_{order}"),
        order,
        tuple(sorted(set(depths.values()))),
        tuple(cell for cell in cells if id(cell) in chosen),
    )


def select_cells(cells: Sequence[Cell], methods: Sequence[str] = (), benchmarks: Sequence[str] = ()) -> list[Cell]:
    """The cells of these methods and benchmarks (shell patterns such as 'headrank*'); the first stage stays for
    comparison.
    """
    chosen = [
        cell
        for cell in cells
        if _matches(cell.benchmark, benchmarks)
        and (_matches(cell.method, methods) or method_kind(cell.method) == "first-stage")
    ]
    for kind, patterns, known in (
        ("method", methods, sorted({cell.method for cell in cells})),
        ("benchmark", benchmarks, sorted({cell.benchmark for cell in cells})),
    ):
        for pattern in patterns:
            # a pattern that matches nothing would give an empty table, which looks like results that are missing
            if not any(fnmatchcase(name, pattern) for name in known):
                raise InputError(f"{kind} {pattern!r} is not among the results: {', '.join(known)}")
    return chosen


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
