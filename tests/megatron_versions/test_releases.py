"""Every supported release of Megatron-Core trains, saves, resumes and exports alike: 'make test-megatron-versions'
fetches them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_patches.versions import TESTED
from tests.distributed.launcher import QUIET_ENVIRONMENT, ROOT, free_port, rank_environment
from tests.megatron_versions import releases
from tests.toy_training import make_toy_job

pytestmark = pytest.mark.timeout(2400)  # a minute each on an idle machine
FOLDER = releases.cache_folder()
needs_wheels = pytest.mark.skipif(
    FOLDER is None, reason="fetches wheels: make test-megatron-versions (HEADRANK_MEGATRON_WHEELS=folder)"
)
SAME_LOSS = 1e-6
SAME_TRAINER = 1e-5


def declared() -> SpecifierSet:
    """What setup.py allows."""
    found = re.search(r'"(megatron-core[^"]*)"', (ROOT / "setup.py").read_text())
    assert found is not None
    return Requirement(found[1]).specifier


def test_the_declared_range_ends_where_the_tested_one_does() -> None:
    oldest, newest = Version(TESTED[0]), Version(TESTED[-1])
    assert all(version in declared() for version in TESTED)
    assert (
        f"{newest.major}.{newest.minor + 1}.0" not in declared() and f"{newest.major}.{newest.minor}.99" in declared()
    )
    assert f"{oldest.major}.{oldest.minor}.{oldest.micro - 1}" not in declared()


@needs_wheels
def test_the_newest_release_on_the_index_is_among_the_tested() -> None:
    assert releases.newest_release(FOLDER) == TESTED[-1]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy_job(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def lives(toy, tmp_path_factory):
    """Release -> what its processes found; each also exports what the releases before it saved, and the oldest the
    newest's.
    """
    place, found = tmp_path_factory.mktemp("lives"), {}
    for version in TESTED:
        found[version] = live(version, toy, place / version, [place / older / "run" for older in found])
    again = place / "oldest again"
    found["oldest again"] = live(TESTED[0], toy, again, [place / TESTED[-1] / "run"])
    return found


def live(version: str, toy, place: Path, others: list[Path]) -> dict:
    place.mkdir()
    flags = toy.flags("--global-batch-size", "2", "--lr-decay-style", "constant")
    said = run_with(version, "exercise", place, json.dumps(flags), json.dumps([str(other) for other in others]))
    return {**json.loads((place / "found.json").read_text()), "said": said}


def run_with(version: str, module: str, place: Path, *arguments: str) -> str:
    """Two processes of a module of this folder under a release; what they said."""
    home = releases.release(version, FOLDER)
    needed = releases.required_python(home)
    if "{}.{}".format(*sys.version_info) not in SpecifierSet(needed):
        print(f"megatron-core {version} wants Python {needed}; its Python code runs with {sys.version.split()[0]}")
    path = [str(ROOT), str(home)]
    if Version(version) >= Version("0.18"):
        path.append(str(releases.triton(FOLDER)))
    environment = {**os.environ, **QUIET_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.megatron_versions.{module}", str(place), *arguments]
    port = free_port()
    with open(place / "log", "wb") as log:
        ranks = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment | rank_environment(rank, 2, port),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]
        codes = [process.wait(timeout=900) for process in ranks]
    said = (place / "log").read_text(errors="replace")
    assert codes == [0, 0], said[-6000:]
    return said


@needs_wheels
@pytest.mark.parametrize("version", TESTED[1:])  # the wheel of 0.16 has no megatron.training
@pytest.mark.parametrize("split", ["tensor", "data"])
def test_megatrons_trainer_has_the_losses_of_ours(version, split, toy, tmp_path) -> None:
    flags = toy.flags("--global-batch-size", "2", "--train-iters", "10", "--clip-grad", "1.0")
    more = (
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
        if split == "tensor"
        else ["--use-distributed-optimizer"]
    )
    said = run_with(version, "trainer", tmp_path, json.dumps([*flags, *more]))
    ours = json.loads((tmp_path / "ours.json").read_text())
    told = re.findall(r"iteration +\d+/ +10 .*headrank loss: ([0-9.E+-]+)", said.split("MEGATRON'S TRAINER")[1])
    theirs = [float(loss) for loss in told]
    theirs[1] = 2 * theirs[1] - theirs[0]  # Megatron tells the first step, and then the mean of the first two
    assert len(ours) == 10 and theirs == pytest.approx(ours, rel=SAME_TRAINER)
    assert (tmp_path / "megatron" / "iter_0000010").is_dir()


@needs_wheels
@pytest.mark.parametrize("version", TESTED)
def test_a_release_trains_resumes_at_another_size_and_exports_as_the_oldest_does(lives, version) -> None:
    mine, oldest = lives[version], lives[TESTED[0]]
    assert mine["release"].startswith(version)
    assert len(mine["losses"]) == 4
    assert mine["losses"] == pytest.approx(oldest["losses"], rel=SAME_LOSS)
    assert mine["codes"]["own"] == 0


@needs_wheels
@pytest.mark.parametrize("version", TESTED[1:])
def test_a_release_reads_what_the_ones_before_it_saved(lives, version) -> None:
    for older in TESTED[: TESTED.index(version)]:
        assert lives[version]["digests"][older] == lives[older]["digests"]["own"], older


@needs_wheels
def test_a_checkpoint_that_is_too_new_is_refused_by_name(lives) -> None:
    old = lives["oldest again"]
    assert old["codes"] == {"own": 0, TESTED[-1]: 2}
    assert f"was saved with Megatron-Core 0.19 or newer, which {TESTED[0]} cannot read" in old["said"]
