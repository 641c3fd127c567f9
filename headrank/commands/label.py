"""Label a collection's candidates with a teacher: a TREC run with its raw scores, and RUN.json, which says how it was
made.

The teacher is a sentence-transformers CrossEncoder (folder or hub name), an ONNX folder, a Cohere-compatible endpoint
(URL), or another HeadRank model. A stopped or killed run goes on where it stopped. 'headrank pairs --labels RUN' makes
training lists of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_tools.teachers.teacher import KINDS, TeacherSpec, kind_of, open_teacher
from headrank.commands import options
from headrank.errors import InputError
from headrank.files import read_lines, require_writable
from headrank.formats import read_query_ids

KEY_VARIABLE = "HEADRANK_API_KEY"
DEFAULT_RANKS = "1-20"
_RANKS = re.compile(r"[0-9]{1,6}(-[0-9]{1,6})?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank label`."""
    options.add_collection_arguments(parser)
    group = parser.add_argument_group("teacher")
    group.add_argument("--teacher", metavar="T", required=True, help="a folder, a hub name, a URL, or 'embedded'")
    group.add_argument(
        "--teacher-kind",
        choices=("auto", *KINDS),
        default="auto",
        help="default: what the name and the folder's files say",
    )
    group.add_argument(
        "--max-tokens",
        type=options.positive_int,
        default=320,
        metavar="N",
        help="of query and passage together (default 320)",
    )
    group.add_argument(
        "--max-words", type=options.positive_int, metavar="N", help="words kept of each passage (default: all)"
    )
    group.add_argument(
        "--batch-size",
        type=options.positive_int,
        metavar="B",
        help="passages per forward (default 16; 1 for an ONNX folder on a CPU)",
    )
    group.add_argument(
        "--device", help="cpu, cuda, cuda:1 (default: cuda where there is one); onnxruntime chooses for itself"
    )
    group.add_argument("--heads", metavar="FILE", help="of a HeadRank teacher (default: its headrank.json)")
    group.add_argument("--api-model", metavar="NAME", help="which model of the endpoint")
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"a file whose first line is the endpoint's key (default: {KEY_VARIABLE})",
    )
    labels = parser.add_argument_group("labels")
    labels.add_argument(
        "--output", metavar="RUN", required=True, help="TREC run to write, such as labels/web.minilm.trec"
    )
    labels.add_argument(
        "--ranks",
        type=_ranks,
        default=_ranks(DEFAULT_RANKS),
        metavar="R,R-R,...",
        help=f"the retriever's ranks that are labelled (default {DEFAULT_RANKS}); 1-10,12,15,18,22,29,37 covers 40 "
        "with 16",
    )
    labels.add_argument("--only", metavar="FILE", help="label only the query ids in this file")
    labels.add_argument(
        "--seed", type=options.seed, default=0, metavar="N", help="of the order in which queries are taken (default 0)"
    )
    labels.add_argument(
        "--max-minutes",
        type=float,
        metavar="M",
        help="stop after M minutes and write what is there; run again to go on",
    )
    labels.add_argument("--tag", help="run tag (default: the teacher's name)")
    labels.add_argument("--restart", action="store_true", help="forget what is there and label all again")


def _ranks(text: str) -> tuple[int, ...]:
    """argparse type: ranks from 1 and ranges of them, ascending and each once."""
    found: list[int] = []
    for part in text.split(","):
        if not _RANKS.fullmatch(part):
            raise argparse.ArgumentTypeError(f"{part[:40]!r} is not a rank or a range of ranks such as 1-20")
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    if not found or found[0] < 1 or found != sorted(set(found)):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: ranks begin at 1 and ascend")
    return tuple(found)


def run(args: argparse.Namespace) -> int:
    """Label and say what was done."""
    from data_tools.labels.labelling import LabelSettings, label_collection

    collection = options.open_collection(args)
    output = Path(args.output)
    require_writable(output, reads=[*collection.paths, args.only])
    spec = _spec(args)
    if args.max_minutes is not None and not args.max_minutes > 0:
        raise InputError(f"--max-minutes {args.max_minutes:g} must be above 0")
    started = time.monotonic()
    only = frozenset(read_query_ids(args.only)) if args.only else None
    with contextlib.closing(_Bar()) as bar:
        counts = label_collection(
            collection,
            lambda: open_teacher(spec),
            output,
            LabelSettings(args.ranks, only, args.seed),
            tag=args.tag or _tag_of(spec),
            restart=args.restart,
            deadline=None if args.max_minutes is None else started + 60 * args.max_minutes,
            command=["headrank", "label", *sys.argv[2:]] if sys.argv[1:2] == ["label"] else [],
            watch=bar.watch,
        )
    state = "complete" if counts.is_complete else "not complete; run it again to go on"
    print(
        f"{output}: {counts.before + counts.now:,} of {counts.total:,} queries labelled ({counts.now:,} now), "
        f"{counts.passages:,} passages; {state}"
    )
    return 0


def _spec(args: argparse.Namespace) -> TeacherSpec:
    spec = TeacherSpec(
        name=args.teacher,
        kind=args.teacher_kind,
        max_tokens=args.max_tokens,
        batch_size=args.batch_size,
        max_words=args.max_words,
        device=args.device,
        api_model=args.api_model,
        api_key=_key(args.api_key_file),
        heads=args.heads,
    )
    if kind_of(spec) != "endpoint" and (args.api_model or args.api_key_file):
        raise InputError(f"--api-model and --api-key-file are for an endpoint, but --teacher {args.teacher} is no URL")
    return spec


def _key(path: str | None) -> str | None:
    """The endpoint's key, from a file or the environment: on the command line every user of the machine could read
    it.
    """
    if path is None:
        return os.environ.get(KEY_VARIABLE) or None
    first = next(read_lines(path), None)
    if first is None:
        raise InputError(f"{path}: no key; its first line should be the endpoint's key")
    return first[1].strip()


def _tag_of(spec: TeacherSpec) -> str:
    """The teacher's name as one word, which a TREC run needs."""
    name = spec.api_model or spec.name.rstrip("/").rpartition("/")[2]
    return re.sub(r"\s+", "-", name) or "teacher"


class _Bar:
    """Rate and remaining time on stderr, counting what was done before.

    It appears with the first labels, so that no error follows an empty bar on its line.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._done = self._total = 0
        self._started = 0.0

    def watch(self, done: int, total: int) -> Callable[[int], object]:
        """Begin; the function that comes back is told of every few more queries."""
        self._done, self._total = done, total
        self._started = time.monotonic()
        return self._update

    def _update(self, more: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(
                total=self._total, initial=self._done, desc="label", unit="query", dynamic_ncols=True, mininterval=0.5
            )
            self._bar.start_t -= time.monotonic() - self._started  # the first labels count in the rate
        self._bar.update(more)

    def close(self) -> None:
        """End the line."""
        if self._bar is not None:
            self._bar.close()
