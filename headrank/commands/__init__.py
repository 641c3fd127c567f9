"""The `headrank` command: one verb a file, each imported only when it is asked for, so that --help never loads
torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType

from headrank import __version__
from headrank.errors import InputError, OneLineParser
from headrank.files import DISK_ERRORS
from headrank.log_level import log_level

# verb -> (module in this package, one line for --help), in the order of the pipeline
VERBS: dict[str, tuple[str, str]] = {
    "retrieve": ("retrieve", "first-stage candidates: BM25 over a corpus, as a TREC run"),
    "import-lists": (
        "import_lists",
        "public training sets (RLHN, BGE, Tevatron, MS MARCO triples) -> a collection with labels",
    ),
    "label": ("label", "a teacher's scores of the candidates, as a TREC run: labels without judgements"),
    "pairs": ("pairs", "ALPS: preference pairs of adjacent grades from a collection"),
    "select-heads": ("select_heads", "score every attention head and keep the best K"),
    "import-hf": ("import_hf", "Hugging Face model -> Megatron checkpoint"),
    "export-hf": ("export_hf", "Megatron checkpoint -> Hugging Face model with its heads and a model card"),
    "push": ("push", "an exported model to the Hugging Face hub, with measures in its model card"),
    "index": ("index", "keys of a corpus computed once and kept: a passage store for late heads"),
    "rerank": ("rerank", "rerank the candidates of a collection, TREC run in, TREC run out"),
    "fit-relevance": ("fit_relevance", "scores -> chances of being relevant, fitted on judged lists"),
    "serve": ("serve", "rerank over HTTP for clients of Cohere, Jina, vLLM and text-embeddings-inference"),
    "fuse": ("fuse", "a reranked run and its first stage together, by a weighted sum of standardised scores"),
    "evaluate": ("evaluate", "measures, confidence intervals and paired tests for runs"),
    "benchmark": ("benchmark", "the paper's benchmarks: list, prepare, run a matrix of models and methods"),
    "experiment": ("experiment", "a study from its file: run its phases, resume, show what is done"),
    "report": ("report", "tables, figures and one page from a directory of results"),
    "view": ("view", "token-level attention of one query as a self-contained page"),
    "doctor": (
        "doctor",
        "what is installed and used, whether model, heads and store fit, and a remedy for each problem",
    ),
    "plan": ("plan", "rehearse a training job without its hardware: memory, FLOPs, traffic, time"),
}


# package -> the extra that installs it
EXTRAS = {
    "megatron": "train",
    "psutil": "train",
    "tensorboard": "train",
    "pyserini": "lucene",
    "transformer_engine": "gpu",
    "sentence_transformers": "teacher",
    "onnxruntime": "teacher",
    "fastapi": "serve",
    "uvicorn": "serve",
    "ray": "ray",
    "pyarrow": "ray",
}


def build_parser() -> argparse.ArgumentParser:
    """The top-level parser; verbs parse their own arguments."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {summary}" for verb, (_, summary) in VERBS.items())
    parser = OneLineParser(
        prog="headrank",
        description="Rerank passages from the attention of a few preference-trained heads, without decoding.",
        epilog=f"verbs:\n{verbs}\n\n'headrank VERB --help' explains a verb. Training is 'torchrun "
        "pretrain_headrank.py --help'.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headrank {__version__}")
    parser.add_argument("verb", metavar="VERB", choices=list(VERBS), help="what to do, see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the verb's own arguments")
    return parser


def _module_of(verb: str) -> ModuleType:
    return importlib.import_module(f"headrank.commands.{VERBS[verb][0]}")


def build_verb_parser(verb: str) -> OneLineParser:
    """The parser of one verb."""
    module = _module_of(verb)
    parser = OneLineParser(
        prog=f"headrank {verb}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    return parser


@contextlib.contextmanager
def _cleaning_up_when_terminated() -> Iterator[None]:
    """SIGTERM (timeout, a batch system) unwinds as an interrupt does, so that temporary files go; exit code 143."""

    def unwind(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if is_ours:
        signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; a user's error is one line on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        build_parser().print_help()
        return 0
    chosen = build_parser().parse_args(arguments[:1])
    try:
        logging.basicConfig(level=log_level(), format="%(message)s", stream=sys.stderr)
        logging.getLogger("megatron").setLevel("WARNING")
        module = _module_of(chosen.verb)
        with _cleaning_up_when_terminated():
            args = build_verb_parser(chosen.verb).parse_args(arguments[1:])
            if getattr(args, "cpu_threads", None):
                from headrank.placement import use_threads

                use_threads(args.cpu_threads)
            return int(module.run(args) or 0)
    except InputError as error:
        print(f"headrank {chosen.verb}: {build_verb_parser(chosen.verb).in_flags(str(error))}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(str(error.name).partition(".")[0])
        if extra is None:
            raise
        print(
            f"headrank {chosen.verb}: needs the package {error.name!r}; run pip install 'headrank[{extra}]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print(f"headrank {chosen.verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is None and error.errno not in DISK_ERRORS:
            raise
        logging.getLogger(__name__).debug("", exc_info=True)  # HEADRANK_LOG=DEBUG shows where
        advice = "make room and run it again" if error.errno in DISK_ERRORS else "check the path and its permissions"
        print(f"headrank {chosen.verb}: {error.filename or 'a file'}: {error.strerror}; {advice}", file=sys.stderr)
        return 2
