"""How close reranking is to its floor, and how far ahead of the usual ways: `python -m benchmarks.rerank_speed`.

Contenders, interleaved round by round in one process on one prompt (embedded model, passages of about 100 tokens):

  floor    a bare SDPA forward of the first l_max + 1 layers over the prompt, ids given
  ours     HeadRankReranker, tokenisation and both branches included
  parallel the same in the parallel layout: attention linear in their number
  two-pass two calls of the plain causal LM with SDPA and a KV cache (query, then N/A), rows recomputed from the kept
           queries and keys: how ICR and CoRe work
  eager    attn_implementation="eager" with output_attentions, two full passes (fewer passages: it is quadratic)

  lean     two-pass without logits, KV cache and unread layers' keys: what it could be at best; for memory only

Memory is the growth of the peak resident size over the loaded weights, each contender in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headrank.method.heads import HeadSet
from headrank.method.prompt import PromptTemplate
from headrank.method.spans import PromptEncoder
from headrank.model_config import load_config, truncate_config
from headrank.reranking.model_sources import resolve_model
from headrank.reranking.reader import quiet_loading
from headrank.reranking.reranker import HeadRankReranker

SENTENCE = (
    "The report on harbour number {n} describes how the tide, the wind and the traffic of small boats shaped the "
    "quay over "
    "many years, why the old crane was replaced, what the town paid for it, and which families still keep their "
    "nets there. "
)
Work = Callable[[list[str]], object]
QUERY = "why was the old crane at the harbour replaced"


def heads_up_to(last_layer: int, num_layers: int, num_heads: int) -> HeadSet:
    """Eight heads spread over the layers, the deepest in ``last_layer``: what matters for speed is only where they
    lie.
    """
    layers = [max(0, last_layer - 2 * step) for step in range(8)]
    heads = tuple(dict.fromkeys((layer, (3 * step) % num_heads) for step, layer in enumerate(layers)))
    return HeadSet(heads, "benchmark", "embedded", num_layers, num_heads)


def passages(count: int, tokenizer: object, tokens: int = 100) -> list[str]:
    """Passages of about ``tokens`` tokens each, all different."""
    result = []
    for number in range(count):
        text = SENTENCE.format(n=number) * 4
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]  # type: ignore[operator]
        result.append(tokenizer.decode(ids))  # type: ignore[attr-defined]
    return result


def pairs(documents: list[str]) -> list[tuple[str, str]]:
    """Untitled documents as the encoder takes them."""
    return [("", text) for text in documents]


class Contenders:
    """The ways, built on demand so that a memory run loads only one."""

    def __init__(self, model: str, num_passages: int, last_layer: int) -> None:
        """``last_layer`` is l_max for the floor and for ours."""
        self.model, self.last_layer = resolve_model(model), last_layer
        config = load_config(self.model)
        self.num_layers, self.num_heads = (
            config.num_hidden_layers,
            config.num_attention_heads,
        )
        self.heads = heads_up_to(last_layer, self.num_layers, self.num_heads)
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.documents = passages(num_passages, self.tokenizer)

    def build(self, name: str) -> Work:
        """A function of the documents that does the contender's whole work once."""
        ways = {
            "floor": self._floor,
            "ours": self._ours,
            "parallel": self._parallel,
            "two-pass": self._two_pass,
            "lean": self._lean,
            "eager": self._eager,
        }
        with quiet_loading():
            return ways[name]()

    def _encoder(self, calibrate: bool) -> PromptEncoder:
        return PromptEncoder(self.tokenizer, PromptTemplate(), calibrate=calibrate)

    def _floor(self) -> Work:
        config = load_config(self.model)
        truncate_config(config, self.last_layer + 1)
        model = AutoModel.from_pretrained(
            self.model, config=config, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        # ids given, as a floor has them
        prompts = {len(some): self._ids(some) for some in (self.documents, self.documents[:1])}
        return torch.inference_mode()(lambda documents: model(input_ids=prompts[len(documents)], use_cache=False))

    def _ids(self, documents: list[str]) -> torch.Tensor:
        return torch.tensor(self._encoder(False).encode(QUERY, pairs(documents)).input_ids[None].astype("int64"))

    def _ours(self) -> Work:
        reranker = HeadRankReranker.from_pretrained(self.model, self.heads)
        return lambda documents: reranker.rank(QUERY, documents)

    def _parallel(self) -> Work:
        reranker = HeadRankReranker.from_pretrained(
            self.model, self.heads, prompt=PromptTemplate(document_layout="parallel")
        )
        return lambda documents: reranker.rank(QUERY, documents)

    def _two_pass(self) -> Work:
        return self._rows_twice(AutoModelForCausalLM, range(self.num_layers), use_cache=True)

    def _lean(self) -> Work:
        return self._rows_twice(AutoModel, self.heads.by_layer(), use_cache=False)

    def _rows_twice(self, kind: Any, layers_kept: Collection[int], use_cache: bool) -> Work:
        """Two SDPA passes that keep the query rows and the keys of some layers, rows recomputed after each."""
        model = kind.from_pretrained(self.model, dtype=torch.float32, attn_implementation=_register_row_keeper()).eval()
        encoder, by_layer = self._encoder(False), self.heads.by_layer()

        @torch.inference_mode()
        def work(documents: list[str]) -> None:
            for query in (QUERY, "N/A"):
                context = encoder.encode(query, pairs(documents))
                ids = torch.tensor(context.input_ids[None].astype("int64"))
                kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
                model(input_ids=ids, use_cache=use_cache, kept_rows=(context.query_rows, layers_kept, kept))
                for layer, heads in by_layer.items():
                    rows, keys = kept[layer]
                    group = rows.shape[1] // keys.shape[1]
                    logits = rows[0, heads] @ keys[0, [head // group for head in heads]].transpose(-1, -2)
                    logits.softmax(-1).mean(1)

        return work

    def _eager(self) -> Work:
        model = AutoModel.from_pretrained(self.model, dtype=torch.float32, attn_implementation="eager").eval()
        encoder = self._encoder(False)

        @torch.inference_mode()
        def work(documents: list[str]) -> None:
            for query in (QUERY, "N/A"):
                context = encoder.encode(query, pairs(documents))
                ids = torch.tensor(context.input_ids[None].astype("int64"))
                attentions = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
                for layer, heads in self.heads.by_layer().items():
                    attentions[layer][0, heads, slice(*context.query_rows)].mean(1)

        return work


def _register_row_keeper() -> str:
    """transformers' own SDPA that also keeps the query rows and all keys of some layers, to recompute rows
    afterwards.
    """

    def keep(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, *rest: Any, kept_rows: Any, **options: Any
    ) -> Any:
        (start, end), layers, kept = kept_rows
        if module.layer_idx in layers:
            kept[module.layer_idx] = (query[:, :, start:end] * options["scaling"], key)
        return sdpa_attention_forward(module, query, key, *rest, **options)

    AttentionInterface.register("rows_kept", keep)
    AttentionMaskInterface.register("rows_kept", sdpa_mask)
    return "rows_kept"


def matmul_peak(seconds: float = 1.0) -> float:
    """FLOP/s of a large float32 matmul with the current number of threads."""
    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    left @ right
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        left @ right
        best = max(best, 2 * 2048**3 / (time.perf_counter() - started))
    return best


def forward_flops(contenders: Contenders, num_tokens: int) -> float:
    """Multiply-adds of l_max + 1 layers over the prompt, counted from the configuration; causal attention counts
    half.
    """
    config = load_config(contenders.model)
    hidden, ffn = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    attention = hidden * head * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    dense = 2 * num_tokens * (attention + 3 * hidden * ffn)
    rows = 2 * 2 * num_tokens * num_tokens / 2 * config.num_attention_heads * head
    return (contenders.last_layer + 1) * (dense + rows)


def time_interleaved(contenders: Contenders, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Wall seconds of each contender, one after the other in every round, after one warm-up each."""
    work = {name: contenders.build(name) for name in names}
    for function in work.values():
        function(contenders.documents)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, function in work.items():
            started = time.perf_counter()
            function(contenders.documents)
            times[name].append(time.perf_counter() - started)
    return times


def peak_growth(model: str, name: str, num_passages: int, last_layer: int) -> int:
    """Bytes by which one run of a contender raises the peak resident size, measured in a fresh process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.rerank_speed",
        "--model",
        model,
        "--memory-of",
        name,
    ]
    command += ["--passages", str(num_passages), "--last-layer", str(last_layer)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_memory(contenders: Contenders, name: str) -> int:
    """Growth of the resident peak in one run; a one-passage run first touches the mapped weights and library
    buffers.
    """
    work = contenders.build(name)
    work(contenders.documents[:1])
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present resident size (Linux)
    before = _status("VmRSS")
    work(contenders.documents)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main(argv: list[str] | None = None) -> int:
    """Print times, ratios, tokens/s and memory; --json FILE keeps them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--passages", type=int, default=40)
    parser.add_argument("--last-layer", type=int, default=16, help="l_max (17 of 30 layers by default)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--eager-passages",
        type=int,
        default=10,
        help="passages for the quadratic contender's comparison",
    )
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    contenders = Contenders(args.model, args.passages, args.last_layer)
    if args.memory_of:
        print(measure_memory(contenders, args.memory_of))
        return 0
    context = contenders._encoder(True).encode(QUERY, pairs(contenders.documents))
    results: dict[str, object] = {
        "passages": args.passages,
        "tokens": context.length,
        "last_layer": args.last_layer,
        "times": {},
    }
    print(
        f"{args.passages} passages, {context.length} tokens, layers {args.last_layer + 1}/{contenders.num_layers}, "
        f"{args.rounds} rounds"
    )
    for threads in dict.fromkeys(args.threads):
        torch.set_num_threads(threads)
        times = time_interleaved(contenders, ["floor", "ours", "parallel", "two-pass"], args.rounds)
        medians = {name: statistics.median(values) for name, values in times.items()}
        others = ("floor", "two-pass", "parallel")
        ratio = {
            name: statistics.median(a / b for a, b in zip(times["ours"], times[name], strict=True)) for name in others
        }
        peak = matmul_peak()
        share = forward_flops(contenders, context.length) / medians["ours"] / peak
        print(
            f"threads {threads}: floor {medians['floor']:.2f} s, ours {medians['ours']:.2f} s, two-pass "
            f"{medians['two-pass']:.2f} s, "
            f"parallel {medians['parallel']:.2f} s | ours/parallel {ratio['parallel']:.3f}, "
            f"ours/floor {ratio['floor']:.3f} (bar 1.10), ours/two-pass {ratio['two-pass']:.3f} (bar 0.50) | "
            f"{context.length / medians['ours']:.0f} tokens/s, {share:.0%} of the measured matmul peak "
            f"({peak / 1e9:.0f} GFLOP/s)"
        )
        results["times"][str(threads)] = {
            **times,
            "ratios": ratio,
            "matmul_share": share,
        }  # type: ignore[index]
    _report_memory(args, results)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as stream:
            json.dump(results, stream, indent=2)
    return 0


def _report_memory(args: argparse.Namespace, results: dict[str, object]) -> None:
    """Peak growth against two-pass at full size and against eager at the size it can hold."""
    ours, two_pass, lean = (
        peak_growth(args.model, name, args.passages, args.last_layer) for name in ("ours", "two-pass", "lean")
    )
    small, eager = (peak_growth(args.model, name, args.eager_passages, args.last_layer) for name in ("ours", "eager"))
    megabytes = 1 / 2**20
    print(
        f"memory over the weights: ours {ours * megabytes:.0f} MiB, two-pass {two_pass * megabytes:.0f} MiB, "
        f"ratio {ours / two_pass:.3f} (bar 0.25), lean two-pass {lean * megabytes:.0f} MiB; "
        f"at {args.eager_passages} passages ours {small * megabytes:.0f} MiB, "
        f"eager {eager * megabytes:.0f} MiB, ratio {small / eager:.3f} (bar 0.05)"
    )
    results["memory"] = {"ours": ours, "two-pass": two_pass, "lean": lean, "ours_small": small, "eager_small": eager}


if __name__ == "__main__":
    sys.exit(main())
