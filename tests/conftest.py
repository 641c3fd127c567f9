"""Fixtures for all tests: the embedded model and collection, real data where there is any, tiny models of every
family.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# hypothesis would fail an example for taking 200 ms; on a busy machine any first call does
settings.register_profile("headrank", deadline=None)
settings.load_profile("headrank")

# Before torch is imported anywhere: spinning threads of several processes on few cores cost minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # several workers with a thread per core each would take turns on all cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The packages of the integrations report their use unless told not to.
os.environ.update({"HAYSTACK_TELEMETRY_ENABLED": "False", "RAY_USAGE_STATS_ENABLED": "0", "LANGSMITH_TRACING": "false"})

# Tests of the CPU's path stay on the CPU where there is a GPU; 'make test-gpu' shows it to those of tests/gpu.
if os.environ.get("HEADRANK_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with a reason, what this machine cannot run."""
    missing = {"gpu": _without_gpu, "java": _without_java, "hub": _without_hub}
    for marker, reason_of in missing.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = reason_of() if marked else None
        for item in marked if reason else []:
            item.add_marker(pytest.mark.skip(reason=reason))


def _without_gpu() -> str | None:
    import torch

    if os.environ.get("HEADRANK_TEST_GPU") != "1":
        return "needs a CUDA device, and runs with 'make test-gpu'"
    return None if torch.cuda.device_count() else "needs a CUDA device"


def _without_java() -> str | None:
    import importlib.util
    import shutil

    if shutil.which("java") is None:
        return "needs Java 21"
    return None if importlib.util.find_spec("pyserini") else "needs the extra 'lucene' (pyserini)"


def _without_hub() -> str | None:
    return (
        None
        if os.environ.get("HEADRANK_TEST_HUB") == "1"
        else "needs the Hugging Face hub; set HEADRANK_TEST_HUB=1 to run it"
    )


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real collections (dl19, dl21, nfcorpus, ...), named by HEADRANK_SHARED_DATA or beside the
    checkout.
    """
    folder = Path(os.environ.get("HEADRANK_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real collections in {folder}; HEADRANK_SHARED_DATA can name their folder")
    return folder


@pytest.fixture(scope="session")
def embedded_collection() -> Path:
    """The collection folder that comes with the project."""
    return ROOT / "examples" / "collection"


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The directory of the embedded model, fetched into the user's cache on first use."""
    from headrank.errors import InputError
    from headrank.reranking.embedded_model import embedded_model_directory

    try:
        return embedded_model_directory()
    except InputError as error:
        pytest.skip(f"the embedded model cannot be had: {error}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a family (qwen3, qwen2, llama, ...) to the directory of a random model of it, made once a
    session.
    """
    from tests.tiny_models import make_tiny_model

    made: dict[str, Path] = {}

    def directory_of(family: str = "qwen3") -> Path:
        if family not in made:
            made[family] = make_tiny_model(tmp_path_factory.mktemp(f"tiny-{family}") / family, family)
        return made[family]

    return directory_of
