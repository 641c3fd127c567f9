"""What training costs: against the literal recipe, its own forward, in memory, on two ranks. `python -m
benchmarks.training_cost`.

Contenders, interleaved round by round in one process (embedded model, passages of about 100 tokens, one context):

  literal   one pair: full depth, calibration as a second pass, a frozen second model run on the spot; forward and
            backward only
  ours      16 pairs in one branched truncated forward, cached reference; the whole step with clipping and AdamW
  forward   the bare forward of ours, no gradient

The literal recipe's cost is the same for every pair, so few pairs are timed and seconds per pair are compared. Memory
is the peak's growth over the loaded model and optimizer, in a process of its own. TP 2 and DP 2 run a random model of
about the embedded one's size whose heads divide by two (the embedded one has nine).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.literal_recipe import literal_backward
from benchmarks.rerank_speed import QUERY, _status, heads_up_to, pairs, passages
from data_tools.training_set import Sample
from headrank.method.heads import HeadSet
from headrank.method.loss_settings import LossSettings
from headrank.method.prompt import PromptTemplate
from headrank.method.spans import PromptEncoder

RANDOM_SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
THREADS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def make_sample(tokenizer: Any, num_passages: int, num_pairs: int) -> Sample:
    """One context of generated passages with random pairs."""
    texts = passages(num_passages, tokenizer)
    encoded = PromptEncoder(tokenizer, PromptTemplate()).encode(QUERY, pairs(texts))
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.choice(num_passages, 2, replace=False) for _ in range(num_pairs)])
    ranks = np.arange(1, num_passages + 1)
    return Sample("bench", "bench", 0, 0, encoded, ranks, np.zeros(num_passages, np.int64), chosen.astype(np.int64))


class Trainer:
    """A truncated policy with optimizer, and one step on one sample."""

    def __init__(self, model: str, last_layer: int, *flags: str) -> None:
        """Build it as pretrain_headrank.py does; the weights come from ``model``."""
        from megatron_patches import device
        from megatron_patches.checkpoints.weights import load_hf_weights
        from megatron_patches.shape import ModelShape
        from megatron_patches.training.arguments import parse_arguments
        from megatron_patches.training.assembly import build_optimizer, build_policy, wrap_model
        from megatron_patches.training.config import config_from

        names = [
            "--headrank-model",
            model,
            "--headrank-heads",
            "-",
            "--train-data-path",
            "-",
            "--lr",
            "1e-6",
            "--train-iters",
            "1000",
        ]
        self.config = config_from(parse_arguments([*names, *flags]), int(os.environ.get("WORLD_SIZE", "1")))
        device.initialize(self.config.tensor_parallel)
        device.keep_freed_memory()
        self.shape = ModelShape.from_hf(model)
        self.heads: HeadSet = heads_up_to(last_layer, self.shape.layers, self.shape.heads)
        self.policy = build_policy(self.config, self.shape, self.heads)
        load_hf_weights(self.policy, model)
        self.model = wrap_model(self.config, self.policy)
        self.optimizer, _ = build_optimizer(self.config, self.model)

    def batches(self, sample: Sample) -> Iterator[Any]:
        """The sample for ever, with zeros for its reference scores."""
        from megatron_patches.training.batches import make_batch

        class Zeros:
            def of(self, sample: Sample) -> np.ndarray:
                return np.zeros(len(sample.retrieval_ranks), np.float32)

        while True:
            yield make_batch((sample,), Zeros(), torch.device("cpu"))  # type: ignore[arg-type]

    def step(self, sample: Sample) -> None:
        """One whole training step."""
        from megatron_patches.training.train_step import train_step

        train_step(
            self.model, self.optimizer, self.batches(sample), self.heads, self.config.loss, self.config.num_microbatches
        )

    def forward(self, sample: Sample) -> None:
        """The same forward without gradient."""
        from megatron_patches.training.held_out import score_sample

        score_sample(self.model, sample, self.heads, torch.device("cpu"))


def interleave(work: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Wall seconds of every contender, one after the other in each round, after one warm-up each."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, function in work.items():
            started = time.perf_counter()
            function()
            if number:
                times[name].append(time.perf_counter() - started)
    return times


def compare(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Seconds per pair of literal and ours, and seconds of a step and its forward, with their ratios."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    sample = make_sample(tokenizer, args.passages, args.pairs)
    trainer = Trainer(model, args.last_layer)
    few = make_sample(tokenizer, args.passages, args.literal_pairs)
    pairs = time_pairs(model, trainer, sample, few, args.rounds)
    literal, ours = (statistics.median(pairs[name]) for name in ("literal", "ours"))
    gain = statistics.median(slow / fast for slow, fast in zip(pairs["literal"], pairs["ours"], strict=True))
    # these two are short and their ratio near its bar: more rounds
    steps = interleave(
        {"forward": lambda: trainer.forward(sample), "step": lambda: trainer.step(sample)}, 3 * args.rounds
    )
    ratios = sorted(step / forward for step, forward in zip(steps["step"], steps["forward"], strict=True))
    print(
        f"{args.passages} passages, {sample.encoded.length} tokens, layers "
        f"{args.last_layer + 1}/{trainer.shape.layers}, "
        f"{torch.get_num_threads()} threads: literal {literal:.2f} s per pair, ours {ours:.2f} s per pair, "
        f"{args.pairs} pairs per context, "
        f"{gain:.1f} x less (bar 10, {args.rounds} rounds); step / forward {statistics.median(ratios):.2f} "
        f"(bar 3.3, {len(ratios)} rounds from {ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    return {
        "tokens": sample.encoded.length,
        "seconds_a_pair": pairs,
        "seconds": steps,
        "literal_over_ours": gain,
        "step_over_forward": ratios,
    }


def time_pairs(model: str, trainer: Trainer, sample: Sample, few: Sample, rounds: int) -> dict[str, list[float]]:
    """Seconds per pair: the literal recipe on the pairs of ``few``, ours on those of ``sample``."""
    from megatron_patches.checkpoints.weights import load_hf_weights
    from megatron_patches.model import build_model

    policy, frozen = build_model(trainer.shape), build_model(trainer.shape)
    for one in (policy, frozen):
        load_hf_weights(one, model)
    settings = LossSettings()
    work: dict[str, Callable[[], object]] = {
        "literal": lambda: literal_backward(policy, frozen, few, trainer.heads, settings),
        "ours": lambda: trainer.step(sample),
    }
    counts = {"literal": len(few.pairs), "ours": len(sample.pairs)}
    return {name: [seconds / counts[name] for seconds in values] for name, values in interleave(work, rounds).items()}


def measure_memory(model: str, num_passages: int, last_layer: int, recompute: bool) -> int:
    """Growth of the resident peak in one step, after a one-passage step has touched weights, gradients and moments."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = Trainer(model, last_layer, *(["--recompute-granularity", "full"] if recompute else []))
    trainer.step(make_sample(tokenizer, 2, 4))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present resident size (Linux)
    before = _status("VmRSS")
    trainer.step(make_sample(tokenizer, num_passages, 16))
    return _status("VmHWM") - before


