"""The last thing `make demo` prints: one row a method on the held-out queries, and where everything is.

python examples/demo_table.py runs/demo --collection examples/collection
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headrank.evaluation.measures import evaluate_run
from headrank.evaluation.significance import bootstrap_interval
from headrank.formats import Candidate, Collection, read_json, read_run

ROWS = {
    "bm25": "BM25",
    "icr": "ICR, all heads, untrained",
    "core": "CoRe heads, untrained",
    "headrank": "HeadRank, trained",
}


def main() -> None:
    """Print the table from the cells below OUTPUT/heldout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder that launch/demo.sh wrote")
    parser.add_argument("--collection", default="examples/collection", help="the collection it ran on")
    args = parser.parse_args()
    collection = Collection.open(args.collection)
    table = Table(title=f"{collection.name}: held-out queries", caption=best_possible(args.output, collection))
    for column in ("", "NDCG@10", "95% interval", "seconds a query", "layers used"):
        table.add_column(column, justify="right" if column else "left")
    for name, title in ROWS.items():
        facts = read_json(args.output / "heldout" / name / "metrics.json")
        assert isinstance(facts, dict)
        table.add_row(title, *columns(facts), style="bold" if name == "headrank" else None)
    console = Console(width=max(Console().width, 100))
    console.print()
    console.print(table)
    for label, path in places(args.output):
        console.print(f"  {label:<10} {path}", soft_wrap=True, highlight=False)


def columns(facts: dict[str, Any]) -> list[str]:
    """NDCG@10 with its interval, seconds and layers of one method, as text."""
    values = list(facts["per_query"]["nDCG@10"].values())
    low, high = bootstrap_interval(values)
    layers = "-" if not facts.get("layers_used") else f"{facts['layers_used']} of {facts['num_layers']}"
    seconds = (
        "-" if facts["method"] == "bm25" else "with ICR" if facts["seconds_per_query"] is None else f"{facts['seconds_per_query']:.2f}"
    )
    return [f"{100 * sum(values) / len(values):.1f}", f"{100 * low:.1f} - {100 * high:.1f}", seconds, layers]


def best_possible(output: Path, collection: Collection) -> str:
    """The ceiling: the same candidates in the order of their grades."""
    qrels, run = collection.qrels(), read_run(output / "heldout" / "bm25" / "run.txt")
    facts = read_json(output / "heldout" / "bm25" / "metrics.json")
    assert isinstance(facts, dict)
    depth = facts["depth"]
    ordered = {}
    for query_id, rows in run.items():
        doc_ids = [row.doc_id for row in rows]
        doc_ids = sorted(doc_ids[:depth], key=lambda doc_id: -qrels[query_id].get(doc_id, 0)) + doc_ids[depth:]
        ordered[query_id] = [Candidate(doc_id, rank, -float(rank)) for rank, doc_id in enumerate(doc_ids, start=1)]
    ceiling = evaluate_run(ordered, qrels, ["nDCG@10"], query_ids=set(run)).mean("nDCG@10")
    return f"{len(run)} queries never trained on; the best order of the same {depth} candidates a query would have {100 * ceiling:.1f}"


def places(output: Path) -> list[tuple[str, Path]]:
    """What a person will want to open."""
    found = [
        ("report", output / "report" / "report.html"),
        ("figures", output / "report" / "figures"),
        ("viewer", output / "view.html"),
        ("model", output / "model"),
    ]
    return [(label, path) for label, path in found if path.exists()]


if __name__ == "__main__":
    main()
