"""Token-level attention of one query: the paper's case-study table as one self-contained page, or as LaTeX.

headrank view --model M --heads heads.json --collection DIR --query QID --output view.html
headrank view ... --ranks ICR=icr/run.txt --ranks RankGPT=rankgpt/run.txt     more rank columns
headrank view --case-studies --model M --cells runs/.../cells --output DIR   the paper's fourteen, one file each
headrank view ... --query moved-most --ranks HeadRank=ours/run.txt            the query that run changed most
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headrank.commands import options
from headrank.errors import InputError
from headrank.files import require_writable
from headrank.formats import Collection, Qrels, Run, atomic_write, read_run

if TYPE_CHECKING:
    from headrank.method.prompt import PromptTemplate
    from headrank.reports.viewer.contents import View

_log = logging.getLogger(__name__)
MOVED_MOST = "moved-most"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank view`."""
    options.add_collection_arguments(parser)
    options.add_model_arguments(parser)
    options.add_prompt_arguments(parser)
    group = parser.add_argument_group("view")
    group.add_argument(
        "--heads",
        metavar="FILE",
        help="heads.json, 'all' for ICR, 'fast' or 'full' for the embedded model (default: its own)",
    )
    group.add_argument(
        "--query", metavar="QID", help=f"query id, or '{MOVED_MOST}': the one that the first --ranks run changed most"
    )
    group.add_argument(
        "--case-studies",
        action="store_true",
        help="instead: the paper's case studies, into a folder; their benchmarks are prepared",
    )
    group.add_argument(
        "--home", metavar="DIR", help="case studies: where prepared benchmarks lie (default as 'headrank benchmark')"
    )
    group.add_argument(
        "--cells", metavar="DIR", help="case studies: results of a study or matrix, for the ranks of ICR and RankGPT"
    )
    group.add_argument("--output", required=True, metavar="FILE", help="the page (or .tex file) to write")
    group.add_argument(
        "--depth", type=options.positive_int, default=40, metavar="N", help="candidates shown and ranked (default 40)"
    )
    group.add_argument(
        "--ranks",
        action="append",
        default=[],
        metavar="NAME=RUN",
        help="a run whose ranks get a column; may be repeated",
    )
    group.add_argument(
        "--first-stage", default="BM25", metavar="NAME", help="name of the collection's own run (default BM25)"
    )
    group.add_argument("--name", default="HeadRank", help="name of the shaded ranking (default HeadRank)")
    group.add_argument("--no-calibration", action="store_true", help="shade by raw attention mass")
    group.add_argument(
        "--format", choices=["html", "latex"], default=None, help="default: latex for a .tex file, else html"
    )
    group.add_argument(
        "--top", type=options.positive_int, default=5, metavar="N", help="latex: passages in the table (default 5)"
    )
    group.add_argument(
        "--words", type=options.positive_int, default=60, metavar="N", help="latex: words of each passage (default 60)"
    )


def run(args: argparse.Namespace) -> int:
    """Score one query in detail and write the page."""
    if args.case_studies:
        if args.query is not None or args.collection is not None:
            raise InputError(
                "--case-studies brings its own queries and collections; leave out --query and --collection"
            )
        from headrank.commands import case_studies

        args.case_studies = False
        return case_studies.run(args, run)
    if args.query is None:
        raise InputError("give --query QID, or --case-studies")
    collection = options.open_collection(args)
    require_writable(args.output, reads=[*collection.paths, *(entry.partition("=")[2] for entry in args.ranks)])
    candidates, others = collection.run(), _other_runs(args.ranks)
    qrels = collection.qrels() if collection.qrels_path is not None else None
    query_id = choose_query(candidates, others, qrels) if args.query == MOVED_MOST else args.query
    view = _view(args, collection, query_id, candidates, others, qrels)
    kind = args.format or ("latex" if args.output.endswith(".tex") else "html")
    if kind == "latex":
        from headrank.reports.viewer.latex import to_latex

        text = to_latex(view, top=args.top, max_words=args.words)
    else:
        from headrank.reports.viewer.page import to_html

        text = to_html(view)
    with atomic_write(args.output) as stream:
        stream.write(text)
    print(args.output)
    return 0


