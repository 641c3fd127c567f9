"""launch/train_qwen3_0.6b.sh for real: four gloo ranks at TP 4, a tiny Qwen3 with the head layout of Qwen3-0.6B,
SLURM's signal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headrank.method.heads import HeadSet
from tests.distributed.launcher import QUIET_ENVIRONMENT, ROOT
from tests.tiny_models import make_tiny_model
from tests.toy_training import make_toy_job

PATIENCE = 400  # seconds for starting four ranks and a checkpoint on a busy machine
TINY = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model, heads and data as the launcher's variables."""
    folder = tmp_path_factory.mktemp("launcher")
    toy = make_toy_job(folder / "toy")
    model = make_tiny_model(folder / "model", "qwen3", num_attention_heads=16, num_key_value_heads=8, **TINY)
    heads = HeadSet(((1, 2), (0, 5), (2, 11), (2, 14), (1, 7)), "headrank", str(model), 4, 16)
    heads.save(folder / "heads.json")
    return {
        "MODEL": str(model),
        "HEADS": str(folder / "heads.json"),
        "TRAIN_DATA": str(toy.train),
        "SAVE": str(folder / "run"),
    }


def launch(job: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    variables = {"NPROC": "4", "TRAIN_ITERS": "100000", "GLOBAL_BATCH_SIZE": "2"}
    environment = {**os.environ, **QUIET_ENVIRONMENT, **job, **variables, "PYTHON": sys.executable}
    script = ROOT / "launch" / "train_qwen3_0.6b.sh"
    with open(log, "ab") as output:
        return subprocess.Popen(
            [script, "--save-interval", "100000"],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a good end; whatever happens, nothing is left running."""
    try:
        assert process.wait(timeout=PATIENCE) == 0, log.read_text()
    finally:
        if process.poll() is None:
            for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                member.kill()


def steps_done(job: dict[str, str]) -> list[dict]:
    file = Path(job["SAVE"]) / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if row["event"] == "train"]


def test_the_launcher_trains_at_tp_4_and_saves_and_exits_on_slurms_signal(job: dict[str, str], tmp_path: Path) -> None:
    log, save = tmp_path / "log", Path(job["SAVE"])
    process = launch(job, log)
    deadline = time.monotonic() + PATIENCE
    while len(steps_done(job)) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    # as slurmstepd does: the signal reaches torchrun and every rank
    for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        member.send_signal(signal.SIGUSR1)
    finish(process, log)
    rows = steps_done(job)
    assert len(rows) >= 3 and all(row["grad_norm"] > 0 for row in rows)
    assert "exiting program after receiving SIGUSR1" in log.read_text()
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == str(len(rows))
    assert not (save / "training_complete.json").exists()
