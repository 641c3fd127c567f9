"""From the rows of a study to cells: which model and heads a row reads in which run, on which lists, and after which
phases.

A row that reads what a run made gives one cell per run. Training seeds become the seeds of one model; named runs become
variants of the method (headrank+no-omega). A row that reads nothing of a run gives one cell for the whole study.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from headrank.errors import InputError
from headrank.evaluation.measures import measure_name
from headrank.experiments.cell_jobs import CellGroup, CellSettings
from headrank.experiments.fused_cells import FusedCell
from headrank.experiments.matrix_plan import MatrixBenchmark, MatrixCell, MatrixModel, model_name
from headrank.experiments.phases import Command, Phase
from headrank.experiments.plan import HEADRANK, Plan, RunPlaces, collection_files, given
from headrank.experiments.plan_heads import heads_path, needles_phase, plan_heads, selection_phase
from headrank.experiments.plan_selections import plan_selection
from headrank.experiments.study import Benchmark, Row
from headrank.files import plain_or_gzipped
from headrank.formats import read_run
from headrank.methods import METHODS, POLICIES, find_method, method_name
from headrank.reranking import shipped_readouts
from headrank.reranking.model_sources import is_embedded

DEFAULT_DEPTH, DEFAULT_MEASURES = 40, ("nDCG@10",)


@dataclass(frozen=True)
class Source:
    """What a row reads in one run: a model and heads, the phases that make them, the files that nobody makes."""

    model: str
    heads: Path | None = None
    needs: tuple[str, ...] = ()
    external: tuple[Path, ...] = ()
    is_made_here: bool = False


@dataclass(frozen=True)
class PlannedBenchmark:
    """A benchmark of the study, what its cells need, and how they are reranked."""

    matrix: MatrixBenchmark
    depths: tuple[int, ...]
    settings: CellSettings
    needs: tuple[str, ...]
    external: tuple[Path, ...]
    remedy: str = ""


@dataclass(frozen=True)
class PlannedCell:
    """A cell, the row it belongs to, and how it is made."""

    cell: MatrixCell
    row: Row
    settings: CellSettings
    source: Source
    benchmark: PlannedBenchmark

    @property
    def title(self) -> str:
        """Its name in the study's own table."""
        return self.row.title or method_name(self.cell.method)


@dataclass
class _Group:
    cells: list[MatrixCell] = field(default_factory=list)
    needs: dict[str, None] = field(default_factory=dict)  # in the order of the plan
    external: dict[Path, None] = field(default_factory=dict)


def plan_cells_of_study(plan: Plan) -> list[PlannedCell]:
    """Add the phases of all cells to the plan, and return the cells in the order of the file."""
    study = plan.loaded.study
    planned: list[PlannedCell] = []
    for name, benchmark in study.benchmarks.items():
        prepared = _plan_benchmark(plan, name, benchmark)
        for row in study.measure.rows:
            wanted = row.benchmarks is None or name in row.benchmarks
            if wanted and (benchmark.methods is None or row.method in benchmark.methods):
                planned += _cells_of_row(plan, row, prepared)
    _refuse_shared_folders(planned)
    read = [each for each in planned if each.row.fuse is None]
    made_by = _add_groups(plan, read)
    for each in planned:
        if each.row.fuse is not None:
            _add_fused(plan, each, read, made_by)
    return planned


def cells_folder(plan: Plan) -> Path:
    """Where the cells of a study lie."""
    return plan.output / "cells"


