"""What test_cuda_path.py starts as processes of their own: the path of a GPU node, with a stand-in for Transformer
Engine.

A process writes what it found as JSON to the file it is given. Training runs are pretrain_headrank.py's own, rank by
rank; where weights are made on a GPU is looked at under fake tensors, which know their device and hold nothing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.distributed.launcher import free_port

TENSOR_PARALLEL = ("--tensor-model-parallel-size", "2")
UNFUSED = ("--no-rope-fusion", "--no-gradient-accumulation-fusion")
# as launch/train_common.sh
LAUNCHER = ("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


def train(toy_flags: list[str], save: Path, *more: str, iterations: int = 4, use_engine: bool = True) -> list[float]:
    """Losses of one run of pretrain_headrank.py in this process."""
    import pretrain_headrank

    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)  # the last run's may still be closing
    flags = [*toy_flags, "--save", str(save), "--train-iters", str(iterations), "--lr-decay-style", "constant", *more]
    with mock.patch("megatron_patches.layer_spec.has_transformer_engine", lambda: use_engine):
        assert pretrain_headrank.main(flags) == 0, flags
    torch.set_default_dtype(torch.float32)
    events = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return [event["total"] for event in events if event["event"] == "train"]


def trained(toy_flags: list[str], place: Path) -> dict[str, list[float]]:
    """Losses with both layers, in both precisions, whole and resumed. At tensor parallelism 2 where nothing else is
    said.
    """
    local = ("--transformer-impl", "local", *TENSOR_PARALLEL)
    engine = ("--transformer-impl", "transformer_engine", *TENSOR_PARALLEL, "--sequence-parallel")
    found = {
        "local fp32": train(toy_flags, place / "local", *local),
        "engine fp32": train(toy_flags, place / "fp32", *engine),
        "local bf16": train(toy_flags, place / "plain", *LAUNCHER, *local),
        "engine bf16": train(toy_flags, place / "bf16", *LAUNCHER, *engine),
        "engine bf16, not split": train(
            toy_flags, place / "whole", *LAUNCHER, *engine[:-1], "--recompute-activations", *UNFUSED
        ),
        "engine fp8": train(toy_flags, place / "fp8", *LAUNCHER, *engine, "--fp8-format", "hybrid"),
    }
    for name, again in (("resumed", engine), ("resumed without tensor parallelism", engine[:2])):
        save = place / name
        train(toy_flags, save, *LAUNCHER, *engine, "--exit-interval", "2")
        found[f"engine bf16, {name}"] = train(toy_flags, save, *LAUNCHER, *again)
    return found


def with_apex(toy_flags: list[str], place: Path) -> dict[str, Any]:
    """Losses with apex's fused optimizer, whole and resumed, and how many steps it took."""
    from apex import optimizers

    flags = ("--bf16", "--use-distributed-optimizer", *TENSOR_PARALLEL)
    found: dict[str, Any] = {"whole": train(toy_flags, place / "whole", *flags, use_engine=False)}
    found["steps"] = len(optimizers.UPDATES)
    train(toy_flags, place / "again", *flags, "--exit-interval", "2", use_engine=False)
    found["resumed"] = train(toy_flags, place / "again", *flags, use_engine=False)
    return found


def places(*, use_engine: bool) -> dict[str, list[str]]:
    """Where and in which type every parameter and buffer of a model is made on a machine with a GPU."""
    from megatron.core import parallel_state
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_patches import device
    from megatron_patches.model import build_model, build_transformer_config
    from tests.distributed.planner_ranks import TINY

    gpu = torch.device("cuda", 0)
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tracker = "megatron.core.tensor_parallel.layers.get_cuda_rng_tracker"
    with (
        mock.patch.object(device, "has_cuda", lambda: True),
        mock.patch.object(device, "device", lambda: gpu),
        mock.patch.object(torch.cuda, "current_device", lambda: gpu),
        mock.patch(tracker, mock.MagicMock()),
        FakeTensorMode(),
    ):
        config = build_transformer_config(
            TINY, dtype=torch.bfloat16, init_method=_nothing, output_layer_init_method=_nothing
        )
        model = build_model(TINY, last_layer=2, transformer_config=config, use_transformer_engine=use_engine)
        tensors = [
            *model.named_parameters(),
            *model.named_buffers(),
            ("inverse frequencies", model.inverse_frequencies),
        ]
        found = {name: [str(tensor.device), str(tensor.dtype)] for name, tensor in tensors}
    device.shutdown()
    return found


def _nothing(weight: torch.Tensor) -> None:
    """Fake tensors have no values to draw."""


def main(what: str, output: Path, *toy_flags: str) -> None:
    """Run one part and write what it found."""
    found: Any
    if what == "train":
        found = trained(list(toy_flags), output.parent)
    elif what == "apex":
        found = with_apex(list(toy_flags), output.parent)
    else:
        found = {"local": places(use_engine=False), "engine": places(use_engine=True)}
    if os.environ.get("RANK", "0") == "0":
        output.write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
