"""What several files of whole training runs share: one forge and one toy job a file."""

from __future__ import annotations

import pytest

from tests.distributed.forge import Forge
from tests.toy_training import make_toy_job


@pytest.fixture(scope="module")
def forge():
    with Forge() as made:
        yield made


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy_job(tmp_path_factory.mktemp("toy"))