def _add_groups(plan: Plan, planned: list[PlannedCell]) -> dict[Path, str]:
    """A phase for all cells that are read off one forward; returns the phase of every cell's folder."""
    groups: dict[object, _Group] = {}
    settings: dict[object, CellSettings] = {}
    for each in planned:
        cell = each.cell
        shares = plan.loaded.study.measure.share_forward and find_method(cell.base_method).kind == "attention"
        # 'embedded' with these is another model than with other heads
        is_trained = cell.heads in shipped_readouts.TRAINED
        key: object = (
            (cell.model, is_trained, cell.benchmark.name, cell.depth, cell.order, each.settings)
            if shares
            else cell.folder
        )
        group = groups.setdefault(key, _Group())
        settings[key] = each.settings
        group.cells.append(cell)
        group.needs |= dict.fromkeys((*each.benchmark.needs, *each.source.needs))
        group.external |= dict.fromkeys((*each.benchmark.external, *each.source.external))
    remedies = {each.cell.benchmark.name: each.benchmark.remedy for each in planned}
    made_by: dict[Path, str] = {}
    for key, group in groups.items():
        cells = CellGroup(tuple(group.cells), settings[key], cells_folder(plan))
        phase = cells.phase(tuple(group.needs), tuple(group.external))
        name = plan.add(replace(phase, remedy=remedies[group.cells[0].benchmark.name]))
        made_by |= {cell.folder: name for cell in group.cells}
    return made_by


def _add_fused(plan: Plan, planned: PlannedCell, read: list[PlannedCell], made_by: Mapping[Path, str]) -> None:
    """The phase of a row with ``fuse``: it reads the run of the row that is the same but for that."""

    def identity(each: PlannedCell) -> tuple[object, ...]:
        cell = each.cell
        return (cell.model, cell.base_method, cell.heads, cell.benchmark.name, cell.depth, cell.order, each.settings)

    found = next((each.cell for each in read if identity(each) == identity(planned)), None)
    if found is None:
        raise InputError(
            f"{plan.loaded.path}: measure.rows: {planned.cell.method} has 'fuse', and no row without it reads the "
            "same model, heads "
            "and layout; add that row"
        )
    assert planned.row.fuse is not None
    fused = FusedCell(found, planned.cell, planned.settings, cells_folder(plan), planned.row.fuse)
    plan.add(fused.phase((made_by[found.folder],)))


def _plan_benchmark(plan: Plan, name: str, benchmark: Benchmark) -> PlannedBenchmark:
    from data_tools.benchmarks import benchmark_home, find_benchmark

    needs: tuple[str, ...] = ()
    remedy = ""
    if benchmark.collection is not None:
        measures = tuple(map(measure_name, benchmark.measures or DEFAULT_MEASURES))
        matrix = MatrixBenchmark(name, benchmark.collection, DEFAULT_DEPTH, measures)
    else:
        known = find_benchmark(name)
        measures = tuple(map(measure_name, benchmark.measures or known.measures))
        home = plan.output / "benchmarks" if benchmark.prepare else benchmark_home()
        # the paper averages over the queries that have candidates
        matrix = MatrixBenchmark(
            known.name, home / known.name, known.depth, measures, missing="skip", retriever=known.retriever
        )
        remedy = f"make it with 'headrank benchmark prepare {known.name} --from ...', or give benchmarks.{name}.prepare"
        if benchmark.prepare is not None:
            needs = (_plan_preparation(plan, known.name, benchmark.prepare),)
    settings = CellSettings(
        query_rows=plan.loaded.study.measure.query_rows,
        max_words=benchmark.max_words,
        device=plan.loaded.study.measure.device,
        batch_size=plan.loaded.study.measure.batch_size,
        shuffle_seed=plan.loaded.study.measure.shuffle_seed,
        only=str(benchmark.queries) if benchmark.queries else None,
        command=("experiment", "run", str(plan.loaded.path)),
    )
    depths = useful_depths(matrix.collection, tuple(benchmark.depths or (matrix.depth,)))
    external = (*given(benchmark.queries), *(() if needs else collection_files([matrix.collection])))
    return PlannedBenchmark(matrix, depths, settings, needs, external, remedy)


def _plan_preparation(plan: Plan, name: str, source: str) -> str:
    home = plan.output / "benchmarks"
    words = (*HEADRANK, "benchmark", "prepare", name, "--from", source, "--home", str(home), "--overwrite")
    reads = (Path(source),) if Path(source).exists() else ()
    made = plan.artifact(f"prepare/{name}", home / name, {"from": source}, reads, "benchmark.json")
    return plan.add(Phase(f"prepare/{name}", Command(words), (made,), prints=True))


