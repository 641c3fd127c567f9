"""A study for real: a tiny model from a collection folder to a reranker, two data-parallel ranks under torchrun, two
seeds, a report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.distributed.launcher import QUIET_ENVIRONMENT, ROOT
from tests.tiny_models import make_tiny_model
from tests.toy_training import make_toy_collection


def run_study(file: Path, *flags: str) -> str:
    words = [sys.executable, "-m", "headrank", "experiment", "run", str(file), *flags]
    environment = {**os.environ, **QUIET_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_from_a_collection_to_a_reranker_and_nothing_twice(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3")
    collection = make_toy_collection(tmp_path / "collection")
    output = tmp_path / "out"
    study = {
        "output": str(output),
        "model": str(model),
        "name": "tiny",
        "data": {
            "collections": [str(collection)],
            "train_queries": str(collection / "train.qids"),
            "held_out_queries": str(collection / "heldout.qids"),
        },
        "pairs": {"depth": 8},
        "heads": {"depth": 8, "top_k": 3, "permutations": 1, "picture": False},
        "training": {
            "processes": 2,
            "global_batch_size": 2,
            "pairs_per_context": 4,
            "permutations": 1,
            "eval_interval": 2,
        },
        "benchmarks": {
            "toy": {"collection": str(collection), "queries": str(collection / "heldout.qids"), "depths": [8]}
        },
        "measure": {
            "rows": [
                {"method": "bm25"},
                {"method": "headrank", "variant": "untrained", "heads": "before"},
                {"method": "headrank", "model": "final"},
                {"method": "headrank", "variant": "untrained-fused", "heads": "before", "fuse": 0.5},
            ]
        },
        "report": {"kind": "matrix"},
    }
    file = tmp_path / "study.yaml"
    file.write_text(json.dumps(study))
    printed = run_study(file, "--jobs", "2")
    assert "HeadRank (untrained-fused)" in printed
    best = json.loads((output / "round-1/train/best_checkpoint.json").read_text())
    assert (output / "round-1/train/best").resolve().name == best["directory"]
    exported = json.loads((output / "model/headrank.json").read_text())
    final = json.loads((output / "round-1/heads.json").read_text())
    assert exported["heads"]["heads"] == final["heads"], "the exported model carries the re-selected heads"
    fused = json.loads((output / "cells/toy/top8-retriever/tiny/headrank+untrained-fused/metrics.json").read_text())
    assert fused["method"] == "headrank+untrained-fused" and 0 < fused["measures"]["nDCG@10"] <= 1

    from headrank.reranking.reranker import HeadRankReranker

    ranked = HeadRankReranker.from_pretrained(output / "model").rank(
        "warm host", ["a flea needs a warm host", "concrete floor", "violin"]
    )
    assert len(list(ranked)) == 3
    again = run_study(file)
    assert again.count("done before") == again.count("[") and "started" not in again
