"""The paper's fourteen benchmarks: candidates, measure, where each comes from, and what is peculiar about it.

Names of indexes, topics and judgements are Pyserini's (the same from 1.0 to 2.3); ``ir_datasets`` is the id of the same
data there, where it is the same. Licence notes are pointers, checked against the sources they name; the terms of the
source hold. A prepared benchmark is a collection folder called by its name in ``benchmark_home``.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path

from headrank.errors import InputError
from headrank.evaluation.published import PublishedNumber, published_numbers

_OWN_LICENCE = "see the source's own terms; BEIR grants none"
_WIKIPEDIA_LICENCE = "texts of Wikipedia (CC BY-SA); see the source's own terms"
_MS_MARCO_LICENCE = "for non-commercial research, without any licence to the texts: https://microsoft.github.io/msmarco"
_MS_MARCO_QUIRKS = (
    "passages have no titles",
    "some characters of the original texts are encoded twice; ir_datasets repairs them",
)


@dataclass(frozen=True)
class Benchmark:
    """One column of Table 1 or 2. ``num_queries`` is how many judged queries its test set has."""

    name: str
    title: str
    group: str  # in-domain, out-of-domain or multi-hop
    num_queries: int
    retriever: str = "bm25"
    depth: int = 40
    measures: tuple[str, ...] = ("nDCG@10",)
    index: str | None = None
    topics: str | None = None
    qrels: str | None = None
    ir_datasets: str | None = None
    source: str = ""
    licence: str = _OWN_LICENCE
    quirks: tuple[str, ...] = ()
    aliases: tuple[str, ...] = field(default=(), repr=False)

    def published(self) -> list[PublishedNumber]:
        """Every number the paper prints for this benchmark."""
        return [number for number in published_numbers() if number.benchmark == self.name]

    def published_first_stage(self) -> dict[str, float]:
        """Measure -> the paper's value of the candidates as retrieved, in percent."""
        return {number.measure: number.value for number in self.published() if number.method == self.retriever}


def _beir(name: str, title: str, num_queries: int, dataset: str, **changes: object) -> Benchmark:
    """A BEIR data set under Pyserini's names."""
    changes.setdefault("ir_datasets", f"beir/{dataset}")
    return Benchmark(
        name,
        title,
        "out-of-domain",
        num_queries,
        index=f"beir-v1.0.0-{dataset}.flat",
        topics=f"beir-v1.0.0-{dataset}-test",
        qrels=f"beir-v1.0.0-{dataset}-test",
        **changes,  # type: ignore[arg-type]
    )


