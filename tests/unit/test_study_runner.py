"""The runner of a study with real processes (shells that write files): order, resumption, failures, signals, one
runner at a time.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from headrank.artifacts import Artifact
from headrank.errors import InputError
from headrank.experiments.display import LiveDisplay, PlainDisplay, duration
from headrank.experiments.overview import phase_states
from headrank.experiments.phases import STAMPS, Command, Phase
from headrank.experiments.processes import holder_of_lock, only_runner
from headrank.experiments.runner import DONE, Runner

ROOT = Path(__file__).resolve().parents[2]


def phase(
    out: Path,
    name: str,
    script: str = "echo $NAME >$OUT",
    *,
    needs: tuple[str, ...] = (),
    reads: tuple[Path, ...] = (),
    settings: dict | None = None,
    saves_when_signalled: bool = False,
    processes: int = 1,
) -> Phase:
    made = Artifact(out / name, out / STAMPS / f"{name}.json", settings or {}, reads)
    environment = {"NAME": name, "OUT": str(out / name), "DIR": str(out)}
    return Phase(name, Command(("sh", "-c", script), environment, saves_when_signalled, processes), (made,), needs)


class Told(PlainDisplay):
    """What the person who watches is told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def _say(self, text: str) -> None:
        self.lines.append(text)


def run(out: Path, phases: list[Phase], jobs: int = 1) -> tuple[int, dict[str, str], list[str]]:
    told = Told()
    runner = Runner(phases, out, told, jobs=jobs)
    return runner.run(phases), runner.states, told.lines


def test_phases_come_in_the_order_of_their_needs_and_are_not_done_twice(tmp_path: Path) -> None:
    phases = [
        phase(tmp_path, "a", "echo one >$OUT"),
        phase(tmp_path, "b", "cat $DIR/a >$OUT", needs=("a",), reads=(tmp_path / "a",)),
    ]
    assert run(tmp_path, phases, jobs=4)[0] == 0
    assert (tmp_path / "b").read_text() == "one\n"
    code, states, told = run(tmp_path, phases)
    assert (code, set(states.values())) == (0, {"valid"})
    assert told == ["[a] done before", "[b] done before"]


def test_a_terminal_shows_what_runs_and_keeps_what_ended(tmp_path: Path) -> None:
    """A real Live of the installed rich, which asks for its first picture while it is being made."""
    screen = io.StringIO()
    display = LiveDisplay(Console(file=screen, force_terminal=True, width=100))
    phases = [
        phase(tmp_path, "slow", "echo half way; sleep 0.5; echo >$OUT"),
        phase(tmp_path, "wrong", "echo no disk; exit 4", needs=("slow",)),
    ]
    assert Runner(phases, tmp_path, display).run(phases) == 1
    shown = screen.getvalue()
    assert "half way" in shown and "0 of 2 phases" in shown, "while it ran"
    assert "✓" in shown and "✗" in shown and "no disk" in shown, "when it had ended"


def test_another_setting_does_the_phase_again_and_all_that_reads_it(tmp_path: Path) -> None:
    def phases(depth: int) -> list[Phase]:
        first = phase(tmp_path, "a", f"echo {depth} >$OUT", settings={"depth": depth})
        return [
            first,
            phase(tmp_path, "b", "cp $DIR/a $OUT", needs=("a",), reads=(tmp_path / "a",)),
            phase(tmp_path, "c"),
        ]

    run(tmp_path, phases(20))
    shown = phase_states(phases(40))
    assert shown == {"a": "depth was 20, is 40", "b": "after a", "c": None}
    code, states, told = run(tmp_path, phases(40))
    assert code == 0 and states == {"a": DONE, "b": DONE, "c": "valid"}
    assert (tmp_path / "b").read_text() == "40\n"
    assert any("depth was 20, is 40" in line for line in told) and any("a changed" in line for line in told)


def test_a_failure_blocks_what_needs_it_and_nothing_else(tmp_path: Path) -> None:
    phases = [phase(tmp_path, "a", "echo sorry; exit 4"), phase(tmp_path, "b", needs=("a",)), phase(tmp_path, "c")]
    code, states, told = run(tmp_path, phases)
    assert code == 1 and states == {"a": "failed", "b": "blocked", "c": "done"}
    assert any("exit code 4" in line and "logs/a.txt" in line for line in told) and any(
        "sorry" in line for line in told
    )
    assert run(tmp_path, [phase(tmp_path, "a")])[0] == 0, "a failed phase is done again"


