"""A stand-in for python that the launchers of several steps call: what was called, and outputs that are there afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then echo "$3"; exit; fi # the demo asks for the folder of its model
echo "$*" >>"$CALLS"
output= save= exported=
args=("$@")
for ((i = 0; i < ${#args[@]}; i++)); do
    case ${args[i]} in --output) output=${args[i+1]} ;; --save) save=${args[i+1]} ;; --exported) exported=${args[i+1]} ;; esac
done
case " $* " in
    *" pairs "*) mkdir -p "$output" && echo "$*" >"$output/pairs.jsonl" && touch "$output/pairs.summary.json" ;;
    *" --method core entropy "*) for name in core entropy; do echo "${FOUND:-}" >"${output%.json}.$name.json"; done ;;
    *" select-heads "*) echo "${FOUND:-}" >"$output" ;;
    *" export-hf "*) mkdir -p "$output" && touch "$output/headrank.json"
        if [[ -n $exported ]]; then cp -p "$exported/config.json" "$output"; else touch "$output/config.json"; fi ;;
    *" rerank "*) mkdir -p "$(dirname "$output")" && touch "$output" ;;
    *pretrain_headrank.py*) mkdir -p "$save" && touch "$save/state" && echo "${OMP_NUM_THREADS:-}" >"$save/threads"
        [[ -n ${STOP_EARLY:-} ]] || touch "$save/training_complete.json" ;;
esac
"""


class Pipeline:
    """A collection, an output directory and the calls that were made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.output = folder, folder / "calls", folder / "out"
        (folder / "collection").mkdir()
        for name in ("queries.tsv", "corpus.jsonl", "qrels.txt", "run.bm25.txt"):
            (folder / "collection" / name).write_text("x\n")
        (folder / "held.qids").write_text("q1\n")
        (folder / "collection/train.qids").write_text("q1\tfirst\nq2\tfirst\nq3\tsecond\n")
        self.command("python", STAND_IN)
        (folder / "bin").mkdir()

    def command(self, path: str, text: str) -> None:
        """An executable file; one below bin/ is found before the system's."""
        (self.folder / path).write_text(text)
        (self.folder / path).chmod(0o755)

    def machine(self, cores: int, gigabytes: int = 16) -> None:
        """Pretend so many cores and so much free memory."""
        self.command("bin/getconf", f"#!/bin/sh\necho {cores}\n")
        self.command("bin/awk", f'#!/bin/sh\ncase "$*" in */proc/meminfo) echo {gigabytes} ;; *) exec {shutil.which("awk")} "$@" ;; esac\n')

    def run(self, *flags: str, script: str = "pipeline.sh", **variables: str) -> tuple[int, list[str], str]:
        """Exit code, the kinds of the calls made, and what was printed."""
        self.calls.write_text("")
        settings = {"COLLECTION": str(self.folder / "collection"), "OUTPUT": str(self.output), "HELD_OUT": str(self.folder / "held.qids")}
        clean = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "NPROC", "TP")}
        settings |= {"PYTHON": str(self.folder / "python"), "CALLS": str(self.calls), "PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        environment = {**clean, **settings, **variables}
        done = subprocess.run([ROOT / "launch" / script, *flags], env=environment, capture_output=True, text=True, check=False)
        kinds = (
            "pairs",
            "select-heads",
            "pretrain_headrank.py",
            "export-hf",
            "rerank",
            "benchmark",
            "evaluate",
            "report",
            "view",
            "examples/demo_table.py",
        )
        made = [next(kind for kind in kinds if kind in call.split()) for call in self.calls.read_text().splitlines()]
        return done.returncode, made, done.stdout + done.stderr


WHOLE = ["pairs", "pairs", "select-heads", "pretrain_headrank.py", "export-hf", "select-heads", "export-hf"]  # pipeline.sh
