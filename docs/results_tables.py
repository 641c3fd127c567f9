"""Write the tables of README.md and of pages of docs/: python -m docs.results_tables [--check] [--add FOLDER]

Each table stands between two marker comments and is replaced whole; the text around it is left alone. ``--check``
writes nothing and fails when a page is not current (`make results-page` writes, a test checks). ``--add FOLDER`` first
takes the cells below a folder of 'headrank benchmark run' into results/cells.jsonl.gz.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from docs.readout_tables import readout_floors, readout_models, readout_sizes, readouts
from docs.result_cells import (
    COLLECTIONS,
    DEEP,
    RESULTS,
    ROOT,
    PerQuery,
    Row,
    average,
    difference,
    kept,
    markdown,
    mean,
    per_query,
)
from headrank.experiments.cell_archive import CELLS, ArchivedCell, read_archive, write_archive
from headrank.experiments.cells import find_cells

PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("results", "readouts", "teacher_training")))

BM25: Row = ("first-stage", "bm25", "retriever")
OURS: Row = ("trained", "headrank+trained", "retriever")
FUSED: Row = ("trained", "headrank+fused", "retriever")
UNTRAINED: Row = ("base", "headrank+untrained", "retriever")
UNTRAINED_FUSED: Row = ("base", "headrank+untrained-fused", "retriever")
SHIPPED: Row = ("embedded", "headrank+late-fast", "retriever")
UNTOUCHED: Row = ("embedded", "headrank+late-untrained", "retriever")
WHOLE = "HeadRank, `embedded`, 300 words per passage"
SHORT = "-64"  # benchmarks whose passages are cut to 64 words


def paper_prompt(method: str) -> tuple[Row, Row]:
    """A training-free method in the sequential layout: candidates in BM25's order, and shuffled."""
    return ("base", method, "retriever"), ("base", method, "shuffled")


SEQUENTIAL = {
    "ICR, all heads": paper_prompt("icr"),
    "CoRe, 8 heads": paper_prompt("core"),
    "QR, 16 heads": paper_prompt("qr"),
    "NIAH, 8 heads": paper_prompt("niah"),
    "HeadRank's heads, untrained": paper_prompt("headrank+sequential-untrained"),
    "HeadRank, trained": (
        ("sequential", "headrank+trained", "retriever"),
        ("sequential", "headrank+trained", "shuffled"),
    ),
}
PARALLEL = {
    "ICR, all heads": ("base", "icr+parallel", "retriever"),
    "CoRe, 8 heads": ("base", "core+parallel", "retriever"),
    "QR, 16 heads": ("base", "qr+parallel", "retriever"),
    "HeadRank's heads, untrained": UNTRAINED,
    "HeadRank, trained": OURS,
    "HeadRank, trained, heads selected again": ("trained", "headrank", "retriever"),
    "HeadRank, trained on random pairs": ("random-pairs", "headrank+trained", "retriever"),
}
FUSIONS = {
    "ICR + BM25": ("base", "icr+parallel-fused", "retriever"),
    "CoRe + BM25": ("base", "core+parallel-fused", "retriever"),
    "QR + BM25": ("base", "qr+parallel-fused", "retriever"),
    "HeadRank's heads, untrained + BM25": UNTRAINED_FUSED,
    "HeadRank + BM25": FUSED,
}


def summary() -> str:
    """The question of README: is it better than BM25?"""
    header = ["BM25's top 20, 135M model", *COLLECTIONS, "average"]
    rows = {
        "BM25": BM25,
        "HeadRank's heads, untrained": UNTRAINED,
        "HeadRank, trained on 103 queries": OURS,
        "HeadRank + BM25": FUSED,
    }
    lines = [[label, *(mean(title, row, 20) for title in COLLECTIONS), average(row)] for label, row in rows.items()]
    tests = [difference(per_query(title, FUSED, 20), per_query(title, BM25, 20)) for title in COLLECTIONS]
    return markdown(header, [*lines, ["HeadRank + BM25 vs. BM25 (95% CI)", *tests, ""]])


def embedded() -> str:
    """The reranker that comes with the package beside the cross-encoder that taught it, on the same lists."""
    peer = kept("teacher.json")
    rows: dict[str, list[PerQuery]] = {
        label: [per_query(title, row, 20, SHORT) or {} for title in COLLECTIONS]
        for label, row in {
            "BM25": BM25,
            "HeadRank, untouched model": UNTOUCHED,
            "HeadRank, `embedded`": SHIPPED,
        }.items()
    }
    rows["MiniLM-L-12 cross-encoder (the teacher)"] = [peer[benchmark] for benchmark, _ in COLLECTIONS.values()]
    rows[WHOLE] = [per_query(title, SHIPPED, 20) or {} for title in COLLECTIONS]
    lines = [[label, *(f"{value:.1f}" for value in values), f"{fmean(values):.1f}"] for label, values in _means(rows)]
    whole, ours = rows.pop(WHOLE), rows.pop("HeadRank, `embedded`")
    tests = {f"`embedded` minus {label}": (ours, others) for label, others in rows.items()}
    tests["`embedded`, 300 words, minus BM25"] = (whole, rows["BM25"])
    for label, (one, other) in tests.items():
        lines.append([label, *(difference(*pair) for pair in zip(one, other, strict=True)), ""])
    return markdown(["BM25's top 20, 64 words per passage", *COLLECTIONS, "average"], lines)


