"""The late layout against the parallel one, and against itself where passages come back: `python -m
benchmarks.layout_speed`.

Contenders, interleaved round by round in one process, with the same heads, weights and precision (embedded model,
passages of about 100 tokens):

  parallel  one prompt with all passages, which the query reads; a log-mass readout, so no calibration branch
  late      passages and query apart, every passage new ("from cold"). Bar: no slower than parallel
  repeated  late again, where half of the passages stood in an earlier list. Bar: at most 0.6 of late

Ratios are medians over the rounds: seconds of this kind of machine are noisy, ratios of neighbours are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoTokenizer

from benchmarks.rerank_speed import QUERY, passages
from headrank.method.heads import HeadSet
from headrank.method.prompt import PromptTemplate
from headrank.reranking.late_reranker import LateReranker
from headrank.reranking.model_sources import resolve_model
from headrank.reranking.reader import AttentionReader
from headrank.reranking.reranker import HeadRankReranker
from headrank.reranking.shipped_readouts import UNTRAINED, shipped_readout

BARS = {"late/parallel": 1.0, "repeated/late": 0.6}
Round = Callable[[], float]


class Layouts:
    """Both rerankers on one set of weights."""

    def __init__(self, heads: HeadSet, num_passages: int, dtype: str) -> None:
        """``heads`` is a late readout; the parallel layout reads the same heads with the same weights."""
        model = resolve_model("embedded")
        parallel = PromptTemplate.from_dict(heads.prompt.to_dict() | {"document_layout": "parallel"})
        reader = AttentionReader.load(model, prompt=heads.prompt, last_layer=heads.l_max, dtype=dtype)
        # a reader of its own: it holds the prompt that its lists are encoded with
        other = AttentionReader.load(model, prompt=parallel, last_layer=heads.l_max, dtype=dtype)
        self.late = LateReranker(reader, heads)
        self.parallel = HeadRankReranker.from_reader(other, dataclasses.replace(heads, prompt=parallel))
        every = passages(num_passages * 3 // 2, AutoTokenizer.from_pretrained(model))
        half = num_passages // 2
        self.list, self.earlier = every[:num_passages], every[half : num_passages + half]

    def cold(self) -> float:
        """Seconds of the late layout with nothing remembered."""
        self.late.recent.clear()
        return _seconds(lambda: self.late.rank(QUERY, self.list))

    def repeated(self) -> float:
        """Seconds after another list that shares half of the passages, which is not counted."""
        self.late.recent.clear()
        self.late.rank("which families keep their nets there", self.earlier)
        return _seconds(lambda: self.late.rank(QUERY, self.list))

    def in_one_prompt(self) -> float:
        """Seconds of the parallel layout."""
        return _seconds(lambda: self.parallel.rank(QUERY, self.list))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(argv: list[str] | None = None) -> int:
    """Print medians and ratios; --json FILE keeps every round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--heads", choices=UNTRAINED, default="untrained-fast", help="which shipped readout of the untouched model"
    )
    parser.add_argument("--passages", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto", help="auto (default), float32 or bfloat16, for both")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    layouts = Layouts(shipped_readout(args.heads, "embedded"), args.passages, args.dtype)
    rounds: dict[str, Round] = {"parallel": layouts.in_one_prompt, "late": layouts.cold, "repeated": layouts.repeated}
    results: dict[str, object] = {"heads": args.heads, "passages": args.passages, "dtype": args.dtype, "threads": {}}
    for threads in dict.fromkeys(args.threads):
        torch.set_num_threads(threads)
        for warm_up in rounds.values():
            warm_up()
        times: dict[str, list[float]] = {name: [] for name in rounds}
        for _ in range(args.rounds):
            for name, work in rounds.items():
                times[name].append(work())
        ratios = {
            name: statistics.median(a / b for a, b in zip(*(times[part] for part in name.split("/")), strict=True))
            for name in BARS
        }
        print(
            f"threads {threads}: "
            + ", ".join(f"{name} {statistics.median(values):.2f} s" for name, values in times.items())
            + " | "
            + ", ".join(f"{name} {ratio:.3f} (bar {BARS[name]:g})" for name, ratio in ratios.items())
        )
        results["threads"][str(threads)] = {**times, "ratios": ratios}  # type: ignore[index]
    if args.json:
        with open(args.json, "w", encoding="utf-8") as stream:
            json.dump(results, stream, indent=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
