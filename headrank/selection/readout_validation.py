"""Which readout to take: nested cross-validation over queries for every depth and group budget, then one fit on all
lists.

Outer folds measure, inner ones (the others) choose floor and L2, and offsets, scales and groups are found on training
lists only: no number of the table has seen the query that it is about.

Shapes: N passages of a list, K heads (layer by layer), R query rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrank.errors import InputError
from headrank.evaluation.measures import evaluate_run
from headrank.files import read_lines
from headrank.formats import Candidate
from headrank.selection.readout_fit import Problem, choose_groups, fit_ridge, log_mass_values, median_offsets
from headrank.selection.readout_lists import ReadoutList

MEASURE = "nDCG@10"


@dataclass(frozen=True)
class FitSettings:
    """What is fitted to, and what cross-validation chooses among."""

    labels: str = "teacher"  # judged, teacher or both
    l2: tuple[float, ...] = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    floors: tuple[float, ...] = (0.1,)
    is_equal: bool = False  # every chosen head counts alike: what fitted weights are compared with
    with_length: bool = False  # the log of the length as one feature more: a test, no readout can hold it


@dataclass(frozen=True)
class Size:
    """How much of the model a readout may use: layers computed, and (layer, key-value group) pairs; None is all of
    them.
    """

    num_layers: int
    num_groups: int | None = None


@dataclass(frozen=True)
class Fitted:
    """One fitted readout; all arrays over the K heads of its layers."""

    size: Size
    weights_K: np.ndarray  # of head values; 0 for heads of groups that were left out
    scaled_K: np.ndarray  # of values scaled to a deviation of 1 within lists: comparable between heads
    offsets_K: np.ndarray
    floor: float
    l2: float
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """What cross-validation says of one size."""

    size: Size
    quality: float  # nDCG@10 x 100 of judged lists, or the pair accuracy x 100 where nothing is judged
    by_collection: Mapping[str, float]
    accuracy: float  # share of pairs ordered as the labels say, x 100
    chosen: tuple[tuple[float, float], ...]  # (floor, l2) of each fold
    per_query: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For heads.json."""
        return {
            "layers": self.size.num_layers,
            "groups": self.size.num_groups,
            "quality": round(self.quality, 2),
            "by_collection": {name: round(value, 2) for name, value in self.by_collection.items()},
            "pair_accuracy": round(self.accuracy, 2),
        }


def make_folds(lists: Sequence[ReadoutList], number: int) -> list[int]:
    """A fold for each list, balanced within every collection and fixed by the query ids."""
    # by hash of the id: ids of neighbours often share a topic, and lists in file order would give folds of topics
    order = sorted(
        range(len(lists)),
        key=lambda index: (lists[index].collection, hashlib.sha256(lists[index].key.encode()).hexdigest()),
    )
    folds = [0] * len(lists)
    for place, index in enumerate(order):
        folds[index] = place % number
    return folds


def read_folds(path: str, lists: Sequence[ReadoutList]) -> list[int]:
    """The fold of each list from a file of lines 'query-id fold' (or 'collection/query-id fold')."""
    given: dict[str, int] = {}
    for number, line in read_lines(path):
        fields = line.split()
        if len(fields) != 2 or not fields[1].isdecimal():
            raise InputError(
                f"{path}:{number}: expected 'query-id fold' with a fold from 0, found {line!r}; correct the line"
            )
        given[fields[0]] = int(fields[1])
    missing = [one.key for one in lists if one.key not in given and one.query_id not in given]
    if missing:
        raise InputError(f"{path}: {len(missing)} lists have no fold, the first is {missing[0]!r}; add a line for each")
    folds = [given.get(one.key, given.get(one.query_id, 0)) for one in lists]
    if len(set(folds)) < 2:
        raise InputError(f"{path}: all lists are in one fold; give at least two")
    return folds