def _other_runs(given: list[str]) -> dict[str, Run]:
    runs = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name:
            raise InputError(f"--ranks {text!r}: write NAME=RUN, for example ICR=icr/run.txt")
        file = Path(path) / "run.txt" if Path(path).is_dir() else Path(path)
        runs[name] = read_run(file)
    return runs


def choose_query(first_stage: Run, others: Mapping[str, Run], qrels: Qrels | None) -> str:
    """The query whose nDCG@10 the first of ``others`` changed most against the first stage; needs judgements."""
    from headrank.evaluation.measures import evaluate_run

    if not others or qrels is None:
        raise InputError(f"--query {MOVED_MOST} needs --ranks NAME=RUN to compare with the first stage, and judgements")
    name, changed = next(iter(others.items()))
    shared = {query_id for query_id in changed if query_id in first_stage and query_id in qrels}
    if not shared:
        raise InputError(f"--query {MOVED_MOST}: run {name!r} has no judged query in common with the first stage")
    before, after = (
        evaluate_run(run, qrels, ["nDCG@10"], query_ids=shared).values["nDCG@10"] for run in (first_stage, changed)
    )
    # ties go to the query that gained, then to the first id: the same query every time
    query_id = min(shared, key=lambda each: (-abs(after[each] - before[each]), before[each] - after[each], each))
    _log.info("query %s: nDCG@10 %.4f before, %.4f after", query_id, before[query_id], after[query_id])
    return query_id


def _view(
    args: argparse.Namespace,
    collection: Collection,
    query_id: str,
    candidates: Run,
    others: Mapping[str, Run],
    qrels: Qrels | None,
) -> View:
    """Load what the query needs, run the model once, and put the view together."""
    from headrank.reports.viewer.contents import build_view
    from headrank.reranking.reranker import HeadRankReranker

    queries = collection.queries()
    if query_id not in queries:
        raise InputError(
            f"--query {query_id!r} is not in {collection.queries_path}; its first query is {next(iter(queries))!r}"
        )
    if not candidates.get(query_id):
        raise InputError(f"{collection.run_path}: query {query_id!r} has no candidates")
    rows = candidates[query_id][: args.depth]
    corpus = collection.documents({row.doc_id for row in rows})
    documents = [corpus[row.doc_id] for row in rows]
    reranker = HeadRankReranker.from_pretrained(
        args.model,
        args.heads,
        device=args.device,
        dtype=args.dtype,
        prompt=_prompt(args),
        calibrate=not args.no_calibration,
    )
    scores = reranker.explain(
        queries[query_id], [{"title": document.title, "text": document.text} for document in documents]
    )
    ranks = {args.first_stage: {row.doc_id: row.rank for row in rows}}
    ranks |= {
        name: {row.doc_id: row.rank for row in run.get(query_id, [])}
        for name, run in others.items()
        if name != args.name
    }
    return build_view(
        scores,
        documents,
        query_id=query_id,
        query=queries[query_id],
        model=Path(reranker.reader.name).name,
        method=args.name,
        ranks=ranks,
        grades=qrels.get(query_id) if qrels is not None else None,
        title_lengths=[len(" ".join(document.title.split())) for document in documents],
        note="The passages were shortened to fit the model's context." if scores.is_shortened else "",
    )


def _prompt(args: argparse.Namespace) -> PromptTemplate | None:
    """The heads' own prompt with the given switches changed; None when nothing was changed."""
    if not options.prompt_changes(args):
        return None
    from headrank.reranking.reranker import choose_heads
    from headrank.reranking.shipped_readouts import model_to_read

    return options.prompt_from(args, choose_heads(model_to_read(args.model, args.heads), args.heads).prompt)
