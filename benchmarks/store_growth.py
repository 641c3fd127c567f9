"""How the cost of a scan grows with passages, tokens, key pairs and queries: `python -m benchmarks.store_growth
--output FILE.png`.

Made-up int8 stores, a query of 12 rows read by 3 heads of each pair; 100 passages of 100 tokens at 16 pairs where
nothing else is said. CPU milliseconds of one thread, the lowest of several rounds in which all sizes take turns. The
query's own forward is not in it: see benchmarks.store_speed. Many queries are those of one list, which are scanned
together: the cost is that of one of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from headrank.method.late_layout import QueryVectors
from headrank.passage_store.content import passage_digest
from headrank.passage_store.header import KeyIdentity, StoreHeader
from headrank.passage_store.keys import StoredForm
from headrank.passage_store.scan import Scanner
from headrank.passage_store.store import PassageStore, Scales, create_store
from headrank.passage_store.writer import StoreWriter, writing

HEAD_SIZE, HEADS_OF_PAIR, ROWS = 64, 3, 12
BASE = {"passages": 100, "tokens": 100, "pairs": 16, "queries": 1}
AXES = {
    "passages": (10, 20, 40, 100, 200, 400, 1000),
    "tokens": (25, 50, 100, 200, 400),
    "pairs": (4, 8, 16, 32, 60),
    "queries": (1, 2, 4, 8, 16, 32),
}


def make_store(folder: Path, passages: int, tokens: int, pairs: int) -> PassageStore:
    """A store of random keys."""
    shape = (pairs, HEAD_SIZE)
    scales = Scales(np.full(shape, 0.02, np.float32), np.zeros(shape, np.float32))
    names = tuple((layer, 0) for layer in range(pairs))
    header = StoreHeader(KeyIdentity("made up", "w", "none", "t", {}, HEAD_SIZE), names, "int8", scales=scales.digest)
    create_store(folder, header, scales)
    draw = np.random.default_rng(0)
    with writing(folder), StoreWriter(folder, header) as writer:
        for number in range(passages):
            writer.add(
                passage_digest(("", str(number))), draw.integers(-127, 128, (pairs, tokens, HEAD_SIZE), np.int8), tokens
            )
    return PassageStore(folder)


def scan_of(folder: Path, passages: int, tokens: int, pairs: int, queries: int) -> Callable[[], object]:
    """What looks up and scores one list for all queries."""
    store = make_store(folder, passages, tokens, pairs)
    num_heads = pairs * HEADS_OF_PAIR
    scanner = Scanner(
        StoredForm("int8", 1, store.scales),
        range(pairs),
        [head // HEADS_OF_PAIR for head in range(num_heads)],
        HEAD_SIZE,
    )
    generator = torch.Generator().manual_seed(0)
    weights, rows = torch.ones(num_heads), torch.full((1, ROWS), 1 / ROWS)
    vectors = [
        QueryVectors(
            torch.randn(1, num_heads, ROWS, HEAD_SIZE, generator=generator) * 0.3, torch.zeros(1, num_heads, ROWS), rows
        )
        for _ in range(queries)
    ]
    digests = [passage_digest(("", str(number))) for number in range(passages)]
    return lambda: scanner.scores(
        vectors, [entry for entry in store.find(digests) if entry is not None], weights, floor=0.1
    )


def measure(rounds: int) -> dict[str, list[tuple[int, float]]]:
    """CPU ms per query by axis: (size, lowest of the rounds)."""
    with tempfile.TemporaryDirectory(prefix="store-growth-") as name:
        work = {
            (axis, size): scan_of(Path(name) / f"{axis}-{size}", **{**BASE, axis: size})
            for axis, sizes in AXES.items()
            for size in sizes
        }
        best = dict.fromkeys(work, float("inf"))
        for _ in range(rounds):
            for key, scan in work.items():
                scan()
                started = time.process_time()
                scan()
                best[key] = min(best[key], time.process_time() - started)
    found: dict[str, list[tuple[int, float]]] = {axis: [] for axis in AXES}
    for (axis, size), seconds in best.items():
        found[axis].append((size, 1e3 * seconds / (size if axis == "queries" else 1)))
    return found


def draw(found: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """One panel an axis, both scales logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(found), figsize=(12, 3), sharey=True)
    for panel, (axis, points) in zip(panels, found.items(), strict=True):
        panel.plot([size for size, _ in points], [milliseconds for _, milliseconds in points], marker="o")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xlabel(
            {"queries": "queries of one list", "pairs": "key pairs", "tokens": "tokens of a passage"}.get(axis, axis)
        )
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("CPU ms of a scan, per query")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE.png", help="the figure; the numbers go beside it as .json"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = measure(args.rounds)
    for axis, points in found.items():
        print(f"{axis}: " + ", ".join(f"{size} {milliseconds:.2f} ms" for size, milliseconds in points))
    draw(found, args.output)
    args.output.with_suffix(".json").write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