class CrossValidation:
    """Fits and measures readouts on one set of lists with their statistics."""

    def __init__(
        self,
        lists: Sequence[ReadoutList],
        ratios: Sequence[np.ndarray],
        lengths: Sequence[np.ndarray],
        folds: Sequence[int],
        *,
        num_heads: int,
        group_size: int,
        settings: FitSettings,
    ) -> None:
        """``ratios`` are the log ratios [N, K, R] of each list, ``num_heads`` heads of a layer, ``group_size`` heads
        of a key group.
        """
        self.lists, self.ratios, self.lengths, self.folds = list(lists), list(ratios), list(lengths), np.array(folds)
        self.num_heads, self.group_size, self.settings = num_heads, group_size, settings
        self._values: dict[tuple[int, float], tuple[np.ndarray, list[np.ndarray]]] = {}

    def row(self, size: Size) -> Row:
        """Nested cross-validation of one size."""
        scores: dict[int, np.ndarray] = {}
        chosen, accuracies = [], []
        for fold in sorted(set(self.folds.tolist())):
            training = [index for index in range(len(self.lists)) if self.folds[index] != fold]
            held = [index for index in range(len(self.lists)) if self.folds[index] == fold]
            # nested: groups, floor, L2 and offsets are all chosen without the fold that is measured
            fitted = self.fit(size, training, fold)
            values = self._values_of(fold, training, fitted.floor)[1]
            columns = slice(0, len(fitted.weights_K) - self.settings.with_length)
            for index in held:
                scores[index] = self._features(index, values[index], columns) @ fitted.weights_K
            problem = self._problem(held, values, columns)
            accuracies.append((problem.accuracy(fitted.weights_K * problem.scale_K), problem.num_lists))
            chosen.append((fitted.floor, fitted.l2))
        counts = sum(count for _, count in accuracies)
        accuracy = 100 * sum(value * count for value, count in accuracies) / max(1, counts)
        quality, by_collection, per_query = self.measure(scores)
        return Row(size, quality if per_query else accuracy, by_collection, accuracy, tuple(chosen), per_query)

    def fit(self, size: Size, training: Sequence[int] | None = None, fold: int = -1) -> Fitted:
        """The readout of one size on the ``training`` lists (all by default); ``fold`` is the one left out."""
        chosen = list(range(len(self.lists))) if training is None else list(training)
        columns = slice(0, size.num_layers * self.num_heads)
        groups = [np.arange(start, start + self.group_size) for start in range(0, columns.stop, self.group_size)]
        best: tuple[float, float, float, np.ndarray | None, tuple[int, ...]] | None = None
        for floor in self.settings.floors:
            values = self._values_of(fold, chosen, floor)[1]
            features, kept = None, tuple(range(len(groups)))
            if size.num_groups is not None and size.num_groups < len(groups):
                kept = tuple(
                    choose_groups(
                        self._problem(chosen, values, columns), groups, size.num_groups, min(self.settings.l2)
                    )
                )
                last = [np.array([columns.stop])] if self.settings.with_length else []
                features = np.concatenate([*(groups[index] for index in kept), *last])
            for l2, loss in self._inner_losses(chosen, values, columns, features).items():
                if best is None or loss < best[0] - 1e-9:
                    best = (loss, floor, l2, features, kept)
        assert best is not None
        _, floor, l2, features, kept = best
        offsets_K, values = self._values_of(fold, chosen, floor)
        problem = self._problem(chosen, values, columns)
        scaled_K = self._equal(problem, features) if self.settings.is_equal else fit_ridge(problem, l2, features)
        return Fitted(size, scaled_K / problem.scale_K, scaled_K, offsets_K[columns], floor, l2, kept)

    def _equal(self, problem: Problem, features: np.ndarray | None) -> np.ndarray:
        """Weights that are 1/K for each of the K chosen heads, in scaled units."""
        chosen = np.arange(problem.num_features) if features is None else features
        scaled_K = np.zeros(problem.num_features)
        scaled_K[chosen] = problem.scale_K[chosen] / len(chosen)
        return scaled_K

    def measure(self, scores: Mapping[int, np.ndarray]) -> tuple[float, dict[str, float], dict[str, float]]:
        """nDCG@10 x 100 of lists with judgements: the mean over queries, that of each collection, and of each query."""
        qrels = {self.lists[index].key: dict(self.lists[index].judged) for index in scores if self.lists[index].judged}
        if not qrels:
            return 0.0, {}, {}
        run = {}
        for index, values in scores.items():
            one, order = self.lists[index], np.argsort(-values, kind="stable")
            # measured by the evaluator that reports use, so that this number can stand beside theirs
            run[one.key] = [
                Candidate(one.doc_ids[place], rank, float(values[place]))
                for rank, place in enumerate(order.tolist(), 1)
            ]
        per_query = {key: 100 * value for key, value in evaluate_run(run, qrels, [MEASURE]).values[MEASURE].items()}
        names = {one.key: one.collection for one in self.lists}
        by_collection = {
            name: float(np.mean([value for key, value in per_query.items() if names[key] == name]))
            for name in sorted({names[key] for key in per_query})
        }
        return float(np.mean(list(per_query.values()))), by_collection, per_query

    def first_stage(self) -> tuple[float, dict[str, float], dict[str, float]]:
        """What the retriever's order gives on the same lists."""
        return self.measure({index: -np.arange(len(one.doc_ids), dtype=float) for index, one in enumerate(self.lists)})

    def _inner_losses(
        self, training: Sequence[int], values: Sequence[np.ndarray], columns: slice, features: np.ndarray | None
    ) -> dict[float, float]:
        """L2 -> the held-out loss over the folds of the training lists; a single choice needs no question."""
        # one candidate wins whatever its loss: no fold is fitted for it
        if len(self.settings.l2) == 1 and len(self.settings.floors) == 1:
            return {self.settings.l2[0]: 0.0}
        losses = dict.fromkeys(self.settings.l2, 0.0)
        for fold in sorted({int(self.folds[index]) for index in training}):
            rest = self._problem([index for index in training if self.folds[index] != fold], values, columns)
            held = self._problem([index for index in training if self.folds[index] == fold], values, columns)
            for l2 in self.settings.l2:
                weights_K = fit_ridge(rest, l2, features) / rest.scale_K
                # weights go through raw units: both problems scale their features by their own lists
                losses[l2] += held.num_lists * held.loss(weights_K * held.scale_K)[0]
        return losses

    def _values_of(self, fold: int, training: Sequence[int], floor: float) -> tuple[np.ndarray, list[np.ndarray]]:
        """Offsets of the training lists and the head values of all lists with them; kept, because every size asks
        again.
        """
        if (fold, floor) not in self._values:
            offsets_K = median_offsets([self.ratios[index] for index in training], self.ratios[0].shape[1])
            self._values[fold, floor] = offsets_K, [log_mass_values(ratios, offsets_K, floor) for ratios in self.ratios]
        return self._values[fold, floor]

    def _problem(self, chosen: Sequence[int], values: Sequence[np.ndarray], columns: slice) -> Problem:
        features = [self._features(index, values[index], columns) for index in chosen]
        return Problem([self.lists[index] for index in chosen], features, self.settings.labels)

    def _features(self, index: int, values_NK: np.ndarray, columns: slice) -> np.ndarray:
        if not self.settings.with_length:
            return values_NK[:, columns]
        return np.concatenate([values_NK[:, columns], np.log(np.maximum(1, self.lengths[index]))[:, None]], axis=1)


def cheapest_within(rows: Sequence[Row], tolerance: float) -> Row:
    """The row with the fewest layers, then groups, whose quality is within ``tolerance`` of the best one's."""
    best = max(row.quality for row in rows)
    fitting = [row for row in rows if row.quality >= best - tolerance]
    return min(fitting, key=lambda row: (row.size.num_layers, row.size.num_groups or 10**9, -row.quality))
