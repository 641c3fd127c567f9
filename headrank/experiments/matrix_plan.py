"""The plan of a benchmark matrix: which cells there are, where each lies, and which of them this process does.

A cell is model x method x benchmark at one depth, document order and seed. Its directory and its settings are fixed by
the plan, so that any process of a job array finds the same cells, and a finished cell is never computed again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.evaluation.measures import Missing
from headrank.formats import Collection
from headrank.methods import find_method
from headrank.reranking.model_sources import is_embedded

ORDERS = ("retriever", "reversed", "shuffled")
_NAMELESS = ("hf", "model")  # folders in which a study puts the models of its runs


@dataclass(frozen=True)
class MatrixBenchmark:
    """A collection to rerank: its folder, candidates per query, measures (the leading one first), treatment of
    missing queries.
    """

    name: str
    collection: Path
    depth: int
    measures: tuple[str, ...]
    missing: Missing = "zero"
    # the first-stage method whose run it has, where that is known; others have no row there
    retriever: str | None = None


@dataclass(frozen=True)
class MatrixModel:
    """A model under a short name; ``seed`` tells training runs apart that share the name."""

    name: str
    path: str
    seed: int | None = None
    is_made_here: bool = False  # by an earlier phase of the study: the folder may not be there yet


@dataclass(frozen=True)
class MatrixCell:
    """One unit of work. ``method`` is a label: a study's row may add a variant after a '+'."""

    model: MatrixModel | None  # None for first-stage rankers
    method: str
    heads: str | None
    benchmark: MatrixBenchmark
    depth: int
    order: str

    @property
    def base_method(self) -> str:
        """The registered method behind a variant."""
        return self.method.partition("+")[0]

    @property
    def folder(self) -> Path:
        """Relative directory: benchmark, condition, model, method, seed."""
        seed = f"-seed{self.model.seed}" if self.model is not None and self.model.seed is not None else ""
        model = _slug(self.model.name) if self.model is not None else "first-stage"
        return Path(_slug(self.benchmark.name)) / f"top{self.depth}-{self.order}" / model / (_slug(self.method) + seed)

    def identity(self) -> dict[str, Any]:
        """What names the cell; the files behind it are looked at by content, size and time (see cell_jobs)."""
        model = (
            {"name": self.model.name, "path": self.model.path, "seed": self.model.seed}
            if self.model is not None
            else None
        )
        return {
            "model": model,
            "method": self.method,
            "benchmark": self.benchmark.name,
            "depth": self.depth,
            "order": self.order,
        }


def plan_cells(
    models: Sequence[MatrixModel],
    methods: Sequence[str],
    benchmarks: Sequence[MatrixBenchmark],
    heads: Mapping[str, str],
    *,
    depths: Sequence[int] = (),
    orders: Sequence[str] = ("retriever",),
) -> list[MatrixCell]:
    """All cells in a fixed order; a first-stage method once per benchmark and depth, where the run is its own.

    What cannot run is refused before anything does.
    """
    for name, given in (("methods", methods), ("depths", depths), ("orders", orders)):
        twice = [value for value in given if list(given).count(value) > 1]
        if twice:
            raise InputError(f"`{name}`: duplicate value {twice[0]}; give it once")
    if depths and min(depths) < 1:
        raise InputError(f"`depths` {min(depths)}: at least one candidate must be reranked; give numbers from 1")
    cells = []
    for benchmark in benchmarks:
        if Collection.open(benchmark.collection).run_path is None:
            raise InputError(
                f"benchmark {benchmark.name}: {benchmark.collection} has no first-stage run; make it with 'headrank "
                "retrieve'"
            )
        if Collection.open(benchmark.collection).qrels_path is None:
            raise InputError(
                f"benchmark {benchmark.name}: {benchmark.collection} has no qrels.txt, and cells are measured by it"
            )
        for depth in depths or (benchmark.depth,):
            cells += [
                MatrixCell(None, method, None, benchmark, depth, "retriever")
                for method in methods
                if find_method(method).kind == "first-stage" and benchmark.retriever in (None, method)
            ]
            cells += [
                MatrixCell(model, method, find_heads(model, method, heads), benchmark, depth, order)
                for order in orders
                for model in models
                for method in methods
                if find_method(method).kind != "first-stage"
            ]
    # two cells in one folder would overwrite each other and still look finished
    folders = [cell.folder for cell in cells]
    twice = sorted({str(folder) for folder in folders if folders.count(folder) > 1})
    if twice:
        raise InputError(
            f"two cells would share {twice[0]}; models are called by the last part of their path: rename one, or "
            "write a study file, "
            "where a row has a name, a seed and a variant"
        )
    return cells


def share_forwards(cells: Sequence[MatrixCell]) -> list[list[MatrixCell]]:
    """The cells grouped by forward: attention methods that read one model over the same lists; every other cell
    alone.
    """
    groups: dict[object, list[MatrixCell]] = {}
    for cell in cells:
        is_attention = find_method(cell.base_method).kind == "attention"
        key = (cell.model, cell.benchmark.name, cell.depth, cell.order) if is_attention else cell.folder
        groups.setdefault(key, []).append(cell)
    return list(groups.values())


def find_heads(model: MatrixModel, method: str, heads: Mapping[str, str]) -> str | None:
    """The heads.json of a method, given or inside an exported HeadRank model (then None)."""
    known = find_method(method)
    if method in heads:
        return heads[method]
    if not known.needs_heads or (method == "headrank" and _brings_heads(model.path)):
        return None
    raise InputError(
        f"method {method!r} on {model.name} needs heads: run 'headrank select-heads --method {known.selection} "
        "--output FILE' on that "
        "model and give FILE with `heads`"
    )


def _brings_heads(model: str) -> bool:
    """An exported model has its heads beside it, the embedded one in the package."""
    return is_embedded(model) or (Path(model) / "headrank.json").is_file()


def model_name(path: str) -> str:
    """What a model is called in tables: the last part of its path, or the part before where that says nothing:
    runs/demo/model is demo.
    """
    place = Path(path)
    return place.parent.name if place.name in _NAMELESS and place.parent.name else place.name or path


def parse_shard(text: str | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """(index, count): from I/N, else from torchrun's RANK and WORLD_SIZE, else from a SLURM array, else (0, 1)."""
    if text is not None:
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if not found or int(found[1]) >= int(found[2]):
            raise InputError(f"`shard` {text!r}: write I/N with I from 0 to N-1")
        return int(found[1]), int(found[2])
    # before SLURM's numbers: torchrun inside an array task divides the task's cells
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        return int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if "SLURM_ARRAY_TASK_COUNT" in environment:
        # arrays may begin at any number: --array=3-10
        first, last = int(environment.get("SLURM_ARRAY_TASK_MIN", "0")), environment.get("SLURM_ARRAY_TASK_MAX")
        index, count = int(environment["SLURM_ARRAY_TASK_ID"]) - first, int(environment["SLURM_ARRAY_TASK_COUNT"])
        if index >= count or (last is not None and int(last) - first + 1 != count):
            raise InputError(
                f"SLURM array of {count} tasks with gaps (this one is {index + first}): cells cannot be counted off "
                "by them; "
                f"give `shard` I/N or an array of 0-{count - 1}"
            )
        return index, count
    return 0, 1


def _slug(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", text).strip("_.") or "unnamed"
