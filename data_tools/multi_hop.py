"""HotpotQA, 2WikiMultihopQA and MuSiQue out of HippoRAG's and ICR's JSON files: queries, judgements, candidates, texts.

Gold passages that no candidate list has stay in the judgements, or recall would be that of the retrieved ones alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data_tools.benchmarks import Benchmark
from data_tools.prepare_benchmark import RETRIEVAL_DEPTH, Material, Watch, ranked_run
from data_tools.retrieve import RankedList
from data_tools.sources.colbert_engine import COLBERT_V2, load_colbert, search_colbert
from data_tools.sources.paragraph_json import Question, corpus_beside, read_passages, read_questions, read_ranking
from headrank.errors import InputError
from headrank.formats import Document, Qrels, read_run


def read_multi_hop(benchmark: Benchmark, path: Path, run: str | None, colbert: str | None, watch: Watch) -> Material:
    """From ICR's file (it holds the candidates), or from HippoRAG's with the corpus beside it and a run, or ColBERT
    to make one.
    """
    questions = read_questions(path)
    queries = {question.query_id: question.text for question in questions}
    corpus_path = corpus_beside(path)
    if not corpus_path.is_file():
        return _from_lists(benchmark, path, questions, queries, run or colbert)
    documents = read_passages(corpus_path)
    qrels = _judge(path, corpus_path, questions, documents)
    candidates, origin = _candidates(benchmark, corpus_path, documents, queries, (run, colbert), watch)
    by_id = {document.doc_id: document for document in documents}
    wanted = dict.fromkeys(doc_id for ranked in candidates.values() for doc_id, _ in ranked)
    missing = [doc_id for doc_id in wanted if doc_id not in by_id]
    if missing:
        raise InputError(
            f"{corpus_path}: {len(missing)} candidates are not in it, the first is {missing[0]!r}; is it the run's "
            "corpus?"
        )
    return Material(queries, qrels, candidates, {doc_id: by_id[doc_id] for doc_id in wanted}, origin)


def _from_lists(
    benchmark: Benchmark, path: Path, questions: list[Question], queries: dict[str, str], other: str | None
) -> Material:
    """ICR's file: the paragraphs of a question are its candidates, best first."""
    if any(question.is_matched_by_title or question.num_gold is None for question in questions):
        raise InputError(
            f"{path}: questions without candidates, and no {corpus_beside(path).name} beside them; put HippoRAG's "
            "corpus there, or give "
            "ICR's file with the ColBERTv2 lists (its questions have 'num_gold_docs')"
        )
    if other is not None:
        raise InputError(f"{path}: holds candidates of its own; leave out `run` and `colbert`")
    documents: dict[tuple[str, str], Document] = {}
    qrels: Qrels = {}
    run: dict[str, RankedList] = {}
    for question in questions:
        listed: dict[str, int] = {}
        for paragraph in question.paragraphs:
            document = documents.setdefault(
                paragraph.key, Document(f"p{len(documents)}", paragraph.title, paragraph.text)
            )
            listed[document.doc_id] = max(listed.get(document.doc_id, 0), paragraph.grade or 0)
        found = [doc_id for doc_id, grade in listed.items() if grade]
        # as ICR counts them: no list of N can hold more than N
        missing = min(question.num_gold or 0, benchmark.depth) - len(found)
        if missing < 0:
            raise InputError(
                f"{path}: question {question.query_id}: {len(found)} supporting paragraphs, and num_gold_docs is "
                f"{question.num_gold}"
            )
        unretrieved = [f"unretrieved-{question.query_id}-{place}" for place in range(missing)]
        qrels[question.query_id] = dict.fromkeys([*found, *unretrieved], 1)
        run[question.query_id] = [(doc_id, float(len(listed) - place)) for place, doc_id in enumerate(listed)]
    by_id = {document.doc_id: document for document in documents.values()}
    return Material(
        queries,
        {query_id: grades for query_id, grades in qrels.items() if grades},
        run,
        by_id,
        f"the lists of {path.name}",
    )


def _judge(path: Path, corpus_path: Path, questions: list[Question], documents: Sequence[Document]) -> Qrels:
    """Gold passages by title and text, or by title where the file names titles; each must be in the corpus."""
    by_title: dict[str, str] = {}
    by_key: dict[tuple[str, str], str] = {}
    for document in documents:
        title = " ".join(document.title.split())
        by_title.setdefault(title, document.doc_id)
        by_key.setdefault((title, " ".join(document.text.split())), document.doc_id)
    qrels: Qrels = {}
    for question in questions:
        for paragraph in question.gold:
            doc_id = by_key.get(paragraph.key)
            if doc_id is None and question.is_matched_by_title:
                doc_id = by_title.get(paragraph.key[0])
            if doc_id is None:
                raise InputError(
                    f"{path}: question {question.query_id}: its supporting paragraph {paragraph.title!r} is not in "
                    f"{corpus_path.name}; do "
                    "they belong together?"
                )
            qrels.setdefault(question.query_id, {})[doc_id] = 1
    if not qrels:
        raise InputError(f"{path}: no question has a supporting paragraph")
    return qrels


def _candidates(
    benchmark: Benchmark,
    corpus_path: Path,
    documents: Sequence[Document],
    queries: dict[str, str],
    sources: tuple[str | None, str | None],
    watch: Watch,
) -> tuple[dict[str, RankedList], str]:
    run, colbert = sources
    if run is not None:
        path = Path(run)
        if "\t" in _first_line(path):  # ColBERT's own ranking file
            return read_ranking(path, len(queries)), path.name
        return {
            query_id: rows for query_id, rows in ranked_run(read_run(path)).items() if query_id in queries
        }, path.name
    if colbert is None:
        raise InputError(
            f"{corpus_path.with_name(corpus_path.name.replace('_corpus', ''))}: HippoRAG's file has no candidates; "
            "give a run of "
            f"{benchmark.retriever} with `run` (TREC, or ColBERT's ranking.tsv), or let {COLBERT_V2} make them with "
            "`colbert`"
        )
    blocks = search_colbert(load_colbert(colbert), list(watch(documents)), queries, RETRIEVAL_DEPTH)
    return blocks, f"{colbert}, exact MaxSim"


def _first_line(path: Path) -> str:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.readline()
