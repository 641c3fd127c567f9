"""ALPS, Adjacent-Level Preference Sampling: which documents of one candidate list are preferred over which.

Everything here works on one list of grades in retriever order (None = unjudged) and returns index pairs [M, 2] of
(chosen, rejected). Pairs are ordered by chosen, then rejected index, so the same list always gives the same file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Grades = Sequence[int | None]
SUBLISTS_BY = ("chance", "score")  # how sub-lists are drawn: sample_sublists, sample_strata


def known_grades(grades: Grades, *, unjudged_as_zero: bool = False) -> list[int | None]:
    """The grades that count: negative ones (TREC's marks for spam) are not relevant, unjudged stay unknown or become
    0.
    """
    unknown = 0 if unjudged_as_zero else None
    # TREC marks spam with grades below 0; as levels of their own they would make pairs among bad passages
    return [unknown if grade is None else max(grade, 0) for grade in grades]


def adjacent_pairs(grades: Grades) -> np.ndarray:
    """All pairs [M, 2] of judged documents whose grades differ by exactly one; larger gaps are discarded."""
    return _pairs_by_gap(grades, largest_gap=1)


def graded_pairs(grades: Grades) -> np.ndarray:
    """All pairs [M, 2] of judged documents with different grades, whatever the gap."""
    return _pairs_by_gap(grades, largest_gap=None)


def random_pairs(grades: Grades, rng: np.random.Generator) -> np.ndarray:
    """The ablation without ALPS: as many pairs as ALPS would make, drawn from all pairs with different grades.

    The number is kept so that the ablation changes which pairs are seen and not how many.
    """
    every = graded_pairs(grades)
    count = len(adjacent_pairs(grades))
    # sorted: which pairs were drawn must not change the order in which a context writes them
    return every[np.sort(rng.choice(len(every), count, replace=False))] if count else every[:0]


def _pairs_by_gap(grades: Grades, largest_gap: int | None) -> np.ndarray:
    values = np.array([-1 if grade is None else grade for grade in grades], np.int64)
    is_judged = np.array([grade is not None for grade in grades], bool)
    gaps = values[:, None] - values[None, :]
    keep = (gaps > 0) & is_judged[:, None] & is_judged[None, :]
    if largest_gap is not None:
        keep &= gaps <= largest_gap
    return np.argwhere(keep).reshape(-1, 2)


def cap_pairs(pairs: np.ndarray, grades: Grades, limit: int, rng: np.random.Generator) -> np.ndarray:
    """At most ``limit`` of the pairs [M, 2], balanced over grade levels (the chosen document's grade).

    Every level gives the same number; what a small level cannot give is shared among the others.
    """
    if len(pairs) <= limit:
        return pairs
    levels = np.array([grades[chosen] for chosen, _ in pairs])
    names, counts = np.unique(levels, return_counts=True)
    quotas = _even_quotas(counts, limit)
    kept = [
        rng.choice(np.flatnonzero(levels == name), quota, replace=False)
        for name, quota in zip(names, quotas, strict=True)
    ]
    return pairs[np.sort(np.concatenate(kept))]


def _even_quotas(counts: np.ndarray, total: int) -> np.ndarray:
    """Quotas that sum to ``total``, none above its count, as even as possible; higher levels take the remainder."""
    quotas = np.zeros_like(counts)
    while (left := total - quotas.sum()) > 0:
        open_levels = np.flatnonzero(quotas < counts)
        share = left // len(open_levels)
        if share == 0:
            # the rest goes to the highest grades, usually the rarest
            quotas[open_levels[-left:]] += 1
        else:
            quotas[open_levels] += np.minimum(share, counts[open_levels] - quotas[open_levels])
    return quotas


def sample_sublists(grades: Grades, count: int, sizes: tuple[int, int], rng: np.random.Generator) -> list[np.ndarray]:
    """Up to ``count`` different sorted index lists of ``sizes`` (smallest, largest) documents, each with an adjacent
    pair among them.

    A length is drawn evenly, then a pair, and the other places are filled evenly from the rest of the list, so every
    list has something to learn from. A list that is shorter than what is drawn gives itself; one without adjacent pairs
    gives nothing.
    """
    smallest, largest = sizes
    pairs = adjacent_pairs(grades)
    if not len(pairs):
        return []
    if len(grades) <= smallest:
        return [np.arange(len(grades))]
    found: dict[bytes, np.ndarray] = {}
    for _ in range(4 * count):  # repeats are possible in short lists: a bounded number of tries
        if len(found) == count:
            break
        # nothing is drawn for one length, so that a seed gives the lists that it always gave
        size = min(smallest if smallest == largest else int(rng.integers(smallest, largest + 1)), len(grades))
        pair = pairs[rng.integers(len(pairs))]
        # from everything else, also other grades: a list of two grades only would be easier than what is reranked
        others = np.setdiff1d(np.arange(len(grades)), pair)
        chosen = np.sort(np.concatenate([pair, rng.choice(others, size - 2, replace=False)]))
        found.setdefault(chosen.tobytes(), chosen)
    return list(found.values())


def sample_strata(
    scores: Sequence[float | None], count: int, sizes: tuple[int, int], rng: np.random.Generator
) -> list[np.ndarray]:
    """Up to ``count`` different sorted index lists of ``sizes`` (smallest, largest) documents, spread over a teacher's
    scores.

    The scored documents, best first, are cut into as many strata of nearly equal size as a list has documents, and one
    is drawn from each: the best and the worst are always represented, as an even draw of 8 from 20 would often not do.
    Documents without a score are never drawn; a query with no more of them than the smallest size gives one list of all
    that are scored.
    """
    smallest, largest = sizes
    scored = np.array([index for index, score in enumerate(scores) if score is not None], np.int64)
    if len(scored) <= smallest:
        return [scored] if len(scored) > 1 else []
    best_first = scored[np.argsort([-float(scores[index] or 0.0) for index in scored], kind="stable")]
    found: dict[bytes, np.ndarray] = {}
    for _ in range(4 * count):  # repeats are possible in short lists: a bounded number of tries
        if len(found) == count:
            break
        size = min(smallest if smallest == largest else int(rng.integers(smallest, largest + 1)), len(scored))
        chosen = np.sort([rng.choice(stratum) for stratum in np.array_split(best_first, size)])
        found.setdefault(chosen.tobytes(), chosen)
    return list(found.values())
