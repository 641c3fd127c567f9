"""What a passage store saves: `python -m benchmarks.store_speed --minilm DIR`.

Contenders, interleaved round by round in one process on the same lists (embedded model, readout `fast`, passages of 100
tokens, warm page cache), one process per number of threads:

  without       the reranker in float32 without a store and without memory: every passage is computed
  fp32, bf16    a store in that format, the query's forward in float32 and in the fastest float format of this processor
  int8          an int8 store, the query's forward as for bf16
  int8-int8     an int8 store, the query's forward in int8 (`--dtype int8`)
  floor-...     the parts of each measured bare: a plain forward of the query's tokens through the same layers in the
                same format, and one product of the stored keys, side by side in memory, with the query's vectors
  minilm        ms-marco-MiniLM-L-12-v2 (ONNX, int8) on the same pairs; needs a folder with model.onnx and
                tokenizer.json, given by --minilm or HEADRANK_MINILM

Times are CPU seconds of the process; wall seconds stand in the JSON. Cold reads come first, before the store's pages
are in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.rerank_speed import QUERY, passages
from headrank.method.heads import HeadSet
from headrank.passage_store.content import passage_digest
from headrank.passage_store.conversion import convert
from headrank.passage_store.indexing import IndexSettings, index_corpus
from headrank.passage_store.store import PassageStore
from headrank.reranking.late_reader import LateReader
from headrank.reranking.model_sources import resolve_model
from headrank.reranking.reader import AttentionReader
from headrank.reranking.reranker import HeadRankReranker, choose_heads
from headrank.reranking.shipped_readouts import model_to_read

MODEL, HEADS = "embedded", "fast"
SIZES = (20, 40, 100)
GOALS = {"without / int8": (60, 90, 150), "minilm / int8": (8, 12, 20)}
OVER_A_STORE = {
    "fp32": ("fp32", "float32"),
    "bf16": ("bf16", "auto"),
    "int8": ("int8", "auto"),
    "int8-int8": ("int8", "int8"),
}
Work = Callable[[list[str]], object]


def make_stores(folder: Path, heads: HeadSet) -> list[str]:
    """A store in fp32, filled with the passages, and its conversions; the texts of the passages."""
    from transformers import AutoTokenizer

    documents = passages(max(SIZES), AutoTokenizer.from_pretrained(resolve_model(MODEL)))
    reader = AttentionReader.load(
        model_to_read(MODEL, HEADS), prompt=heads.prompt, last_layer=heads.l_max, dtype="float32"
    )
    index_corpus(
        folder / "fp32", LateReader(reader, heads), lambda: [("", text) for text in documents], IndexSettings("fp32")
    )
    for name in ("bf16", "int8"):
        convert(PassageStore(folder / "fp32"), folder / name, None, name, 1)
    return documents


class Contenders:
    """The ways, each a function of a list's documents."""

    def __init__(self, stores: Path, documents: list[str], minilm: str | None) -> None:
        """Loads a model for each."""
        heads = choose_heads(MODEL, HEADS)
        self.documents = documents
        without = HeadRankReranker.from_pretrained(MODEL, HEADS, dtype="float32", key_cache_bytes=0)
        self.ways: dict[str, Work] = {"without": lambda some: without.rank(QUERY, some)}
        for name, (store, dtype) in OVER_A_STORE.items():
            reranker = HeadRankReranker.from_pretrained(MODEL, HEADS, dtype=dtype, store=stores / store)
            self.ways[name] = lambda some, reranker=reranker: reranker.rank(QUERY, some)  # type: ignore[misc]
            self.ways[f"floor-{name}"] = _floor(heads, stores / store, documents, dtype)
        if minilm is not None:
            self.ways["minilm"] = _cross_encoder(minilm)

    def times(self, rounds: int, sizes: Sequence[int]) -> dict[str, dict[str, list[list[float]]]]:
        """(CPU, wall) seconds per query, by number of passages and contender, a pair a round."""
        found: dict[str, dict[str, list[list[float]]]] = {}
        for size in sizes:
            some = self.documents[:size]
            for work in self.ways.values():
                work(some)
            found[str(size)] = {name: [] for name in self.ways}
            for _ in range(rounds):
                for name, work in self.ways.items():
                    found[str(size)][name].append(seconds(work, some, 1 if name in ("without", "minilm") else 5))
        return found