@lru_cache(maxsize=100)
def useful_depths(collection: Path, depths: tuple[int, ...]) -> tuple[int, ...]:
    """Those that give other lists than a smaller one: a collection with 20 candidates per query has no depth 40."""
    try:
        longest = max(map(len, read_run(plain_or_gzipped(collection, "run.bm25.txt")).values()), default=0)
    except InputError:
        return depths  # not there yet
    # depth 40 of lists of 20 is depth 20 again under another name
    ordered = sorted(depths)
    return tuple(depth for place, depth in enumerate(ordered) if place == 0 or ordered[place - 1] < longest)


def _cells_of_row(plan: Plan, row: Row, benchmark: PlannedBenchmark) -> Iterator[PlannedCell]:
    measure = plan.loaded.study.measure
    method = find_method(row.method)
    if method.kind == "first-stage":
        if benchmark.matrix.retriever in (None, row.method):
            for depth in row.depths or benchmark.depths:
                cell = MatrixCell(None, row.method, None, benchmark.matrix, depth, "retriever")
                yield PlannedCell(cell, row, benchmark.settings, Source(""), benchmark)
        return
    api_base = measure.api_base if method.kind == "generative" else None
    dtype = row.dtype or measure.dtype
    settings = replace(benchmark.settings, document_layout=row.layout, api_base=api_base, dtype=dtype)
    if row.prompt is not None:  # all of its switches, those of 'measure' notwithstanding
        settings = replace(settings, prompt=row.prompt, query_rows=None)
    if method.kind == "generative":  # it writes; no rows are read
        settings = replace(settings, query_rows=None)
    for variant, seed, source in _sources(plan, row):
        name = row.name or (model_name(row.path) if row.path is not None else _model_name(plan))
        model = MatrixModel(name, source.model, seed, is_made_here=source.is_made_here)
        label = "+".join(filter(None, (row.method, "-".join(filter(None, (row.variant, variant))))))
        heads = str(source.heads) if source.heads is not None else None
        for depth in row.depths or benchmark.depths:
            for order in row.orders or measure.orders:
                cell = MatrixCell(model, label, heads, benchmark.matrix, depth, order)
                yield PlannedCell(cell, row, settings, source, benchmark)


def _model_name(plan: Plan) -> str:
    study = plan.loaded.study
    return study.name or Path(study.model).name or study.model


def _sources(plan: Plan, row: Row) -> list[tuple[str, int | None, Source]]:
    """(variant, seed, what is read) per run that makes a difference; ('', None, ...) where none does."""
    if row.path is not None:
        return [("", row.seed, _given_model(row, row.path))]
    runs = [places for places in plan.runs if not row.runs or plan.loaded.names[places.name][0] in row.runs]
    if row.model == "steps":
        return list(_step_sources(plan, runs))
    found = {places.name: _source(plan, row, places) for places in runs}
    if not plan.loaded.study.seeds:
        # a row that reads nothing of a run would otherwise be measured once per run, with equal numbers
        is_one = len(set(found.values())) == 1
        return (
            [("", None, next(iter(found.values())))]
            if is_one
            else [(name, None, source) for name, source in found.items()]
        )
    names = {name: plan.loaded.names[name] for name in found}
    has_several = len({run for run, _ in names.values()}) > 1
    if row.model == "base" and row.heads != "after":  # the same for every seed
        by_run = {run: found[name] for name, (run, _) in reversed(names.items())}
        first = {run: by_run[run] for run in dict.fromkeys(run for run, _ in names.values())}
        if len(set(first.values())) == 1 or not has_several:
            return [("", None, next(iter(first.values())))]
        return [(run, None, source) for run, source in first.items()]
    is_base = row.model == "base"  # heads of a seed in the untrained model are variants of it
    return [
        (
            "-".join(filter(None, (run if has_several else "", str(seed) if is_base else ""))),
            None if is_base else seed,
            found[name],
        )
        for name, (run, seed) in names.items()
    ]


