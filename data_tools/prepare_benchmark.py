"""Make a benchmark out of local files, ir_datasets or Pyserini, and compare its candidates with the paper's
first-stage row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_tools.benchmarks import Benchmark
from data_tools.collection_files import write_collection
from data_tools.retrieve import Bm25Index, RankedList, search_all, strictly_decreasing
from data_tools.sources.beir_folder import find_beir_files, read_beir_qrels, read_beir_queries
from headrank.errors import InputError
from headrank.evaluation.measures import evaluate_run
from headrank.files import read_json
from headrank.formats import Candidate, Collection, Document, Qrels, Run, iterate_corpus, read_corpus, read_run

RETRIEVAL_DEPTH = 100  # more than any table needs, so that deeper lists can be tried
EQUAL = 0.0051  # the paper prints two digits
Watch = Callable[[Iterable[Document]], Iterable[Document]]  # lets the caller show progress


@dataclass(frozen=True)
class Material:
    """What a benchmark is made of; ``origin`` says in words where the candidates come from."""

    queries: dict[str, str]
    qrels: Qrels
    run: dict[str, RankedList]
    documents: dict[str, Document]
    origin: str


@dataclass(frozen=True)
class Check:
    """One measure of the candidates as retrieved, in percent, beside the paper's."""

    measure: str
    over_found: float  # over the queries with results, as the paper averages
    over_all: float
    published: float | None

    @property
    def is_equal(self) -> bool:
        """Whether the paper prints the same number."""
        return self.published is not None and abs(self.over_found - self.published) < EQUAL


def _unwatched(documents: Iterable[Document]) -> Iterable[Document]:
    return documents


def read_material(
    benchmark: Benchmark, source: str, watch: Watch = _unwatched, *, run: str | None = None, colbert: str | None = None
) -> Material:
    """Queries, judgements, candidates and texts from a collection folder, a BEIR folder, a file FILE.json of a
    multi-hop set, 'ir_datasets[:ID]', or 'pyserini'.

    ``run`` is a file of candidates instead of the source's own; ``colbert`` a model that makes them for a multi-hop
    set.
    """
    if source.endswith(".json"):
        if benchmark.group != "multi-hop":
            raise InputError(
                f"{source}: JSON files are read for hotpotqa, 2wiki and musique; give a folder for {benchmark.name}"
            )
        from data_tools.multi_hop import read_multi_hop

        return read_multi_hop(benchmark, Path(source), run, colbert, watch)
    if colbert is not None:
        raise InputError("`colbert` makes candidates for HippoRAG's JSON files only; leave it out")
    if run is not None and not Path(source).is_dir():
        raise InputError(f"`run` goes with a folder or a JSON file, not with {source}")
    if source == "pyserini":
        return _from_pyserini(benchmark)
    package, colon, dataset_id = source.partition(":")
    if package == "ir_datasets" and (dataset_id or not colon):
        return _from_ir_datasets(benchmark, dataset_id or benchmark.ir_datasets, watch)
    folder = Path(source)
    beir = find_beir_files(folder)
    if beir is not None:
        queries, qrels = read_beir_queries(beir.queries), read_beir_qrels(beir.qrels)
        corpus_path, run_path = beir.corpus, None
    else:
        collection = Collection.open(folder)
        queries, qrels, corpus_path = collection.queries(), collection.qrels(), collection.corpus_path
        run_path = collection.run_path if _retriever_of(folder) == benchmark.retriever else None
    own = folder / f"run.{benchmark.retriever}.txt"
    run_path = Path(run) if run is not None else own if own.is_file() else run_path
    queries = _judged(queries, qrels, str(folder))
    if run_path is not None:
        candidates = {
            query_id: rows for query_id, rows in ranked_run(read_run(run_path)).items() if query_id in queries
        }
        if not candidates:
            raise InputError(
                f"{run_path}: no query of the run is judged; do the run and the judgements belong together?"
            )
        origin = run_path.name
    elif benchmark.retriever == "bm25":
        candidates = search_all(Bm25Index(watch(iterate_corpus(corpus_path))), queries, RETRIEVAL_DEPTH)
        origin = "bm25s over the whole corpus"
    else:
        raise InputError(
            f"{folder}: {own.name} is missing; {benchmark.title} needs candidates of {benchmark.retriever}"
        )
    documents = _texts(corpus_path, candidates)
    return Material(queries, qrels, candidates, documents, origin)


def _retriever_of(folder: Path) -> str:
    """Whose candidates a collection's run.bm25.txt holds: BM25's, unless 'benchmark prepare' put others there and
    said so.
    """
    path = folder / "benchmark.json"
    about = read_json(path) if path.is_file() else None
    return str(about.get("retriever", "bm25")) if isinstance(about, dict) else "bm25"


def _judged(queries: dict[str, str], qrels: Qrels, source: str) -> dict[str, str]:
    judged = {query_id: text for query_id, text in queries.items() if query_id in qrels}
    if not judged:
        raise InputError(f"{source}: no query is judged; do queries and judgements belong together?")
    return judged


