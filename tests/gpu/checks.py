"""The acceptance list: what must hold on a node before anyone trains on it. Each check writes its numbers before it
judges them.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patches.planner.job import CALIBRATION_TOKENS, LABEL_TOKENS, OPENING_TOKENS, QUERY_TOKENS
from tests.gpu.bench import ROOT, Bench, run, trained

Facts = dict[str, Any]

SAME_FP32 = 1e-4  # relative: float32 sums over other shards
SAME_BF16 = 0.05  # relative: three digits, and a few steps on random weights
SAME_RESUMED = 1e-6
ROUNDING = 3.0  # times Hugging Face's own rounding in bfloat16
PLANNED = (0.8, 1.2)  # the allocator's peak over the planner's
LAUNCHED_STEPS = 10


def bf16_scores_are_as_near_as_hugging_faces(bench: Bench, facts: Facts) -> None:
    """Transformer Engine's layers, Megatron's own and Hugging Face's in bf16 against Hugging Face in float32."""
    exact = hugging_face_scores(bench, "float32")
    rounded = error(hugging_face_scores(bench, "bfloat16"), exact)
    facts["hugging face"] = rounded
    for engine in bench.engines:
        found = bench.train(f"scores-{engine}", "--bf16", "--transformer-impl", engine, ranks=1, iterations=1)
        facts[engine] = error(found.references(), exact)
    assert all(facts[engine] <= ROUNDING * rounded for engine in bench.engines), facts


def float32_is_exact(bench: Bench, facts: Facts) -> None:
    """Losses at every tensor-parallel size, and scores as Hugging Face's."""
    runs = {size: bench.train(f"fp32-tp{size}", *bench.split(size), ranks=bench.sizes[-1]) for size in bench.sizes}
    facts["losses"] = {str(size): found.losses for size, found in runs.items()}
    facts["scores against hugging face"] = error(runs[1].references(), hugging_face_scores(bench, "float32"))
    same(facts["losses"], SAME_FP32)
    assert facts["scores against hugging face"] < SAME_FP32


def bf16_is_the_same_at_every_size(bench: Bench, facts: Facts) -> None:
    """With each kind of layers."""
    for engine in bench.engines:
        flags = ("--bf16", "--use-distributed-optimizer", "--transformer-impl", engine)
        runs = {
            size: bench.train(f"bf16-{engine}-tp{size}", *flags, *bench.split(size), ranks=bench.sizes[-1])
            for size in bench.sizes
        }
        facts[engine] = {str(size): found.losses for size, found in runs.items()}
        same(facts[engine], SAME_BF16)


def sequence_parallelism_changes_memory_only(bench: Bench, facts: Facts) -> None:
    """On and off at the largest size."""
    size = bench.sizes[-1]
    for engine in bench.engines:
        flags = ("--bf16", "--use-distributed-optimizer", "--transformer-impl", engine, *bench.split(size))
        off = bench.train(f"whole-{engine}", *flags, ranks=size)
        on = bench.train(f"sequence-{engine}", *flags, "--sequence-parallel", ranks=size)
        facts[engine] = {
            "losses": {"off": off.losses, "on": on.losses},
            "peak": {"off": off.peak_bytes, "on": on.peak_bytes},
        }
        same(facts[engine]["losses"], SAME_BF16)


def recomputation_changes_memory_only(bench: Bench, facts: Facts) -> None:
    """None, each module, and everything."""
    kinds = {
        "none": (),
        "core_attn": ("--recompute-granularity", "selective", "--recompute-modules", "core_attn"),
        "mlp": ("--recompute-granularity", "selective", "--recompute-modules", "mlp"),
        "full": ("--recompute-granularity", "full"),
    }
    runs = {name: bench.train(f"recompute-{name}", "--bf16", *flags, ranks=1) for name, flags in kinds.items()}
    facts["losses"] = {name: found.losses for name, found in runs.items()}
    facts["peak"] = {name: found.peak_bytes for name, found in runs.items()}
    facts["step seconds"] = {name: found.step_seconds for name, found in runs.items()}
    same(facts["losses"], SAME_BF16)
    if bench.has_gpu:
        assert facts["peak"]["full"] < facts["peak"]["none"], facts