def seconds(work: Work, some: list[str], repeats: int) -> list[float]:
    """CPU and wall seconds of one call, the mean of several."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        work(some)
    return [(time.process_time() - cpu) / repeats, (time.perf_counter() - wall) / repeats]


def _floor(heads: HeadSet, store: Path, documents: list[str], dtype: str) -> Work:
    reranker: Any = HeadRankReranker.from_pretrained(MODEL, HEADS, dtype=dtype, store=store)
    late, source = reranker.late, reranker.key_source
    ids = torch.tensor(late.encoder.encode_query(QUERY).input_ids[None].astype("int64"))
    positions = heads.prompt.branch_position + torch.arange(ids.shape[1])[None]
    vectors = late.query_vectors(late.encoder.encode_query(QUERY)).vectors_UKRD[0]
    products: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    entries = source.store.find([passage_digest(("", text)) for text in documents])
    numbers = {"int8": torch.int8, "bf16": torch.bfloat16, "fp32": torch.float32}[source.store.header.dtype]
    multiply = torch._int_mm if numbers == torch.int8 else torch.mm
    for size in SIZES:
        keys = [
            torch.from_numpy(entry.keys_ATD.view("i2" if numbers == torch.bfloat16 else entry.keys_ATD.dtype).copy())
            for entry in entries[:size]
        ]
        keys_ATD = torch.cat(keys, dim=1).view(numbers)
        of_pairs = [
            [head for head, pair in enumerate(late.pair_of_head) if pair == number] for number in range(len(late.pairs))
        ]
        products[size] = [
            (keys_ATD[pair], vectors[some].flatten(0, 1).T.mul(10).to(numbers).contiguous())
            for pair, some in enumerate(of_pairs)
        ]
    reranker.reader.model.attend = plain_attention

    @torch.inference_mode()
    def work(some: list[str]) -> None:
        reranker.reader.model(input_ids=ids, position_ids=positions)
        for keys_TD, query_DX in products[len(some)]:
            multiply(keys_TD, query_DX)

    return work


def plain_attention(
    module: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> Any:
    """Causal attention and nothing read, in place of a decoder's own."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2), None


def _cross_encoder(folder: str) -> Work:
    from data_tools.teachers.onnx_folder import OnnxTeacher
    from data_tools.teachers.teacher import TeacherSpec
    from headrank.formats import Document

    teacher = OnnxTeacher(TeacherSpec(folder, "onnx"))
    return lambda some: teacher.score_lists([(QUERY, [Document("", "", text) for text in some])])


def cold(stores: Path, documents: list[str]) -> dict[str, dict[str, float]]:
    """Wall seconds of opening a store whose pages were dropped from memory, of its first list, and of the same list
    again.
    """
    found = {}
    heads = choose_heads(MODEL, HEADS)
    reader = AttentionReader.load(model_to_read(MODEL, HEADS), prompt=heads.prompt, last_layer=heads.l_max)
    HeadRankReranker.from_reader(reader, heads).rank(QUERY, documents[:2])
    for size in SIZES:
        for path in (stores / "int8").rglob("*.bin"):
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        reranker = HeadRankReranker.from_reader(reader, heads, store=stores / "int8")
        opened = time.perf_counter()
        reranker.rank(QUERY, documents[:size])
        first = time.perf_counter()
        reranker.rank(QUERY, documents[:size])
        found[str(size)] = {"opening": opened - started, "first": first - opened, "again": time.perf_counter() - first}
        del reranker  # its maps would keep the pages
    return found


def show(results: dict[str, Any]) -> None:
    """Two tables: milliseconds, and the ratios that the goals are about."""
    for size, times in results["times"].items():
        medians = {name: 1e3 * statistics.median(cpu for cpu, _ in rounds) for name, rounds in times.items()}
        print(
            f"{size:>4} passages, CPU ms per query: "
            + ", ".join(f"{name} {value:,.1f}" for name, value in medians.items())
        )
        place = SIZES.index(int(size))
        parts = []
        for name in OVER_A_STORE:
            for other in ("without", "minilm") if name.startswith("int8") else ():
                if other in times:
                    goal = GOALS[f"{other} / int8"][place]
                    parts.append(f"{other} / {name} {ratio(times, other, name):.1f} (goal {goal})")
            parts.append(f"{name} / its floor {ratio(times, name, f'floor-{name}'):.2f} (goal 2)")
        print("     " + ", ".join(parts))
    for size, seconds in results["cold"].items():
        print(
            f"{size:>4} passages, wall ms from a cold disk: "
            + ", ".join(f"{name} {1e3 * value:.1f}" for name, value in seconds.items())
        )


def ratio(times: dict[str, list[list[float]]], one: str, other: str) -> float:
    """The median over rounds of CPU seconds of ``one`` over those of ``other``."""
    return statistics.median(a[0] / b[0] for a, b in zip(times[one], times[other], strict=True))


def main(argv: list[str] | None = None) -> int:
    """Print times and ratios for each number of threads; --json FILE keeps them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minilm",
        metavar="DIR",
        default=os.environ.get("HEADRANK_MINILM"),
        help="an ONNX cross-encoder (default: HEADRANK_MINILM)",
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--stores", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.stores:
        torch.set_num_threads(args.threads[0])
        documents = json.loads((args.stores / "documents.json").read_text())
        results = {
            "cold": cold(args.stores, documents),
            "times": Contenders(args.stores, documents, args.minilm).times(args.rounds, SIZES),
        }
        Path(args.json).write_text(json.dumps(results))
        return 0
    with tempfile.TemporaryDirectory(prefix="store-speed-") as name:
        folder = Path(name)
        (folder / "documents.json").write_text(json.dumps(make_stores(folder, choose_heads(MODEL, HEADS))))
        everything = {}
        for threads in args.threads:
            command = [sys.executable, "-m", "benchmarks.store_speed", "--stores", name, "--threads", str(threads)]
            command += [
                "--rounds",
                str(args.rounds),
                "--json",
                f"{name}/out.json",
                *(["--minilm", args.minilm] if args.minilm else []),
            ]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
            everything[str(threads)] = json.loads((folder / "out.json").read_text())
            print(f"threads {threads}")
            show(everything[str(threads)])
    if args.json:
        Path(args.json).write_text(json.dumps(everything, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
