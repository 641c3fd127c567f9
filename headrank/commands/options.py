"""Flags that several verbs share, so that they are spelled and explained the same everywhere."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, TypeVar

from headrank.errors import InputError
from headrank.formats import Collection
from headrank.method.prompt import LAYOUTS, ORDERS, QUERY_ROWS, PromptTemplate
from headrank.method.published_prompts import PUBLISHED_PROMPTS, published_prompt

Item = TypeVar("Item")
_PROMPT_SWITCHES = (
    "query_rows",
    "order",
    "max_words",
    "document_layout",
    "instruction",
    "document_label",
    "label_in_span",
)

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")


def add_collection_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """--collection DIR, or the single files."""
    group = parser.add_argument_group("collection")
    group.add_argument(
        "--collection",
        metavar="DIR",
        required=False,
        help="a folder with queries.tsv, corpus.jsonl[.gz], qrels.txt, run.bm25.txt",
    )
    group.add_argument("--queries", metavar="FILE", help="queries (id, tab, text) instead of the collection's")
    group.add_argument("--corpus", metavar="FILE", help="corpus.jsonl or .jsonl.gz instead of the collection's")
    group.add_argument("--qrels", metavar="FILE", help="TREC judgements instead of the collection's")
    group.add_argument("--run", metavar="FILE", help="TREC run of candidates instead of the collection's run.bm25.txt")
    parser.set_defaults(_collection_required=required)


def open_collection(args: argparse.Namespace) -> Collection:
    """The collection that the flags name."""
    return Collection.open(args.collection, queries=args.queries, corpus=args.corpus, qrels=args.qrels, run=args.run)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """--model, --device, --dtype, --threads."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="M", default="embedded", help="'embedded' (default), a Hugging Face directory or hub name"
    )
    group.add_argument("--device", default=None, help="cpu, cuda, cuda:1, mps (default: cuda where there is one)")
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="auto: the fastest here; int8: integer weights (CPU only). Default: auto for late heads, else float32 "
        "on CPU, bfloat16 on GPU",
    )
    add_threads_argument(group)


def add_threads_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """--threads; ``headrank.commands.main`` sets them before the verb runs."""
    parser.add_argument(
        "--threads",
        dest="cpu_threads",
        type=positive_int,
        metavar="N",
        help="of a CPU (default: OMP_NUM_THREADS, else the cores this process may use)",
    )


def add_prompt_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Switches of the prompt; what is not given keeps the value of heads.json or the default."""
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "--query-rows",
        choices=QUERY_ROWS,
        help="rows of I_q: the query's own tokens, these and the chat suffix, instruction through suffix (ICR's), "
        "instruction through "
        "query, or the same and the next token (CoRe's)",
    )
    group.add_argument(
        "--order", choices=ORDERS, help="document order in the prompt: retriever (best first) or reversed (best last)"
    )
    group.add_argument(
        "--document-layout",
        choices=LAYOUTS,
        help="sequential: each document reads those before it (default); parallel: each reads the opening and "
        "itself, so that scores do "
        "not depend on candidate order; "
        "late: a score depends on the query and one passage alone (heads with a log-mass readout)",
    )
    group.add_argument("--max-words", type=int, metavar="N", help="words kept of each document (default 300)")
    add_published_prompt_arguments(group)
    return group


def add_published_prompt_arguments(group: argparse._ArgumentGroup) -> None:
    """--prompt, --instruction and what else published prompts differ in."""
    group.add_argument(
        "--prompt",
        choices=list(PUBLISHED_PROMPTS),
        help="the prompt of a published method, as its own code has it; the other switches change it further",
    )
    group.add_argument(
        "--instruction",
        type=escaped,
        metavar="TEXT",
        help=r"the late instruction, everything between documents and query; \n is a new line",
    )
    group.add_argument(
        "--document-label", metavar="TEXT", help='what stands before a document, {} is its number (default "[{}] ")'
    )
    group.add_argument(
        "--label-in-span",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="count the attention to the label as the document's, as ICR does",
    )


def add_store_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """--store, --store-add."""
    parser.add_argument(
        "--store", metavar="DIR", help="late heads: passages that 'headrank index' put there are read, not computed"
    )
    parser.add_argument(
        "--store-add", action="store_true", help="add the passages that the store lacks and that had to be computed"
    )
    parser.add_argument(
        "--key-cache-mb",
        type=int,
        metavar="MB",
        help="late heads: memory for keys of passages that had to be computed (default 512; 0: none)",
    )


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    """--ray, --ray-workers."""
    group = parser.add_argument_group("beyond one machine")
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        nargs="?",
        const="",
        help="on a Ray cluster, a process for each GPU or core; without an address that of RAY_ADDRESS, or one of "
        "this machine's cores",
    )
    group.add_argument(
        "--ray-workers",
        type=positive_int,
        metavar="N",
        help="processes on the cluster (default: its GPUs, or its cores)",
    )


def check_ray_arguments(args: argparse.Namespace) -> None:
    """--ray-workers alone has no meaning, nor has --ray under torchrun."""
    if args.ray is None and args.ray_workers is not None:
        raise InputError("--ray-workers counts processes of a Ray cluster; give --ray with it")
    if args.ray is not None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise InputError("--ray starts the processes itself; run it without torchrun")


def prompt_of(source: str) -> PromptTemplate:
    """The prompt of --prompt-of: that of a heads.json, or of the heads of an exported model."""
    from headrank.method.heads import HeadSet
    from headrank.reranking.reranker import choose_heads

    if not Path(source).is_dir():
        return HeadSet.load(source).prompt
    if not (Path(source) / "headrank.json").is_file():
        raise InputError(
            f"--prompt-of {source}: no headrank.json there; give a heads.json or a model of 'headrank export-hf'"
        )
    return choose_heads(source, None).prompt


def prompt_from(args: argparse.Namespace, base: PromptTemplate | None = None) -> PromptTemplate:
    """The template with the given switches changed."""
    return dataclasses.replace(base or PromptTemplate(), **prompt_changes(args))


def prompt_changes(args: argparse.Namespace) -> dict[str, Any]:
    """The switches of the prompt that were given, on top of --prompt's."""
    published = published_prompt(args.prompt) if getattr(args, "prompt", None) is not None else {}
    return published | {name: getattr(args, name) for name in _PROMPT_SWITCHES if getattr(args, name, None) is not None}


def escaped(text: str) -> str:
    """argparse type: text in which \\n is a new line."""
    return text.replace("\\n", "\n")


def positive_int(text: str) -> int:
    """argparse type: an integer of at least one."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def seed(text: str) -> int:
    """argparse type: a seed, an integer of at least zero."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at least 0")
    return int(text)


def progress(
    items: Iterable[Item], *, total: int | None = None, description: str = "", unit: str = "it"
) -> Generator[Item, None, None]:
    """A progress bar on stderr with rate and remaining time, from the first item on: no error message is glued to an
    empty bar.
    """
    from tqdm import tqdm

    yield from tqdm(items, total=total, desc=description, unit=unit, dynamic_ncols=True, mininterval=0.5)
