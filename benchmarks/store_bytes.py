"""NDCG@10 against bytes per token of a passage store: `python -m benchmarks.store_bytes --store DIR --collection DIR
--labels RUN ...`.

The store holds every (layer, key-value group) pair down to some layer in bf16 or fp32, without pooling, and all
candidates: `headrank index --store DIR --pairs all --dtype bf16 ...`. For each number of pairs a readout is fitted by
cross-validation over queries on the keys as they are; the same weights then score the held-out queries from keys in
int8, and from keys of 2 or 4 neighbouring tokens pooled to one. So every point is what a smaller store would give with
that readout, on queries that the readout has not seen.

Prints a table, writes the points as JSON and the figure as PNG.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrank.errors import InputError
from headrank.formats import Collection
from headrank.method.heads import HeadSet
from headrank.method.late_layout import PassageKeys, passage_log_sums
from headrank.method.prompt import PromptTemplate
from headrank.method.readout import Readout
from headrank.passage_store.content import passage_digest
from headrank.passage_store.header import ITEM_BYTES, POOLS, KeyIdentity
from headrank.passage_store.keys import StoredForm, measure_scales
from headrank.passage_store.store import PassageStore
from headrank.passage_store.survey import SAMPLE
from headrank.reranking.late_reader import LateReader
from headrank.reranking.reader import AttentionReader
from headrank.selection.readout_fit import log_mass_values
from headrank.selection.readout_lists import ReadoutList, collection_lists
from headrank.selection.readout_validation import CrossValidation, FitSettings, Size, make_folds


@dataclass(frozen=True)
class Point:
    """One size of store and what it gives."""

    pairs: int
    dtype: str
    pool: int
    bytes_per_token: float
    quality: float
    by_collection: dict[str, float]


class StoredLists:
    """Lists whose passages a store holds, and their statistics in any stored form."""

    def __init__(
        self, store: PassageStore, model: str, collections: Sequence[Collection], labels: Sequence[str], depth: int
    ) -> None:
        """``labels`` are a teacher's runs, one per collection, or none: then grades are fitted to."""
        header = store.header
        if header.pool != 1 or header.dtype == "int8":
            raise InputError(
                f"{store.folder}: smaller forms are made from keys in bf16 or fp32 without pooling; index again"
            )
        # what a query looks like is no part of a store
        late_prompt = PromptTemplate(document_layout="late", instruction="Query: ")
        prompt = PromptTemplate.from_dict(late_prompt.to_dict() | dict(header.identity.prompt))
        reader = AttentionReader.load(model, prompt=prompt, last_layer=header.pairs[-1][0])
        header.check_serves(KeyIdentity.of(reader.name, prompt, header.identity.head_size), (), store.folder)
        every = [(layer, head) for layer in range(header.pairs[-1][0] + 1) for head in range(reader.num_heads)]
        readout = Readout(weights=(1.0,) * len(every))
        heads = HeadSet(
            tuple(every), "readout", reader.name, reader.num_layers, reader.num_heads, prompt=prompt, readout=readout
        )
        self.late, self.store = LateReader(reader, heads), store
        if self.late.pairs != header.pairs:
            raise InputError(
                f"{store.folder}: does not hold every pair down to layer {header.pairs[-1][0]}; index with --pairs all"
            )
        given = labels or [None] * len(collections)
        self.lists = [
            one
            for place, run in zip(collections, given, strict=True)
            for one in collection_lists(place, run, depth=depth)
        ]
        self.form = StoredForm(header.dtype, 1, store.scales)
        self.vectors = [self.late.query_vectors(self.late.encoder.encode_query(one.query)) for one in self.lists]

    def keys_of(self, one: ReadoutList) -> list[torch.Tensor]:
        """The keys [A, T, D] of a list's passages."""
        entries = self.store.find([passage_digest(document) for document in one.documents])
        if None in entries:
            raise InputError(
                f"{self.store.folder}: does not hold passage {one.doc_ids[entries.index(None)]} of {one.key}; index it"
            )
        return [self.form.decode(entry.keys_ATD) for entry in entries if entry is not None]

    @torch.inference_mode()
    def ratios(self, dtype: str, pool: int) -> list[np.ndarray]:
        """The log ratios [N, K, R] of every list, from keys in one stored form."""
        sample = [
            keys
            for one in self.lists[:: max(1, len(self.lists) * 20 // SAMPLE)]
            for keys in self.keys_of(one)
            if keys.shape[1]
        ]
        form = StoredForm(dtype, pool, measure_scales(sample[:SAMPLE], pool))
        found = []
        for one, vectors in zip(self.lists, self.vectors, strict=True):
            keys = [self._in_form(part, form) for part in self.keys_of(one)]
            most = max(1, max(part.shape[1] for part in keys))
            padded = torch.stack([torch.nn.functional.pad(part, (0, 0, 0, most - part.shape[1])) for part in keys])
            lengths = torch.tensor([part.shape[1] for part in keys])
            sums_NKR = (
                passage_log_sums(vectors, PassageKeys(padded, lengths), self.late.pair_of_head)[0]
                - vectors.opening_UKR[0]
            )
            found.append(sums_NKR.masked_fill((lengths == 0)[:, None, None], 0.0).numpy())
        return found

    @staticmethod
    def _in_form(keys_ATD: torch.Tensor, form: StoredForm) -> torch.Tensor:
        """Through the numbers of a store and back; a pooled key stands once for every token, which is how it is
        scanned.
        """
        stored = form.decode(form.encode(keys_ATD)[0])
        return stored if form.pool == 1 else stored.repeat_interleave(form.pool, dim=1)[:, : keys_ATD.shape[1]]


def measure(
    lists: StoredLists, budgets: Sequence[int], forms: Sequence[tuple[str, int]], num_folds: int
) -> list[Point]:
    """A point for every number of pairs and stored form."""
    layers, heads = lists.late.pairs[-1][0] + 1, lists.late.reader.num_heads
    exact = lists.ratios("fp32", 1)
    folds = make_folds(lists.lists, num_folds)
    settings = FitSettings("teacher" if lists.lists[0].teacher is not None else "judged")
    shape = {"num_heads": heads, "group_size": heads // lists.late.num_groups}
    validation = CrossValidation(
        lists.lists, exact, [np.zeros(len(one.doc_ids)) for one in lists.lists], folds, settings=settings, **shape
    )
    by_form = {form: exact if form == ("fp32", 1) else lists.ratios(*form) for form in [("fp32", 1), *forms]}
    points = []
    for budget in budgets:
        scores: dict[tuple[str, int], dict[int, np.ndarray]] = {form: {} for form in by_form}
        for fold in range(num_folds):
            training = [index for index in range(len(folds)) if folds[index] != fold]
            fitted = validation.fit(Size(layers, budget), training, fold)
            for form, ratios in by_form.items():
                for index in range(len(folds)):
                    if folds[index] == fold:
                        scores[form][index] = (
                            log_mass_values(ratios[index], fitted.offsets_K, fitted.floor) @ fitted.weights_K
                        )
        for (dtype, pool), of_form in scores.items():
            quality, by_collection, _ = validation.measure(of_form)
            size = budget * lists.store.header.identity.head_size * ITEM_BYTES[dtype] / pool
            points.append(Point(budget, dtype, pool, size, quality, by_collection))
            print(
                f"{budget:>4} pairs {dtype:>5} pool {pool} {size:8,.0f} bytes per token: NDCG@10 {quality:.2f}",
                flush=True,
            )
    return points


def draw(points: Sequence[Point], path: Path) -> None:
    """One line a form: NDCG@10 against bytes per token, which stand on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for form in dict.fromkeys((point.dtype, point.pool) for point in points):
        line = sorted(
            (point for point in points if (point.dtype, point.pool) == form), key=lambda point: point.bytes_per_token
        )
        label = form[0] + (f", {form[1]} tokens pooled" if form[1] > 1 else "")
        axes.plot([point.bytes_per_token for point in line], [point.quality for point in line], marker="o", label=label)
        for point in line:
            axes.annotate(
                str(point.pairs),
                (point.bytes_per_token, point.quality),
                fontsize=7,
                xytext=(3, 4),
                textcoords="offset points",
            )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes per token (labels: key pairs)")
    axes.set_ylabel("NDCG@10, held-out queries")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, metavar="DIR")
    parser.add_argument("--model", default="embedded", metavar="M")
    parser.add_argument("--collection", action="append", required=True, metavar="DIR")
    parser.add_argument(
        "--labels", action="append", default=[], metavar="RUN", help="a teacher's run for each collection"
    )
    parser.add_argument("--depth", type=int, default=20, metavar="N")
    parser.add_argument(
        "--pairs", type=int, nargs="+", default=[4, 8, 16, 32], metavar="N", help="budgets, beside all pairs"
    )
    parser.add_argument("--folds", type=int, default=4, metavar="N")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE.png", help="the figure; points go beside it as .json"
    )
    args = parser.parse_args(argv)
    store = PassageStore(args.store)
    lists = StoredLists(
        store, args.model, [Collection.open(folder) for folder in args.collection], args.labels, args.depth
    )
    every = len(store.header.pairs)
    forms = [("int8", pool) for pool in POOLS]
    points = measure(lists, sorted({every, *(budget for budget in args.pairs if budget < every)}), forms, args.folds)
    draw(points, args.output)
    facts: dict[str, Any] = {
        "queries": len(lists.lists),
        "layers": store.header.pairs[-1][0] + 1,
        "depth": args.depth,
        "folds": args.folds,
    }
    rows = [dataclasses.asdict(point) for point in points]
    args.output.with_suffix(".json").write_text(json.dumps({**facts, "points": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
