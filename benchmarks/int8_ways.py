"""Which int8 on this processor: `python -m benchmarks.int8_ways`. What docs/decisions.md says about torchao and
OpenVINO comes from here.

Layers of the embedded model's shape (norm, attention, SwiGLU; its own weights), fed with a query's tokens and with a
batch of passages, in several ways that take turns in one process:

  float32, bfloat16   plain torch
  packed              bfloat16 with weights packed for oneDNN (headrank/reranking/joined.py)
  ours                int8 weights, a scale for each token, oneDNN's integer products (headrank/reranking/int8.py)
  torchao             Int8DynamicActivationInt8Weight, as it comes and under torch.compile
  openvino            the same module converted; weights in int8 (nncf), activations quantised by the plugin as it
                      does by default

Ways whose package is missing are left out and named: pip install torchao openvino nncf. CPU seconds of one call, the
median of the rounds; beside them the error of the hidden states against float32, the seconds until the first call is
done, and the memory it took.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from headrank.reranking.decoder import Decoder, Projection, load_decoder
from headrank.reranking.decoder_files import DecoderShape
from headrank.reranking.int8 import quantise
from headrank.reranking.joined import pack
from headrank.reranking.model_sources import resolve_model

SHAPES = {"query": (1, 12), "passages": (2, 96)}  # rows, tokens
Work = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> Any:
    """Causal attention; groups repeated, because not every exporter knows them."""
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2), None


def decoder(num_layers: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """The embedded model's first layers."""
    folder = resolve_model("embedded")
    shape = DecoderShape.read(folder)
    assert shape is not None
    loaded = load_decoder(folder, shape, num_layers, dtype)
    loaded.attend = attend
    return loaded


class WithLinear(nn.Module):
    """The same decoder with torch's own Linear modules: what other packages look for."""

    def __init__(self, source: Decoder) -> None:
        super().__init__()
        self.inner = copy.deepcopy(source)
        for parent in list(self.inner.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, Projection):
                    linear = nn.Linear(child.weight.shape[1], child.weight.shape[0], bias=False)
                    linear.weight = nn.Parameter(child.weight.detach().clone(), requires_grad=False)
                    setattr(parent, name, linear)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states behind the last layer."""
        return self.inner(input_ids, position_ids)


def ways(num_layers: int, threads: int) -> dict[str, Callable[[], Work]]:
    """Builders, so that what each takes to begin can be seen."""

    def packed() -> Work:
        model = decoder(num_layers, torch.bfloat16)
        pack(model)
        return model

    def torchao(compiled: bool) -> Work:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        model = WithLinear(decoder(num_layers))
        quantize_(model, Int8DynamicActivationInt8WeightConfig())
        return torch.compile(model, dynamic=False) if compiled else model

    def openvino() -> Work:
        import nncf
        import openvino as ov

        ids, positions = torch.zeros(1, 12, dtype=torch.long), torch.arange(12)[None]
        converted = ov.convert_model(WithLinear(decoder(num_layers)), example_input=(ids, positions))
        converted = nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT8_SYM)
        settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        compiled = ov.Core().compile_model(converted, "CPU", settings)
        return lambda ids, positions: torch.from_numpy(compiled((ids.numpy(), positions.numpy()))[0])

    return {
        "float32": lambda: decoder(num_layers),
        "bfloat16": lambda: decoder(num_layers, torch.bfloat16),
        "packed": packed,
        "ours": lambda: quantise(decoder(num_layers)),
        "torchao": lambda: torchao(False),
        "torchao compiled": lambda: torchao(True),
        "openvino": openvino,
    }


def build(
    builders: dict[str, Callable[[], Work]], chosen: list[str], inputs: dict[str, Any]
) -> tuple[dict[str, Work], dict[str, Any]]:
    """The ways that this environment has, and what starting each took."""
    made: dict[str, Work] = {}
    starts: dict[str, Any] = {}
    for name in chosen:
        started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            made[name] = builders[name]()
            with torch.inference_mode():
                for ids, positions in inputs.values():
                    made[name](ids, positions)
        except ModuleNotFoundError as error:
            print(f"{name}: left out, there is no package {error.name}")
            continue
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        starts[name] = {"seconds": time.process_time() - started, "megabytes": taken / 1024}
    return made, starts


@torch.inference_mode()
def measure(made: dict[str, Work], inputs: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    """CPU milliseconds and errors by shape and way."""
    found: dict[str, dict[str, Any]] = {}
    for shape, (ids, positions) in inputs.items():
        exact = made["float32"](ids, positions).float()
        times: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(rounds):
            for name, work in made.items():
                started = time.process_time()
                work(ids, positions)
                times[name].append(time.process_time() - started)
        found[shape] = {
            name: {
                "ms": 1e3 * statistics.median(times[name]),
                "error": float((work(ids, positions).float() - exact).norm() / exact.norm()),
            }
            for name, work in made.items()
        }
    return found


def main(argv: list[str] | None = None) -> int:
    """Print a line for each way; --json FILE keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ways", nargs="+", help="some of them (float32 is always there)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: (torch.randint(0, 40000, shape, generator=generator), torch.arange(shape[1]).expand(shape))
        for name, shape in SHAPES.items()
    }
    builders = ways(args.layers, args.threads)
    made, starts = build(builders, ["float32", *(name for name in args.ways or builders if name != "float32")], inputs)
    found = measure(made, inputs, args.rounds)
    for name in made:
        parts = [f"{shape} {rows[name]['ms']:.1f} ms, error {rows[name]['error']:.4f}" for shape, rows in found.items()]
        print(
            f"{name:<17} "
            + "; ".join(parts)
            + f"; begins in {starts[name]['seconds']:.1f} s, {starts[name]['megabytes']:.0f} MB"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"layers": args.layers, "threads": args.threads, "starts": starts, "times": found}, indent=1)
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
