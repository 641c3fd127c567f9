"""What the first owner of a node runs: make test-gpu. One report file (gpu-report.json) says what every check found;
send it back.

The logic of the checks is tested without a GPU in tests/distributed/test_gpu_acceptance.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron_patches.planner.shapes import PAPER_HEADS, shape_of
from megatron_patches.shape import valid_tensor_parallel_sizes
from tests.gpu import checks
from tests.gpu.bench import Bench, start_with_torchrun
from tests.gpu.random_models import write_random_model
from tests.gpu.report import Report
from tests.toy_training import write_toy_lists

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(3600)]

SMALLEST, LARGEST = "Qwen3-0.6B", "Qwen3-4B"
LAUNCHERS = {f"train_{name.lower().replace('-', '_')}": name for name in PAPER_HEADS}
PAPER_TP = {"Qwen3-0.6B": 4, "Qwen3-1.7B": 4, "Qwen3-4B": 8}
COMPARED = (
    checks.bf16_scores_are_as_near_as_hugging_faces,
    checks.float32_is_exact,
    checks.bf16_is_the_same_at_every_size,
    checks.sequence_parallelism_changes_memory_only,
    checks.recomputation_changes_memory_only,
    checks.resumed_runs_go_on,
)


@pytest.fixture(scope="session")
def report() -> Report:
    return Report(Path(os.environ.get("HEADRANK_GPU_REPORT", "gpu-report.json")).absolute())


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A function from a name to the directory of a random model of that size."""
    made: dict[str, Path] = {}

    def directory_of(name: str) -> Path:
        if name not in made:
            made[name], _ = write_random_model(tmp_path_factory.mktemp("models") / name, name)
        return made[name]

    return directory_of


@pytest.fixture(scope="session")
def bench(models, tmp_path_factory) -> Bench:
    from megatron_patches.layer_spec import has_transformer_engine

    place = tmp_path_factory.mktemp("bench")
    write_toy_lists(place / "lists", 0, 16, num_documents=20, num_words=30)
    sizes = [size for size in (1, 4, 8) if size in sizes_of(SMALLEST)]
    engines = ("local", "transformer_engine") if has_transformer_engine() else ("local",)
    model = models(SMALLEST)
    return Bench(
        place, start_with_torchrun, tuple(sizes), engines, model, model / "heads.json", place / "lists", has_gpu=True
    )


@pytest.fixture(scope="session")
def long_lists(tmp_path_factory) -> Path:
    """A hundred documents of some eighty tokens."""
    folder = tmp_path_factory.mktemp("long") / "lists"
    write_toy_lists(folder, 0, 4, num_documents=100, num_words=60)
    return folder


def sizes_of(name: str) -> list[int]:
    """The tensor-parallel sizes that model and machine allow."""
    return [size for size in valid_tensor_parallel_sizes(shape_of(name)) if size <= torch.cuda.device_count()]


@pytest.mark.parametrize("check", COMPARED, ids=lambda check: check.__name__)
def test_numbers(check, bench: Bench, report: Report) -> None:
    with report.check(check.__name__) as facts:
        check(bench, facts)


def test_memory_is_what_the_planner_says(bench: Bench, report: Report, models, long_lists: Path) -> None:
    with report.check("memory_is_what_the_planner_says") as facts:
        checks.memory_is_what_the_planner_says(
            bench, facts, model=models(LARGEST), name=LARGEST, lists=long_lists, documents=100
        )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(launcher: str, bench: Bench, report: Report, models, long_lists: Path) -> None:
    name = LAUNCHERS[launcher]
    size = max(size for size in sizes_of(name) if size <= PAPER_TP[name])
    processes = torch.cuda.device_count() // size * size
    with report.check(launcher) as facts:
        checks.launcher_trains(
            bench, facts, launcher=launcher, model=models(name), lists=long_lists, processes=processes, size=size
        )
