"""The launcher itself: results come back in rank order, and a rank that fails, dies or hangs is reported, not waited
for.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.distributed.launcher import RankFailure, run_ranks


def _who(word: str) -> tuple[str, str, int]:
    return word, f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}", os.getpid()


def _misbehave(how: str) -> None:
    if os.environ["RANK"] == "1":
        if how == "raise":
            raise ValueError("rank one is unhappy")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_every_rank_is_a_process_of_its_own_and_results_come_back_in_order():
    first, second = run_ranks(_who, 2, "hello")
    assert (first[:2], second[:2]) == (("hello", "0 of 2"), ("hello", "1 of 2"))
    assert len({first[2], second[2], os.getpid()}) == 3


def test_a_failing_rank_ends_the_others_and_shows_its_traceback():
    with pytest.raises(RankFailure, match="rank one is unhappy"):
        run_ranks(_misbehave, 2, "raise")


def test_a_killed_rank_is_reported_with_its_signal():
    with pytest.raises(RankFailure, match="rank 1, exit code -9"):
        run_ranks(_misbehave, 2, "die")


def test_ranks_that_hang_are_ended_at_the_timeout():
    with pytest.raises(RankFailure, match="rank 0, exit code -9"):
        run_ranks(_misbehave, 2, "hang", timeout=2)