def _step_sources(plan: Plan, runs: list[RunPlaces]) -> Iterator[tuple[str, int | None, Source]]:
    """A row per run and kept checkpoint: headrank+step-1800; of training seeds the step is the variant."""
    has_several = len({plan.loaded.names[places.name][0] for places in runs}) > 1
    for places in runs:
        run, seed = plan.loaded.names[places.name]
        if not places.steps:
            raise InputError(
                f"{plan.loaded.path}: measure.rows: model 'steps' needs checkpoints that are kept: training.keep_steps"
            )
        for step, (path, phase) in places.steps.items():
            name = "-".join(filter(None, (run if has_several else "", f"step-{step}")))
            yield name, seed, Source(str(path), None, (phase,), is_made_here=True)


def _given_model(row: Row, path: str) -> Source:
    """A model that nobody makes here, with the heads of the row or its own."""
    folder = (Path(path),) if Path(path).is_dir() else ()
    if row.heads is not None:
        return Source(
            path, Path(row.heads), (), (*folder, *(() if row.heads in shipped_readouts.NAMES else (Path(row.heads),)))
        )
    its_own = (Path(path) / "headrank.json",) if METHODS[row.method].needs_heads and not is_embedded(path) else ()
    return Source(path, None, (), (*folder, *its_own))


def _source(plan: Plan, row: Row, places: RunPlaces) -> Source:
    heads, heads_phase, external = _heads(plan, row, places)
    if row.model == "base":
        return Source(places.recipe.model, heads, given_phases(heads_phase), external)
    path = places.final if row.model == "final" else places.trained
    if path is None:
        run = f" of run '{places.name}'" if places.name else ""
        raise InputError(
            f"{plan.loaded.path}: measure.rows: {row.method} reads the {row.model} model{run}, and there is none: "
            "training or export "
            "is null; say model: base"
        )
    return Source(str(path), heads, given_phases(places.phases[row.model], heads_phase), external, is_made_here=True)


def given_phases(*names: str) -> tuple[str, ...]:
    """Without '' , which stands for a file that no phase makes, and without repetition."""
    return tuple(dict.fromkeys(name for name in names if name))


def _heads(plan: Plan, row: Row, places: RunPlaces) -> tuple[Path | None, str, tuple[Path, ...]]:
    """(file, the phase that makes it, the file if nobody does)."""
    recipe, wanted = places.recipe, row.heads
    if wanted is None:
        return None, "", ()
    if wanted in ("before", "after"):
        path = places.heads_before if wanted == "before" else places.heads_after
        if path is None:
            raise InputError(
                f"{plan.loaded.path}: measure.rows: {row.method} wants the heads {wanted} training, and none are "
                "selected then; "
                "set heads or reselect, or give a heads.json"
            )
        phase = places.phases.get(f"heads_{wanted}", "")
        return path, phase, () if phase else (path,)
    if recipe.heads is not None and recipe.heads.file is None and wanted in recipe.heads.methods:
        if wanted == "niah":
            return heads_path(plan, places.name, recipe, wanted), needles_phase(plan, places.name, recipe), ()
        plan_heads(plan, places.name, recipe)
        return heads_path(plan, places.name, recipe, wanted), selection_phase(plan, places.name, recipe), ()
    if wanted in recipe.selections:
        return plan_selection(plan, places.name, recipe, wanted)
    if wanted in POLICIES:
        raise InputError(
            f"{plan.loaded.path}: measure.rows: {row.method} wants heads of '{wanted}'; add it to heads.methods"
        )
    return Path(wanted), "", () if wanted in shipped_readouts.NAMES else (Path(wanted),)


def _refuse_shared_folders(planned: list[PlannedCell]) -> None:
    seen: dict[Path, PlannedCell] = {}
    for each in planned:
        other = seen.setdefault(each.cell.folder, each)
        if other is not each:
            raise InputError(
                f"measure.rows: two rows are both called {each.cell.method} on {each.cell.benchmark.name} "
                f"({each.cell.folder}); give one of them a variant or a name"
            )