def test_bad_input_of_a_phase_is_the_exit_code_of_the_study(tmp_path: Path) -> None:
    assert run(tmp_path, [phase(tmp_path, "a", "exit 2")])[0] == 2


def test_what_somebody_else_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("precious\n")
    with pytest.raises(InputError, match="move it away"):
        run(tmp_path, [phase(tmp_path, "a")])
    assert (tmp_path / "a").read_text() == "precious\n"


def test_a_phase_that_ends_early_without_its_result_is_continued_and_not_begun_anew(tmp_path: Path) -> None:
    """A training that saved and stopped ends with 0; its folder is still there when it is started again."""
    script = "if [ -e $DIR/half ]; then echo whole >$OUT; else echo half >$DIR/half; fi"
    phases = [phase(tmp_path, "a", script), phase(tmp_path, "b", needs=("a",))]
    code, states, _ = run(tmp_path, phases)
    assert code == 3 and states == {"a": "stopped", "b": "blocked"}
    assert run(tmp_path, phases)[0] == 0 and (tmp_path / "a").read_text() == "whole\n"


def test_jobs_phases_are_at_work_at_a_time(tmp_path: Path) -> None:
    """Each waits for the other's file: one after another they would never end."""
    script = "echo x >$DIR/here.$NAME; while [ ! -e $DIR/here.{} ]; do sleep 0.02; done; echo done >$OUT"
    phases = [phase(tmp_path, "a", script.format("b")), phase(tmp_path, "b", script.format("a"))]
    assert run(tmp_path, phases, jobs=2)[0] == 0


def test_parallel_phases_see_one_gpu_each_and_one_of_several_processes_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    wait = "echo x >$DIR/here.$NAME; while [ ! -e $DIR/here.{} ]; do sleep 0.02; done; echo $CUDA_VISIBLE_DEVICES >$OUT"
    phases = [phase(tmp_path, "a", wait.format("b")), phase(tmp_path, "b", wait.format("a"))]
    phases.append(phase(tmp_path, "c", "ls $DIR/a $DIR/b && echo $CUDA_VISIBLE_DEVICES >$OUT", processes=2))
    assert run(tmp_path, phases, jobs=3)[0] == 0
    assert {(tmp_path / name).read_text() for name in "ab"} == {"4\n", "6\n"}
    assert (tmp_path / "c").read_text() == "4,6\n"


TRAINER = """
import os, signal, sys, time
folder = os.environ["DIR"]
def save(*_):
    open(f"{folder}/saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
open(f"{folder}/ready", "w").close()
while True:
    time.sleep(0.05)
"""
STUDY = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from headrank.experiments.runner import Runner
from tests.unit.test_study_runner import Told, phase
out = Path({out!r})
phases = [phase(out, "train", {script!r}, saves_when_signalled=True), phase(out, "after", needs=("train",))]
sys.exit(Runner(phases, out, Told()).run(phases))
"""


def test_a_request_to_stop_lets_a_training_save_and_ends_the_study(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    script = f"exec {sys.executable} {tmp_path / 'trainer.py'}"
    process = subprocess.Popen([sys.executable, "-c", STUDY.format(root=str(ROOT), out=str(tmp_path), script=script)])
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert holder_of_lock(tmp_path / STAMPS / "study.lock") == str(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 3
    assert (tmp_path / "saved").exists() and not (tmp_path / "after").exists()
    assert holder_of_lock(tmp_path / STAMPS / "study.lock") is None


def test_a_second_runner_is_refused_and_told_who_is_at_work(tmp_path: Path) -> None:
    lock = tmp_path / STAMPS / "study.lock"
    with only_runner(lock), pytest.raises(InputError, match=str(os.getpid())):
        run(tmp_path, [phase(tmp_path, "a")])


def test_in_a_thread_signals_are_left_alone(tmp_path: Path) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run(tmp_path, [phase(tmp_path, "a")])[0]))
    thread.start()
    thread.join()
    assert codes == [0]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.4 s"), (12.4, "12 s"), (185, "3 min 5 s"), (7620, "2 h 7 min"), (59.7, "1 min 0 s")]
)
def test_times_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_only_a_whole_phase_is_an_estimate_of_the_next_time(tmp_path: Path) -> None:
    made = phase(tmp_path, "a")
    assert (made.seconds_before(), made.seconds_expected()) == (None, None)
    artifact = made.artifacts[0]
    artifact.begin()
    artifact.end(140.0, is_complete=False)
    assert (made.seconds_before(), made.seconds_expected()) == (140.0, None)
    artifact.end(20.0)
    assert made.seconds_expected() == 160.0
