"""First-stage candidates: BM25 over a corpus, as a TREC run.

The embedded engine bm25s (Lucene's BM25, k1 0.9, b 0.4, English stems and stop words) needs a corpus file and nothing
else. The engine pyserini needs Java and takes --index: a local Lucene index or the name of a prebuilt one; --topics
and --collection-output then make a whole collection (queries, texts, judgements, run) out of Pyserini's own names.

  headrank retrieve --collection DIR --output run.bm25.txt
  headrank retrieve --engine pyserini --index msmarco-v2-passage --topics dl21 --qrels-name dl21-passage \\
      --collection-output dl21
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from headrank.commands.options import positive_int, progress
from headrank.errors import InputError
from headrank.files import plain_or_gzipped, require_writable
from headrank.formats import Collection, iterate_corpus, read_queries, write_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's flags."""
    parser.add_argument("--collection", metavar="DIR", help="a folder with queries.tsv and corpus.jsonl[.gz]")
    parser.add_argument("--queries", metavar="FILE", help="queries (id, tab, text) instead of the collection's")
    parser.add_argument("--corpus", metavar="FILE", help="corpus.jsonl or .jsonl.gz instead of the collection's")
    parser.add_argument("--output", metavar="FILE", help="the TREC run to write")
    parser.add_argument(
        "--engine",
        choices=["bm25s", "pyserini"],
        default="bm25s",
        help="bm25s (default) or pyserini (requires Java 21)",
    )
    parser.add_argument(
        "--top-k", type=positive_int, default=100, metavar="N", help="candidates per query (default 100)"
    )
    parser.add_argument("--k1", type=float, default=0.9, help="BM25's k1 (default 0.9)")
    parser.add_argument("--b", type=float, default=0.4, help="BM25's b (default 0.4)")
    parser.add_argument("--tag", default="bm25", help="the run's name, its last column (default bm25)")
    group = parser.add_argument_group("pyserini")
    group.add_argument("--index", metavar="I", help="a Lucene index folder or the name of a prebuilt index")
    group.add_argument("--topics", metavar="NAME", help="queries by Pyserini's name instead of a file")
    group.add_argument(
        "--qrels-name",
        metavar="NAME",
        help="judgements by Pyserini's name, for --collection-output; only judged queries are kept",
    )
    group.add_argument(
        "--collection-output",
        metavar="DIR",
        help="write a whole collection: queries, texts of the candidates, judgements, run",
    )
    group.add_argument(
        "--threads",
        type=positive_int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="search threads (default: all cores)",
    )


def run(args: argparse.Namespace) -> int:
    """Search and write."""
    if args.output is None and args.collection_output is None:
        raise InputError("give --output FILE for the run")
    if len(args.tag.split()) != 1:
        raise InputError(f"--tag {args.tag!r} must be one word: it is a column of the run")
    return _pyserini(args) if args.engine == "pyserini" else _bm25s(args)


def _bm25s(args: argparse.Namespace) -> int:
    from data_tools.retrieve import Bm25Index

    for flag in ("index", "topics", "qrels_name", "collection_output"):
        if getattr(args, flag) is not None:
            raise InputError(f"--{flag.replace('_', '-')} goes with --engine pyserini")
    collection = Collection.open(args.collection, queries=args.queries, corpus=args.corpus)
    queries = collection.queries()
    require_writable(args.output, reads=[collection.queries_path, collection.corpus_path])
    documents = progress(iterate_corpus(collection.corpus_path), description="indexing", unit="document")
    index = Bm25Index(documents, args.k1, args.b)
    found = {
        query_id: index.search(text, args.top_k)
        for query_id, text in progress(queries.items(), total=len(queries), description="searching")
    }
    run = {query_id: ranked for query_id, ranked in found.items() if ranked}
    if not run:
        raise InputError(f"{collection.queries_path}: no query shares a word with the corpus; do they belong together?")
    write_run(args.output, run, args.tag)
    _report(args.output, run, len(queries), f"{len(index):,} documents")
    return 0


def _pyserini(args: argparse.Namespace) -> int:
    from data_tools.collection_files import require_free, write_collection
    from data_tools.sources.pyserini_engine import load_qrels, load_topics, search_pyserini

    if args.index is None:
        raise InputError("--engine pyserini needs --index: a Lucene index folder or the name of a prebuilt index")
    if args.collection_output is not None and args.qrels_name is None:
        raise InputError("--collection-output needs --qrels-name, Pyserini's name of the judgements")
    if args.output is not None:
        require_writable(args.output)
    if args.collection_output is not None:
        require_free(Path(args.collection_output))
    queries = load_topics(args.topics) if args.topics else read_queries(_queries_path(args))
    qrels = load_qrels(args.qrels_name) if args.qrels_name else None
    if qrels is not None:
        queries = {query_id: text for query_id, text in queries.items() if query_id in qrels}
    result = search_pyserini(
        args.index,
        queries,
        args.top_k,
        k1=args.k1,
        b=args.b,
        threads=args.threads,
        with_text=args.collection_output is not None,
    )
    if args.output is not None:
        write_run(args.output, result.run, args.tag)
        _report(args.output, result.run, len(queries), args.index)
    if args.collection_output is not None:
        write_collection(Path(args.collection_output), queries, result.documents, qrels or {}, result.run, tag=args.tag)
        _report(args.collection_output, result.run, len(queries), args.index)
    return 0


def _queries_path(args: argparse.Namespace) -> Path:
    if args.queries is not None:
        return Path(args.queries)
    if args.collection is not None:
        return plain_or_gzipped(args.collection, "queries.tsv")
    raise InputError("give --topics NAME, --queries FILE or --collection DIR")


def _report(output: str, run: dict, num_queries: int, source: str) -> None:
    empty = num_queries - len(run)
    note = f"; {empty} queries found nothing" if empty else ""
    print(
        f"{output}: {len(run)} of {num_queries} queries over {source}, {sum(map(len, run.values())):,} "
        f"candidates{note}",
        file=sys.stderr,
    )