def report_memory(args: argparse.Namespace) -> dict[str, int]:
    """Peak growth at several context lengths, with and without recomputation."""
    found = {}
    for recompute in (False, True):
        for count in args.memory_passages:
            command = [
                sys.executable,
                "-m",
                "benchmarks.training_cost",
                "--model",
                args.model,
                "--last-layer",
                str(args.last_layer),
            ]
            command += ["--memory-of", str(count), *(["--recompute"] if recompute else [])]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[f"{count}{' recomputed' if recompute else ''}"] = int(printed.split()[-1])
    shown = ", ".join(f"{name} passages {value / 2**20:.0f} MiB" for name, value in found.items())
    print(f"step's memory over weights, gradients and moments: {shown}")
    return found


def time_ranks(args: argparse.Namespace) -> dict[str, float]:
    """Seconds a step of two contexts at one rank, TP 2 and DP 2, each a torchrun of its own with one thread per
    rank.
    """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from headrank.reranking.model_sources import resolve_model

    found = {}
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(args.model))
        config = LlamaConfig(
            **RANDOM_SHAPE, vocab_size=len(tokenizer), max_position_embeddings=8192, tie_word_embeddings=True
        )
        LlamaForCausalLM(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        for name, ranks, tensor_parallel in (("one rank", 1, 1), ("TP 2", 2, 2), ("DP 2", 2, 1)):
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(ranks),
                "-m",
            ]
            command += ["benchmarks.training_cost", "--ranks-of", str(tensor_parallel), "--model", directory]
            command += [
                "--last-layer",
                str(args.last_layer),
                "--passages",
                str(args.passages),
                "--rounds",
                str(args.rounds),
            ]
            printed = subprocess.run(
                command, check=True, capture_output=True, text=True, env={**os.environ, **THREADS}
            ).stdout
            found[name] = float(printed.split()[-1])
    shown = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found.items())
    print(f"a step of two contexts, one thread per rank: {shown}")
    return found


def run_rank(args: argparse.Namespace) -> None:
    """One rank of ``time_ranks``: median seconds of a step, printed by rank 0."""
    from transformers import AutoTokenizer

    trainer = Trainer(
        args.model, args.last_layer, "--tensor-model-parallel-size", str(args.ranks_of), "--global-batch-size", "2"
    )
    sample = make_sample(AutoTokenizer.from_pretrained(args.model), args.passages, args.pairs)
    seconds = statistics.median(interleave({"step": lambda: trainer.step(sample)}, args.rounds)["step"])
    if os.environ["RANK"] == "0":
        print(seconds)


def main(argv: list[str] | None = None) -> int:
    """Print the comparison, the memory and the ranks; --json FILE keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--passages", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--literal-pairs", type=int, default=1)
    parser.add_argument("--last-layer", type=int, default=16, help="l_max (17 of 30 layers by default)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-passages", type=int, nargs="+", default=[10, 20, 40])
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--recompute", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    from headrank.reranking.model_sources import resolve_model
    from megatron_patches import device

    try:
        if args.ranks_of:
            run_rank(args)
        elif args.memory_of:
            print(measure_memory(resolve_model(args.model), args.memory_of, args.last_layer, args.recompute))
        else:
            results = compare(args, resolve_model(args.model))
            results |= {"memory": report_memory(args), "ranks": time_ranks(args)}
            if args.json:
                Path(args.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    finally:
        device.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
