"""The late layout from cold, in every number format: `python -m benchmarks.late_speed`.

The embedded model with one of its readouts, lists of passages of 100 tokens, nothing remembered from list to list:
every passage is computed for every query. Contenders, interleaved round by round in one process, a process for each
number of threads:

  float32, bfloat16, int8   the reranker with weights in that format
  floor-...                 the same tokens through the same layers in the same format, nothing else: no prompt, padding
                            or scores

Ratios are those of the issue: a format to the floor of its own, and float32 to the others (goal of int8: 2). Times are
CPU seconds per query; wall seconds stand in the JSON. The same over a store: benchmarks.store_speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.rerank_speed import QUERY, passages
from benchmarks.store_speed import SIZES, Work, plain_attention, ratio, seconds
from headrank.placement import fast_bfloat16
from headrank.reranking.reader import AttentionReader
from headrank.reranking.reranker import HeadRankReranker, choose_heads
from headrank.reranking.shipped_readouts import model_to_read

MODEL, GOAL = "embedded", 2.0


def contenders(readout: str, formats: Sequence[str]) -> dict[str, Work]:
    """Every format, and its floor."""
    ways: dict[str, Work] = {}
    for dtype in formats:
        reranker = HeadRankReranker.from_pretrained(MODEL, readout, dtype=dtype, key_cache_bytes=0)
        ways[dtype] = lambda some, reranker=reranker: reranker.rank(QUERY, some)  # type: ignore[misc]
        ways[f"floor-{dtype}"] = floor(readout, dtype)
    return ways


def floor(readout: str, dtype: str) -> Work:
    """One forward of the query's tokens and forwards of the passages', as many together as the reranker takes."""
    heads = choose_heads(MODEL, readout)
    reader: Any = AttentionReader.load(
        model_to_read(MODEL, readout), prompt=heads.prompt, last_layer=heads.l_max, dtype=dtype
    )
    reader.model.attend = plain_attention
    ids_of: dict[str, list[int]] = {}

    @torch.inference_mode()
    def work(some: list[str]) -> None:
        for text in [QUERY, *some]:
            if text not in ids_of:  # ids are given, as a floor has them
                ids_of[text] = reader.tokenizer(text, add_special_tokens=False)["input_ids"]
        rows = [ids_of[text] for text in some]
        length = max(map(len, rows))
        together = max(1, 192 // length)
        batches = [[ids_of[QUERY]]] + [rows[start : start + together] for start in range(0, len(rows), together)]
        for batch in batches:
            longest = max(map(len, batch))
            ids = torch.tensor([row + [0] * (longest - len(row)) for row in batch])
            reader.model(input_ids=ids, position_ids=torch.arange(longest).expand(ids.shape))

    return work


def measure(
    ways: dict[str, Work], documents: list[str], sizes: Sequence[int], rounds: int
) -> dict[str, dict[str, list[list[float]]]]:
    """(CPU, wall) seconds per query by number of passages and contender, a pair a round."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for work in ways.values():
        work(documents[: min(sizes)])
    for size in sizes:
        found[str(size)] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, work in ways.items():
                found[str(size)][name].append(seconds(work, documents[:size], 1))
    return found


def show(times: dict[str, dict[str, list[list[float]]]]) -> None:
    """Seconds and ratios."""
    for size, of_size in times.items():
        medians = {name: statistics.median(cpu for cpu, _ in rounds) for name, rounds in of_size.items()}
        formats = [name for name in medians if not name.startswith("floor")]
        print(
            f"{size:>4} passages, CPU s per query: "
            + ", ".join(f"{name} {value:.2f}" for name, value in medians.items())
        )
        parts = [f"{name} / its floor {ratio(of_size, name, f'floor-{name}'):.2f}" for name in formats]
        goals = {"int8": f" (goal {GOAL:.0f})"}
        parts += [
            f"float32 / {name} {ratio(of_size, 'float32', name):.2f}{goals.get(name, '')}"
            for name in formats
            if name != "float32"
        ]
        print("     " + ", ".join(parts))


def main(argv: list[str] | None = None) -> int:
    """Print times and ratios for each number of threads; --json FILE keeps them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readout", choices=("full", "fast"), default="fast")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--passages", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        torch.set_num_threads(args.threads[0])
        ways = contenders(args.readout, ["float32", *(["bfloat16"] if fast_bfloat16() else []), "int8"])
        from headrank.reranking.model_sources import resolve_model
        from headrank.reranking.plain_tokenizer import PlainTokenizer

        documents = passages(max(args.passages), PlainTokenizer.read(resolve_model(MODEL)))
        Path(args.json).write_text(json.dumps(measure(ways, documents, args.passages, args.rounds)))
        return 0
    everything = {}
    with tempfile.TemporaryDirectory(prefix="late-speed-") as name:
        for threads in args.threads:
            command = [
                sys.executable,
                "-m",
                "benchmarks.late_speed",
                "--one",
                "--readout",
                args.readout,
                "--threads",
                str(threads),
            ]
            command += [
                "--rounds",
                str(args.rounds),
                "--json",
                f"{name}/out.json",
                "--passages",
                *map(str, args.passages),
            ]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
            everything[str(threads)] = json.loads(Path(name, "out.json").read_text())
            print(f"threads {threads}, readout {args.readout}")
            show(everything[str(threads)])
    if args.json:
        Path(args.json).write_text(json.dumps(everything, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
