"""launch/pipeline.sh for real: a tiny model from a collection folder to a reranker, two data-parallel ranks under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.distributed.launcher import QUIET_ENVIRONMENT, ROOT
from tests.tiny_models import make_tiny_model
from tests.toy_training import make_toy_collection


def run_pipeline(folder: Path, model: Path, collection: Path) -> str:
    settings = {
        "MODEL": str(model),
        "COLLECTION": str(collection),
        "OUTPUT": str(folder / "out"),
        "PYTHON": sys.executable,
        "NPROC": "2",
        "TRAIN_QUERIES": str(collection / "train.qids"),
        "HELD_OUT": str(collection / "heldout.qids"),
        "DEPTH": "8",
        "TOP_K": "3",
        "PERMUTATIONS": "1",
        "GLOBAL_BATCH_SIZE": "2",
        "PAIRS_PER_CONTEXT": "4",
        "EVAL_INTERVAL": "2",
        "SELECT_FLAGS": "--no-picture",
    }
    environment = {**os.environ, **QUIET_ENVIRONMENT, **settings}
    done = subprocess.run([ROOT / "launch/pipeline.sh"], env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_from_a_collection_to_a_reranker_and_nothing_twice(tmp_path):
    model = make_tiny_model(tmp_path / "model", "qwen3")
    collection = make_toy_collection(tmp_path / "collection")
    run_pipeline(tmp_path, model, collection)
    output = tmp_path / "out"
    best = json.loads((output / "round-1/train/best_checkpoint.json").read_text())
    assert (output / "round-1/train/best").resolve().name == best["directory"]
    exported = json.loads((output / "model/headrank.json").read_text())
    final = json.loads((output / "round-1/heads.json").read_text())
    assert exported["heads"]["heads"] == final["heads"], "the exported model carries the re-selected heads"

    from headrank.reranking.reranker import HeadRankReranker

    ranked = HeadRankReranker.from_pretrained(output / "model").rank("warm host", ["a flea needs a warm host", "concrete floor", "violin"])
    assert len(list(ranked)) == 3
    assert run_pipeline(tmp_path, model, collection).count("done before") == 7
