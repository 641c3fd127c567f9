"""The methods of `headrank select-heads`: their flags, and a policy from the flags that were given."""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrank.commands import options
from headrank.formats import Collection, iterate_corpus
from headrank.reranking.model_sources import resolve_model

if TYPE_CHECKING:
    from headrank.selection.niah import NiahSelection
    from headrank.selection.selection import HeadPolicy, SelectionContext

_log = logging.getLogger(__name__)
CONTRASTS = ("adjacent", "lower", "irrelevant")  # those of headrank.selection, which would load torch
HAYSTACK_WORDS = (300,)
MAX_PASSAGES = 500  # of a corpus, as hay for NIAH
MIDDLE_GRADE = 2  # what TREC DL calls relevant; collections whose grades stop at 1 have gold from 1


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Flags of single methods; a method that does not know a flag ignores it."""
    group.add_argument(
        "--temperature", type=float, metavar="TAU", help="entropy, core: temperature of the contrast (default 0.001)"
    )
    group.add_argument(
        "--entropy-weight", type=float, metavar="LAMBDA", help="entropy: weight of the entropy gate (default 0.1)"
    )
    group.add_argument(
        "--contrast",
        choices=CONTRASTS,
        default="adjacent",
        help="entropy, core: a document is compared with those of the next lower grade (default, as the paper's "
        "pairs), of all lower "
        "grades (the ablation without ALPS), or a relevant one (see --gold-grade) with those of grade 0 (CoRe's)",
    )
    group.add_argument(
        "--per-query",
        action="store_true",
        help="average over the documents of each query first, so that a query with many relevant ones counts once",
    )
    group.add_argument(
        "--calibrated",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="masses minus those of the content-free query, or raw ones",
    )
    group.add_argument(
        "--gold-grade",
        type=options.positive_int,
        metavar="G",
        help="qr, and --contrast irrelevant: grade from which a document is relevant (default 2, or 1 where no "
        "grade is higher)",
    )
    group.add_argument(
        "--needles", type=options.positive_int, default=20, metavar="N", help="niah: questions asked (default 20)"
    )
    group.add_argument(
        "--haystack-words",
        type=options.positive_int,
        nargs="+",
        default=list(HAYSTACK_WORDS),
        metavar="N",
        help="niah: words of a haystack (default 300); several lengths share the needles. The original goes up to "
        "50,000 tokens",
    )


def policy(method: str, args: argparse.Namespace, contexts: Sequence[SelectionContext]) -> HeadPolicy:
    """The policy with the switches that were given; what was not given keeps the method's own default."""
    from headrank.selection.core import CoreSelection
    from headrank.selection.qr import QRNdcgSelection, QRSelection
    from headrank.selection.selection import Contrast, EntropySelection

    highest = max((grade or 0 for context in contexts for grade in context.grades), default=0)
    gold_grade = args.gold_grade or min(MIDDLE_GRADE, max(highest, 1))
    given: dict[str, Any] = {
        "temperature": args.temperature,
        "entropy_weight": args.entropy_weight,
        "is_calibrated": args.calibrated,
    }
    given |= {
        "gold_grade": gold_grade,
        "per_query": args.per_query,
        "contrast": Contrast(args.contrast, gold_grade, args.per_query),
    }
    known = {
        "entropy": (EntropySelection, {"temperature", "entropy_weight", "is_calibrated", "contrast"}),
        "core": (CoreSelection, {"temperature", "is_calibrated", "contrast"}),
        "qr": (QRSelection, {"gold_grade", "is_calibrated", "per_query"}),
        "qr-ndcg": (QRNdcgSelection, {"is_calibrated"}),
    }
    kind, names = known[method]
    return kind(**{name: value for name, value in given.items() if name in names and value is not None})


def ask_needles(
    args: argparse.Namespace, collections: Sequence[Collection]
) -> tuple[NiahSelection, tuple[int, int], dict[str, Any]]:
    """NIAH: needles in the collections' passages where there are any, else in generated text; with the model's shape
    and the facts.
    """
    from headrank.selection.needles import make_needles
    from headrank.selection.niah import NiahSelection

    passages = [text for collection in collections for text in _passages(collection)]
    needles = make_needles(args.needles, haystack_words=args.haystack_words, seed=args.seed, passages=passages)
    selection = NiahSelection.load(resolve_model(args.model), device=args.device, dtype=args.dtype)
    for needle in options.progress(needles, total=len(needles), description="needles", unit="needle"):
        selection.ask(needle)
    config = selection.generator.model.config.get_text_config(decoder=True)
    _log.info("niah: %d of %d needle questions were answered", selection.scores.count, selection.asked)
    source = {
        "haystack": "collection" if passages else "generated",
        "haystack_words": args.haystack_words,
        "seed": args.seed,
    }
    return selection, (int(config.num_hidden_layers), int(config.num_attention_heads)), source


def _passages(collection: Collection) -> list[str]:
    """Texts of the corpus's first documents: hay."""
    return [document.text for document in itertools.islice(iterate_corpus(collection.corpus_path), MAX_PASSAGES)]
