"""The tables of docs/readouts.md, from results/readouts/."""

from __future__ import annotations

import json
from typing import Any

from docs.result_cells import RESULTS, difference, markdown


def fit_report(name: str) -> dict[str, Any]:
    """What `headrank select-heads --method readout --report` wrote."""
    values: dict[str, Any] = json.loads((RESULTS / "readouts" / f"{name}.json").read_text(encoding="utf-8"))
    return values


def has_fit(name: str) -> bool:
    """Whether that fit was kept."""
    return (RESULTS / "readouts" / f"{name}.json").is_file()


def fit_row(name: str, layers: int, groups: int | None, *, with_length: bool = False) -> dict[str, Any]:
    """The row of a size; the one with the log of the length beside the heads where that is asked for."""
    wanted = (layers, groups, with_length)
    return next(row for row in fit_report(name)["rows"] if (row["layers"], row["groups"], row["with_length"]) == wanted)


FITS = {  # label -> report, layers, groups, the log of the length too
    "late layout, all heads (`full`)": ("late", 30, None, False),
    "late layout, all heads of 20 layers": ("late", 20, None, False),
    "the same and the log of the passage's length": ("late", 20, None, True),
    "late layout, 20 layers, 16 groups (`fast`)": ("late-fast", 20, 16, False),
    "parallel layout, all heads": ("parallel", 30, None, False),
}


def readouts() -> str:
    """Nested cross-validation of the untouched model."""
    bm25, full = fit_report("late")["first_stage"], fit_row("late", 30, None)
    lines = [["BM25", f"{bm25['quality']:.1f}", *(f"{value:.1f}" for value in bm25["by_collection"].values()), "", ""]]
    for label, (name, layers, groups, with_length) in FITS.items():
        if has_fit(name):
            row = fit_row(name, layers, groups, with_length=with_length)
            tests = [difference(row["per_query"], other["per_query"]) for other in (bm25, full)]
            numbers = [f"{value:.1f}" for value in (row["quality"], *row["by_collection"].values())]
            lines.append([label, *numbers, tests[0], "" if row == full else tests[1]])
    names = [f"of it {name}" for name in bm25["by_collection"]]
    header = [
        "103 held-out queries, top 40, 64 words",
        "NDCG@10",
        *names,
        "minus BM25 (95% CI)",
        "minus late `full` (95% CI)",
    ]
    return markdown(header, lines)


def readout_sizes() -> str:
    """Depth in the late layout."""
    rows = [row for row in fit_report("late")["rows"] if not row["with_length"]]
    best = rows[-1]["per_query"]
    return markdown(
        ["layers computed", "NDCG@10", "minus all layers (95% CI)"],
        [
            [str(row["layers"]), f"{row['quality']:.1f}", difference(row["per_query"], best) if row != rows[-1] else ""]
            for row in rows
        ],
    )


def readout_floors() -> str:
    """The floor under the log, each fitted and measured for itself."""
    names = [f"floor-{floor}" for floor in ("0", "0.03", "0.1", "0.3", "1") if has_fit(f"floor-{floor}")]
    reports = {name.removeprefix("floor-"): fit_report(name) for name in names}
    columns = list(next(iter(reports.values()))["first_stage"]["by_collection"]) if reports else []
    rows = {floor: report["rows"][0]["by_collection"] for floor, report in reports.items()}
    return markdown(
        ["floor f", *columns], [[floor, *(f"{row[column]:.1f}" for column in columns)] for floor, row in rows.items()]
    )


MODELS = {  # label -> report, parameters without embeddings in millions, as their configurations give them
    "Gemma 3 270M": ("model-gemma3-270m", 100),
    "SmolLM2-135M": ("model-smollm2-135m", 106),
    "Qwen2.5-Coder 0.5B": ("model-qwen2.5-coder-0.5b", 358),
    "Qwen2.5-Coder 1.5B": ("model-qwen2.5-coder-1.5b", 1311),
}


def readout_models() -> str:
    """Four models, each with a readout of its own."""
    lines = []
    for label, (name, size) in MODELS.items():
        if not has_fit(name):
            continue
        report = fit_report(name)
        row, bm25 = max(report["rows"], key=lambda row: row["layers"]), report["first_stage"]
        test = difference(row["per_query"], bm25["per_query"])
        numbers = [str(row["layers"]), str(len(row["per_query"])), f"{bm25['quality']:.1f}", f"{row['quality']:.1f}"]
        lines.append([label, f"{size}M", *numbers, test])
    header = ["model", "without embeddings", "layers", "lists", "BM25", "late readout", "minus BM25 (95% CI)"]
    return markdown(header, lines) if lines else "None has been measured yet."
