"""The frames of the paper's Tables 1 to 3 with its published numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from headrank.evaluation.published import SUCCESS_RATE, TABLE_1, TABLE_2, TABLE_3, published_numbers
from headrank.reports.paper_tables import Published, TableSpec
from headrank.reports.tables import Column

SHORT_TITLES = {
    "trec-covid": "COVID",
    "arguana": "ArguAna",
    "trec-news": "News",
    "fiqa": "FiQA",
    "scidocs": "SciDocs",
    "nfcorpus": "NFC",
}
SHORT_TITLES |= {"dbpedia": "DBPedia", "hotpotqa": "HotpotQA", "2wiki": "2Wiki", "musique": "MuSiQue"}


class KnownBenchmark(Protocol):
    """What a table needs to know of a benchmark; the registry is in data_tools, which reports may not import."""

    @property
    def group(self) -> str:
        """The line above the header."""

    @property
    def depth(self) -> int:
        """Candidates per query."""


def paper_specs(benchmarks: Mapping[str, KnownBenchmark]) -> list[TableSpec]:
    """Tables 1 to 3 in the paper's order."""
    return [
        _spec(TABLE_1, "ndcg10", benchmarks, by_group=True),
        _spec(TABLE_2, "multihop_recall", benchmarks),
        _spec(TABLE_3, "ablation", benchmarks, is_ablation=True),
    ]


def _spec(
    table: str,
    name: str,
    benchmarks: Mapping[str, KnownBenchmark],
    *,
    by_group: bool = False,
    is_ablation: bool = False,
) -> TableSpec:
    """One table: columns in its order, values, averages and success rates as it prints them."""
    numbers = [number for number in published_numbers() if number.table == table]
    columns = []
    for benchmark, measure in dict.fromkeys((number.benchmark, number.measure) for number in numbers):
        if benchmark in benchmarks:
            short = SHORT_TITLES.get(benchmark, benchmark.upper())
            group = (
                benchmarks[benchmark].group.title().replace("-Of-", "-of-")
                if by_group
                else ""
                if is_ablation
                else short
            )
            columns.append(Column(benchmark, measure, short if by_group or is_ablation else measure, group))
    return TableSpec(
        name=name,
        title=table.partition(": ")[2].partition(",")[0].replace("ablation", "Ablation"),
        columns=tuple(columns),
        published=tuple(
            Published(number.model, number.method, number.benchmark, number.measure, number.value)
            for number in numbers
            if number.benchmark != SUCCESS_RATE
        ),
        published_success={
            (number.model, number.method): number.value for number in numbers if number.benchmark == SUCCESS_RATE
        },
        methods=tuple(dict.fromkeys(number.method for number in numbers)) if is_ablation else None,
        has_average=not is_ablation,
        has_success_rate=not is_ablation,
        source=f"the paper's {table}",
        depths=tuple(dict.fromkeys(benchmarks[column.benchmark].depth for column in columns)),
    )