def _from_ir_datasets(benchmark: Benchmark, dataset_id: str | None, watch: Watch) -> Material:
    from data_tools.sources.ir_datasets_source import (
        iterate_dataset,
        load_dataset,
        read_dataset_qrels,
        read_dataset_queries,
    )

    if dataset_id is None:
        raise InputError(f"{benchmark.name}: ir_datasets does not have it as the paper uses it; {benchmark.source}")
    if benchmark.retriever != "bm25":
        raise InputError(
            f"{benchmark.name}: needs candidates of {benchmark.retriever}, and ir_datasets has none; give a folder "
            "with `from`"
        )
    dataset = load_dataset(dataset_id)
    qrels = read_dataset_qrels(dataset, dataset_id)
    queries = _judged(read_dataset_queries(dataset, dataset_id), qrels, f"ir_datasets {dataset_id}")
    run = search_all(Bm25Index(watch(iterate_dataset(dataset, dataset_id))), queries, RETRIEVAL_DEPTH)
    wanted = {doc_id for ranked in run.values() for doc_id, _ in ranked}
    documents = {
        document.doc_id: document for document in iterate_dataset(dataset, dataset_id) if document.doc_id in wanted
    }
    return Material(queries, qrels, run, documents, f"bm25s over ir_datasets {dataset_id}")


def _from_pyserini(benchmark: Benchmark) -> Material:
    from data_tools.sources.pyserini_engine import load_qrels, load_topics, search_pyserini

    if benchmark.index is None or benchmark.topics is None or benchmark.qrels is None:
        raise InputError(f"{benchmark.name}: not in Pyserini; {benchmark.source}")
    qrels = load_qrels(benchmark.qrels)
    queries = _judged(load_topics(benchmark.topics), qrels, f"Pyserini's topics {benchmark.topics}")
    result = search_pyserini(benchmark.index, queries, RETRIEVAL_DEPTH)
    return Material(queries, qrels, result.run, result.documents, f"Pyserini, index {benchmark.index}")


def ranked_run(run: Run) -> dict[str, RankedList]:
    """The run in the order of its ranks, with scores that every tool orders the same way."""
    return {query_id: strictly_decreasing([(row.doc_id, row.score) for row in rows]) for query_id, rows in run.items()}


def _texts(corpus_path: Path, run: dict[str, RankedList]) -> dict[str, Document]:
    wanted = {doc_id for ranked in run.values() for doc_id, _ in ranked}
    documents = read_corpus(corpus_path, wanted)
    missing = sorted(wanted - documents.keys())
    if missing:
        raise InputError(
            f"{corpus_path}: {len(missing)} candidates have no text, the first is {missing[0]!r}; is it the run's "
            "corpus?"
        )
    return documents


def remove_query_documents(run: dict[str, RankedList]) -> tuple[dict[str, RankedList], int]:
    """The run without candidates whose id is the query's own (ArguAna), and how many there were."""
    kept = {query_id: [row for row in ranked if row[0] != query_id] for query_id, ranked in run.items()}
    return kept, sum(len(run[query_id]) - len(kept[query_id]) for query_id in run)


def check_first_stage(benchmark: Benchmark, material: Material) -> list[Check]:
    """Measure the candidates in the order retrieved and put the paper's number beside it."""
    run = {
        query_id: [Candidate(doc_id, rank, score) for rank, (doc_id, score) in enumerate(ranked, start=1)]
        for query_id, ranked in material.run.items()
    }
    qrels = {query_id: grades for query_id, grades in material.qrels.items() if query_id in material.queries}
    found = evaluate_run(run, qrels, benchmark.measures, missing="skip", by_rank=True).means()
    everything = evaluate_run(run, qrels, benchmark.measures, missing="zero", by_rank=True).means()
    published = benchmark.published_first_stage()
    return [Check(name, 100 * found[name], 100 * everything[name], published.get(name)) for name in benchmark.measures]


def write_benchmark(
    benchmark: Benchmark, material: Material, checks: list[Check], folder: Path, *, overwrite: bool = False
) -> dict[str, Any]:
    """Write the collection folder with its benchmark.json and return what that says."""
    lengths = [len(ranked) for ranked in material.run.values()]
    facts = {
        "name": benchmark.name,
        "title": benchmark.title,
        "retriever": benchmark.retriever,
        "candidates_from": material.origin,
        "depth": benchmark.depth,
        "measures": list(benchmark.measures),
        "queries": len(material.queries),
        "queries_of_the_paper": benchmark.num_queries,
        "queries_without_candidates": len(material.queries) - len(material.run),
        "shortest_list": min(lengths, default=0),
        "first_stage": {
            check.measure: {
                "over_queries_with_results": round(check.over_found, 4),
                "over_all_queries": round(check.over_all, 4),
                "published": check.published,
                "equals_published": check.is_equal,
            }
            for check in checks
        },
    }
    write_collection(
        folder,
        material.queries,
        material.documents,
        material.qrels,
        material.run,
        tag=benchmark.retriever,
        facts=facts,
        overwrite=overwrite,
    )
    return facts