def resumed_runs_go_on(bench: Bench, facts: Facts) -> None:
    """Stopped after two steps and started again, at the same size and at another, with the optimizer that the
    machine has.
    """
    largest = bench.split(bench.sizes[-1])
    flags = (
        "--bf16",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--deterministic-mode",
    )
    whole = bench.train("whole", *flags, *largest, ranks=bench.sizes[-1])
    facts["whole"] = whole.losses
    stopped = bench.train("stopped", *flags, *largest, "--exit-interval", str(bench.steps // 2), ranks=bench.sizes[-1])
    assert len(stopped.losses) == bench.steps // 2
    for name, again in (("same size", largest), ("tensor parallelism 1", bench.split(1))):
        save = bench.place / f"resumed at {name}"
        shutil.copytree(stopped.save, save)
        facts[name] = bench.train(f"resumed at {name}", *flags, *again, ranks=bench.sizes[-1], save=save).losses
    same({"whole": whole.losses, "same size": facts["same size"]}, SAME_RESUMED)
    same({"whole": whole.losses, "other size": facts["tensor parallelism 1"]}, SAME_BF16)


def memory_is_what_the_planner_says(
    bench: Bench, facts: Facts, *, model: Path, name: str, lists: Path, documents: int
) -> None:
    """One step over lists of a hundred documents, against 'headrank plan' for contexts of the same length."""
    size = bench.sizes[-1]
    flags = (
        "--bf16",
        "--use-distributed-optimizer",
        "--headrank-model",
        str(model),
        "--headrank-heads",
        str(model / "heads.json"),
    )
    found = bench.train(
        f"memory-{name}",
        *(*flags, "--train-data-path", str(lists), *bench.split(size), "--global-batch-size", "1"),
        ranks=size,
        iterations=2,
    )
    facts |= {"tokens": found.tokens, "memory": found.memory, "step seconds": found.step_seconds}
    facts["planned"] = planned(name, size, documents, found.tokens)
    facts["ratio"] = found.peak_bytes / facts["planned"]["peak_bytes"]
    if bench.has_gpu:
        assert PLANNED[0] < facts["ratio"] < PLANNED[1], facts


def launcher_trains(
    bench: Bench, facts: Facts, *, launcher: str, model: Path, lists: Path, processes: int, size: int
) -> None:
    """Ten steps of a launcher, as a user starts it, on random weights."""
    save, log = bench.place / launcher, bench.place / f"{launcher}.log"
    command = [str(ROOT / "launch" / f"{launcher}.sh"), str(model), str(model / "heads.json"), str(lists), str(save)]
    variables = {"NPROC": str(processes), "TP": str(size), "TRAIN_ITERS": str(LAUNCHED_STEPS), "DRY_RUN": "1"}
    variables["GLOBAL_BATCH_SIZE"] = str(max(2, processes // size))
    assert run(command, log, variables) == 0, log.read_text()
    facts["command"] = log.read_text().splitlines()[-1]
    words = shlex.split(facts["command"])
    script = next(index for index, word in enumerate(words) if word.endswith("pretrain_headrank.py"))
    code = (
        bench.start(words[script + 1 :], processes, log)
        if not bench.has_gpu
        else run(command, log, {**variables, "DRY_RUN": "0"})
    )
    assert code == 0, log.read_text(errors="replace")[-6000:]
    found = trained(save)
    facts |= {
        "losses": found.losses,
        "step seconds": found.step_seconds,
        "tokens a step": found.tokens,
        "memory": found.memory,
    }
    assert len(found.losses) == LAUNCHED_STEPS and all(map(math.isfinite, found.losses)), found.losses
    assert (save / "training_complete.json").is_file()


def same(runs: dict[str, list[float]], tolerance: float) -> None:
    """Every run has the first one's losses."""
    (first, expected), *others = runs.items()
    assert expected and all(map(math.isfinite, expected)), f"{first}: {expected}"
    for name, losses in others:
        assert len(losses) == len(expected), f"{name}: {losses}, {first}: {expected}"
        worst = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, expected, strict=True))
        assert worst <= tolerance, f"{name} differs from {first} by {worst:.2e}: {losses}, {expected}"


def error(found: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> float:
    """Root mean square difference over the spread of the exact scores within their lists, of the lists that were
    found.
    """
    assert found and found.keys() <= exact.keys()
    differences = np.concatenate([scores - exact[name] for name, scores in found.items()])
    spread = np.concatenate([exact[name] - exact[name].mean() for name in found])
    return float(np.sqrt((differences**2).mean() / (spread**2).mean()))


def hugging_face_scores(bench: Bench, dtype: str) -> dict[str, np.ndarray]:
    """The same lists through transformers."""
    from headrank import HeadRankReranker

    device = "cuda" if bench.has_gpu else "cpu"
    reranker = HeadRankReranker.from_pretrained(str(bench.model), heads=str(bench.heads), device=device, dtype=dtype)
    rows = map(json.loads, (bench.lists / "contexts.jsonl").read_text().splitlines())
    return {
        row["context_id"]: np.asarray(reranker.score(row["query"], [doc["text"] for doc in row["documents"]]))
        for row in rows
    }


def planned(name: str, size: int, documents: int, tokens: int) -> dict[str, Any]:
    """What the planner says of one context of this many tokens."""
    around = OPENING_TOKENS + QUERY_TOKENS + CALIBRATION_TOKENS
    length = max(1, round((tokens - around) / documents) - LABEL_TOKENS)
    command = [
        "headrank",
        "plan",
        "--model",
        name,
        "--tensor-model-parallel-size",
        str(size),
        "--gpus-per-node",
        str(size),
        "--json",
    ]
    command += ["--global-batch-size", "1", "--context-documents", str(documents), "--document-tokens", str(length)]
    command += ["--recipe", "ours", "--no-limits", "--pairs-per-context", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)["plans"][0]
    names = (
        "sequence_tokens",
        "peak_bytes",
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        "activation_bytes",
        "serial_seconds",
    )
    return {name: plan[name] for name in names}