def _means(rows: Mapping[str, Sequence[PerQuery]]) -> Iterable[tuple[str, list[float]]]:
    return ((label, [fmean(values.values()) for values in columns]) for label, columns in rows.items())


def layouts(depth: int) -> str:
    """Every row in both layouts; the sequential one in both orders."""
    titles = list(COLLECTIONS) if depth == 20 else list(DEEP)
    lines = [["BM25", *(mean(title, BM25, depth) for title in titles)]]
    for label, (retriever, shuffled) in SEQUENTIAL.items():
        pairs = [f"{mean(title, retriever, depth)} / {mean(title, shuffled, depth)}" for title in titles]
        lines.append([f"sequential: {label}", *pairs])
    for label, row in PARALLEL.items():
        if any(per_query(title, row, depth) for title in titles):
            lines.append([f"parallel: {label}", *(mean(title, row, depth) for title in titles)])
    return markdown([f"depth {depth}", *titles], lines)


def contrasts() -> str:
    """The trained model in the parallel layout minus every other row, at depth 20."""
    others = {"BM25": BM25} | {f"{label} (parallel)": row for label, row in PARALLEL.items() if row != OURS}
    others |= {f"{label} (sequential, BM25's order)": pair[0] for label, pair in SEQUENTIAL.items()}
    lines = [
        [label, *(difference(per_query(title, OURS, 20), per_query(title, row, 20)) for title in COLLECTIONS)]
        for label, row in others.items()
    ]
    return markdown(["HeadRank (trained, parallel) minus, depth 20", *COLLECTIONS], lines)


def fusion(depth: int) -> str:
    """With BM25's scores at equal weights."""
    titles = list(COLLECTIONS) if depth == 20 else list(DEEP)
    lines = [
        [label, *(mean(title, row, depth) for title in titles)] for label, row in ({"BM25": BM25} | FUSIONS).items()
    ]
    for label, row in {"BM25": BM25, "HeadRank alone": OURS, "untrained heads + BM25": UNTRAINED_FUSED}.items():
        texts = [difference(per_query(title, FUSED, depth), per_query(title, row, depth)) for title in titles]
        lines.append([f"HeadRank + BM25 minus {label}", *texts])
    return markdown([f"depth {depth}", *titles], lines)


def ablations() -> str:
    """One thing left out at a time, on TREC DL 2019."""
    values = kept("ablations.json")
    labels = {
        "full": "full",
        "untrained": "untrained, the same heads",
        "sft": "SFT (RankNet) loss",
        "all-heads": "all heads",
    }
    labels |= {
        "no-gate": "without the entropy gate",
        "no-alps": "without ALPS (random pairs)",
        "no-omega": "without Omega",
    }
    labels |= {"no-prox": "without the proximal penalty"}
    lines = [
        [
            label,
            f"{fmean(values[name].values()):.1f}",
            "" if name == "full" else difference(values[name], values["full"]),
        ]
        for name, label in labels.items()
    ]
    return markdown(["TREC DL 2019, depth 20", "NDCG@10", "minus full (95% CI)"], lines)


def cross_validation() -> str:
    """Every training query held out once."""
    values = kept("cross_validation.json")
    labels = {
        "BM25": "BM25",
        "untrained": "HeadRank's heads, untrained",
        "ALPS": "HeadRank (ALPS)",
        "random pairs": "HeadRank, random pairs",
    }
    lines = []
    for name, label in labels.items():
        tests = [
            difference(values[name], values[other]) if name not in ("BM25", other) else ""
            for other in ("BM25", "untrained")
        ]
        lines.append([label, f"{fmean(values[name].values()):.1f}", *tests])
    return markdown(
        ["103 held-out training queries, depth 20", "NDCG@10", "minus BM25 (95% CI)", "minus untrained (95% CI)"], lines
    )


TABLES: dict[str, Callable[[], str]] = {
    "readouts": readouts,
    "readout-sizes": readout_sizes,
    "readout-floors": readout_floors,
    "readout-models": readout_models,
    "summary": summary,
    "embedded": embedded,
    "layouts-20": lambda: layouts(20),
    "layouts-40": lambda: layouts(40),
    "contrasts": contrasts,
    "fusion-20": lambda: fusion(20),
    "fusion-40": lambda: fusion(40),
    "ablations": ablations,
    "cross-validation": cross_validation,
}
_BLOCK = re.compile(r"(<!-- table (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The page with every marked table made again."""
    return _BLOCK.sub(lambda found: f"{found[1]}{TABLES[found['name']]()}\n{found[3]}", text)


def add(folder: Path) -> None:
    """Take the cells below ``folder`` into the archive; one whose place is there already is replaced."""
    new = find_cells(folder)
    places = {cell.path.relative_to(folder).as_posix() for cell in new}
    old = [cell for cell in read_archive(RESULTS) if isinstance(cell, ArchivedCell) and cell.place not in places]
    write_archive([*old, *new], folder, RESULTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is not current")
    parser.add_argument(
        "--add", type=Path, metavar="FOLDER", help=f"first take the cells below this folder into results/{CELLS}"
    )
    args = parser.parse_args(argv)
    if args.add:
        add(args.add)
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fresh = with_tables(text)
        if fresh != text and args.check:
            stale.append(str(page.relative_to(ROOT)))
        elif fresh != text:
            page.write_text(fresh, encoding="utf-8")
            print(f"{page.relative_to(ROOT)} written")
    if stale:
        print(f"not current: {', '.join(stale)}; run 'make results-page'", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