def _multi_hop(name: str, title: str, **changes: object) -> Benchmark:
    """A multi-hop question set of HippoRAG: 1,000 questions over the passages of all of them."""
    return Benchmark(
        name,
        title,
        "multi-hop",
        1000,
        retriever="colbertv2",
        depth=20,
        measures=("R@2", "R@5"),
        source="FILE.json of github.com/OSU-NLP-Group/HippoRAG, branch legacy, data/ (candidates: --run, or "
        "--colbert), or of "
        "github.com/OSU-NLP-Group/In-Context-Reranking (ColBERTv2's top 20 inside)",
        **changes,  # type: ignore[arg-type]
    )


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "dl19",
            "TREC Deep Learning 2019",
            "in-domain",
            43,
            index="msmarco-v1-passage",
            topics="dl19-passage",
            qrels="dl19-passage",
            ir_datasets="msmarco-passage/trec-dl-2019/judged",
            licence=_MS_MARCO_LICENCE,
            quirks=_MS_MARCO_QUIRKS,
            aliases=("trec-dl-2019", "dl2019"),
        ),
        Benchmark(
            "dl20",
            "TREC Deep Learning 2020",
            "in-domain",
            54,
            index="msmarco-v1-passage",
            topics="dl20",
            qrels="dl20-passage",
            ir_datasets="msmarco-passage/trec-dl-2020/judged",
            licence=_MS_MARCO_LICENCE,
            quirks=_MS_MARCO_QUIRKS,
            aliases=("trec-dl-2020", "dl2020"),
        ),
        _beir(
            "trec-covid",
            "TREC-COVID",
            50,
            "trec-covid",
            quirks=("two of BEIR's grades are -1; Pyserini's have none",),
            aliases=("covid",),
        ),
        _beir(
            "arguana",
            "ArguAna",
            1406,
            "arguana",
            quirks=(
                "a query is itself a document of the corpus; Pyserini's own table (39.70) removes it: --remove-query",
                "the paper's BM25 (29.99) is ten points lower, as a run that keeps it would be",
                "queries are whole paragraphs, and each has one relevant document",
            ),
        ),
        _beir(
            "trec-news",
            "TREC-News",
            57,
            "trec-news",
            ir_datasets=None,
            source="https://trec.nist.gov/data/news2019.html and, for the texts, https://trec.nist.gov/data/wapost",
            licence="texts of the Washington Post: from NIST, after an agreement",
            quirks=(
                "a query is the title of an article",
                "grades are 0 to 4 in Pyserini; NIST's own are gains (0, 2, 4, 8, 16), of which no two differ by "
                "one: no adjacent pairs",
            ),
            aliases=("news",),
        ),
        _beir("fiqa", "FiQA-2018", 648, "fiqa", ir_datasets="beir/fiqa/test", quirks=("documents have no titles",)),
        _beir(
            "scidocs",
            "SciDocs",
            1000,
            "scidocs",
            quirks=("queries are titles of papers", "relevance is citation: about 5 cited and 25 others a query"),
        ),
        _beir(
            "nfcorpus",
            "NFCorpus",
            323,
            "nfcorpus",
            ir_datasets="beir/nfcorpus/test",
            quirks=(
                "15 queries retrieve nothing: the paper's 33.75 averages over the other 308, over all 323 it is 32.18",
            ),
            aliases=("nfc",),
        ),
        _beir("nq", "Natural Questions", 3452, "nq", licence=_WIKIPEDIA_LICENCE, aliases=("natural-questions",)),
        _beir(
            "dbpedia",
            "DBPedia-Entity",
            400,
            "dbpedia-entity",
            ir_datasets="beir/dbpedia-entity/test",
            licence=_WIKIPEDIA_LICENCE,
            quirks=("documents are entities; grades 0 to 2",),
            aliases=("dbpedia-entity",),
        ),
        _beir(
            "fever",
            "FEVER",
            6666,
            "fever",
            ir_datasets="beir/fever/test",
            licence=_WIKIPEDIA_LICENCE,
            quirks=("queries are claims, true and false",),
        ),
        _multi_hop(
            "hotpotqa",
            "HotpotQA",
            licence="CC BY-SA 4.0 (hotpotqa.github.io)",
            quirks=(
                "two supporting passages a question",
                "BEIR's hotpotqa is another task: all of Wikipedia, 7,405 questions",
            ),
            aliases=("hotpot",),
        ),
        _multi_hop(
            "2wiki",
            "2WikiMultihopQA",
            licence="Apache-2.0 (github.com/Alab-NII/2wikimultihop), texts of Wikipedia",
            quirks=("two to four supporting passages a question",),
            aliases=("2wikimultihopqa",),
        ),
        _multi_hop(
            "musique",
            "MuSiQue",
            licence="CC BY 4.0 (github.com/StonyBrookNLP/musique), texts of Wikipedia",
            quirks=("two to four supporting passages a question",),
        ),
    )
}


def find_benchmark(name: str) -> Benchmark:
    """A benchmark by its name or another of its names; an unknown one is an InputError with the nearest."""
    names = {alias: benchmark for benchmark in BENCHMARKS.values() for alias in (benchmark.name, *benchmark.aliases)}
    found = names.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the names are {', '.join(BENCHMARKS)}"
        raise InputError(f"benchmark {name!r} is not known; {hint}")
    return found


def benchmark_home(given: str | os.PathLike[str] | None = None) -> Path:
    """Where prepared benchmarks lie: the given folder, else $HEADRANK_BENCHMARKS, else the user's cache."""
    from headrank.reranking.embedded_model import cache_directory

    named = given or os.environ.get("HEADRANK_BENCHMARKS")
    return Path(named).expanduser() if named else cache_directory() / "benchmarks"


def is_ready(benchmark: Benchmark, home: Path) -> bool:
    """Whether ``headrank benchmark prepare`` has made it in ``home``."""
    return (home / benchmark.name / "benchmark.json").is_file()
