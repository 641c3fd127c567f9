"""Head selection: Eq. 2-4, CoRe and QR against a slow reference with eager attention, two passes and loops."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrank.errors import InputError
from headrank.formats import Collection
from headrank.method.heads import HeadSet
from headrank.method.list_places import ndcg
from headrank.method.prompt import PromptTemplate
from headrank.reranking.reader import AttentionReader
from headrank.selection.core import CoreSelection
from headrank.selection.qr import QRNdcgSelection, QRSelection
from headrank.selection.selection import (
    Contrast,
    EntropySelection,
    HeadPolicy,
    SelectionContext,
    accumulate,
    collection_contexts,
    make_head_set,
)
from headrank.selection.statistics import HeadStatistics, StatisticsCache, head_statistics, reader_key
from tests.slow_reference import SlowResult, eager_rows, slow_calibrated, slow_entropy, slow_masses
from tests.tiny_models import make_tiny_model

TOLERANCE = 2e-4  # float32 masses divided by a temperature of 0.02 and exponentiated
TEMPERATURE, WEIGHT = 0.02, 0.3
LAYERS, HEADS = 4, 8
Span = tuple[int, int]


def write_collection(folder: Path) -> Path:
    """Two judged queries of five candidates with grades 0-3 and unequal lengths, one query without contrasts, one
    unjudged.
    """
    folder.mkdir()
    texts = [
        "The flea lives for two months.",
        "Concrete floors cost six dollars a square foot and last long.",
        "Rosin makes the bow grip.",
    ]
    texts += [
        "A warm host completes the life cycle of the flea, which needs it for about three months.",
        "Passages rank by relevance.",
    ]
    rows = [{"docid": f"d{n}", "title": "Flea" if n == 3 else "", "text": text} for n, text in enumerate(texts)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "queries.tsv").write_text(
        "q1\thow long does a flea live\nq2\tcost of a floor\nq3\tviolin\nq4\tunjudged\n"
    )
    grades = {
        "q1": {"d0": 2, "d1": 0, "d2": 1, "d3": 3, "d4": -1},
        "q2": {"d0": 0, "d1": 2, "d2": 0, "d3": 1},
        "q3": {"d2": 3, "d0": 1},
    }
    (folder / "qrels.txt").write_text(
        "".join(f"{q} 0 {d} {g}\n" for q, judged in grades.items() for d, g in judged.items())
    )
    queries = ("q1", "q2", "q3", "q4")
    (folder / "run.bm25.txt").write_text(
        "".join(f"{q} Q0 d{n} {n + 1} {9 - n} bm25\n" for q in queries for n in range(5))
    )
    return folder


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Collection:
    return Collection.open(write_collection(tmp_path_factory.mktemp("selection") / "toy"))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> AttentionReader:
    return AttentionReader.load(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def contexts(collection: Collection) -> list[SelectionContext]:
    return collection_contexts(collection, PromptTemplate(), depth=5, permutations=1, seed=3)


@pytest.fixture(scope="module")
def slow(
    reader: AttentionReader, contexts: list[SelectionContext]
) -> list[tuple[SelectionContext, SlowResult, list[Span], int]]:
    """Context, eager rows, document spans and L_seq of every context."""
    results = []
    for context in contexts:
        encoded = reader.encoder.encode(context.query, context.documents)
        length = encoded.prefix_length + encoded.query_length
        results.append((context, eager_rows(reader.name, encoded), list(encoded.document_spans), length))
    return results


def raw_masses(rows: SlowResult, layer: int, head: int, spans: list[Span]) -> list[float]:
    return slow_masses(rows.query_rows[layer][head], spans)


def calibrated_masses(rows: SlowResult, layer: int, head: int, spans: list[Span]) -> list[float]:
    return slow_calibrated(rows.query_rows[layer][head], rows.calibration_rows[layer][head], spans)


def mean_masses(rows: SlowResult, layer: int, head: int, spans: list[Span]) -> list[float]:
    """The wrong pooling: mean instead of sum over a document's tokens."""
    return [
        mass / max(end - start, 1)
        for mass, (start, end) in zip(raw_masses(rows, layer, head, spans), spans, strict=True)
    ]


def slow_s_disc(slow: list, masses: Callable[..., list[float]]) -> np.ndarray:
    """Eq. 2 averaged over every d+ of every context, with loops."""
    result = np.zeros((LAYERS, HEADS))
    for layer in range(LAYERS):
        for head in range(HEADS):
            values = []
            for context, rows, spans, _ in slow:
                alpha = masses(rows, layer, head, spans)
                for positive, grade in enumerate(context.grades):
                    negatives = [
                        n
                        for n, other in enumerate(context.grades)
                        if other is not None and grade and other == grade - 1
                    ]
                    if grade and negatives:
                        terms = [math.exp(alpha[n] / TEMPERATURE) for n in [positive, *negatives]]
                        values.append(terms[0] / sum(terms))
            result[layer, head] = sum(values) / len(values)
    return result


def slow_gate(slow: list) -> np.ndarray:
    """Eq. 3 averaged over the contexts that have a contrast, with loops."""
    result = np.zeros((LAYERS, HEADS))
    for layer in range(LAYERS):
        for head in range(HEADS):
            used = [item for item in slow if Contrast().find(item[0].grades)]
            gates = [
                1 - WEIGHT * slow_entropy(rows.query_rows[layer][head]) / math.log(length)
                for _, rows, _, length in used
            ]
            result[layer, head] = sum(gates) / len(gates)
    return result


def slow_gold_mass(slow: list, masses: Callable[..., list[float]], *, is_mean: bool = True) -> np.ndarray:
    """QR: the mean over gold documents; ``is_mean`` False sums them, which is another number."""
    result = np.zeros((LAYERS, HEADS))
    for layer in range(LAYERS):
        for head in range(HEADS):
            values = [
                mass
                for context, rows, spans, _ in slow
                for mass, grade in zip(masses(rows, layer, head, spans), context.grades, strict=True)
                if grade is not None and grade >= 2
            ]
            result[layer, head] = sum(values) / (len(values) if is_mean else 1)
    return result


def slow_ndcg(slow: list, masses: Callable[..., list[float]]) -> np.ndarray:
    """NDCG@10 of each head alone, with loops."""

    def dcg(gains: list[int]) -> float:
        return sum(gain / math.log2(place + 2) for place, gain in enumerate(gains[:10]))

    result = np.zeros((LAYERS, HEADS))
    for layer in range(LAYERS):
        for head in range(HEADS):
            values = []
            for context, rows, spans, _ in slow:
                gains = [grade or 0 for grade in context.grades]
                if any(gains):
                    alpha = masses(rows, layer, head, spans)
                    order = sorted(range(len(gains)), key=lambda n: (-alpha[n], n))
                    values.append(dcg([gains[n] for n in order]) / dcg(sorted(gains, reverse=True)))
            result[layer, head] = sum(values) / len(values)
    return result


def columns_of(policy: HeadPolicy, reader: AttentionReader, contexts: list[SelectionContext]) -> dict[str, np.ndarray]:
    accumulate(reader, contexts, [policy])
    return policy.columns()


def head_set(policy: HeadPolicy, reader: AttentionReader, **options: object) -> HeadSet:
    shape = {"num_layers": reader.num_layers, "num_heads": reader.num_heads}
    return make_head_set(policy, model="tiny", prompt=reader.encoder.template, **shape, **options)


def test_phi_is_mean_discriminability_times_mean_gate_of_the_slow_reference(reader, contexts, slow) -> None:
    columns = columns_of(EntropySelection(TEMPERATURE, WEIGHT), reader, contexts)
    expected_s, expected_g = slow_s_disc(slow, raw_masses), slow_gate(slow)
    assert list(columns) == ["S", "G", "phi"]
    assert np.allclose(columns["S"], expected_s, atol=TOLERANCE)
    assert np.allclose(columns["G"], expected_g, atol=TOLERANCE)
    assert np.allclose(columns["phi"], expected_s * expected_g, atol=TOLERANCE)


def test_selection_reads_uncalibrated_sums_unless_told_otherwise(reader, contexts, slow) -> None:
    raw = columns_of(EntropySelection(TEMPERATURE, WEIGHT), reader, contexts)["S"]
    calibrated = columns_of(EntropySelection(TEMPERATURE, WEIGHT, is_calibrated=True), reader, contexts)["S"]
    assert np.allclose(calibrated, slow_s_disc(slow, calibrated_masses), atol=TOLERANCE)
    assert not np.allclose(raw, slow_s_disc(slow, calibrated_masses), atol=100 * TOLERANCE)
    assert not np.allclose(raw, slow_s_disc(slow, mean_masses), atol=100 * TOLERANCE)


def test_core_is_the_uncalibrated_contrast_without_the_gate(reader, contexts, slow) -> None:
    columns = columns_of(CoreSelection(TEMPERATURE), reader, contexts)
    assert list(columns) == ["S"]
    assert np.allclose(columns["S"], slow_s_disc(slow, raw_masses), atol=TOLERANCE)
    assert not np.allclose(columns["S"], slow_s_disc(slow, calibrated_masses), atol=100 * TOLERANCE)


def test_qr_is_the_mean_calibrated_mass_on_gold_documents(reader, contexts, slow) -> None:
    found = columns_of(QRSelection(gold_grade=2), reader, contexts)["gold_mass"]
    assert np.allclose(found, slow_gold_mass(slow, calibrated_masses), atol=1e-5)
    assert not np.allclose(found, slow_gold_mass(slow, raw_masses), atol=1e-3)
    assert not np.allclose(found, slow_gold_mass(slow, calibrated_masses, is_mean=False), atol=1e-3)


def test_qr_ndcg_ranks_every_list_by_one_head_on_calibrated_masses(reader, contexts, slow) -> None:
    found = columns_of(QRNdcgSelection(), reader, contexts)["ndcg"]
    assert np.allclose(found, slow_ndcg(slow, calibrated_masses), atol=1e-9)
    assert not np.allclose(found, slow_ndcg(slow, raw_masses), atol=1e-3)


def test_ndcg_of_a_hand_computed_list_with_a_tie() -> None:
    masses = np.array([[[0.1, 0.5, 0.5, 0.2]]])  # ranks documents 1, 2, 3, 0
    found = ndcg(masses, (3, None, 1, 0))
    assert found[0, 0] == pytest.approx((1 / math.log2(3) + 3 / math.log2(5)) / (3 + 1 / math.log2(3)))


def test_contrasts_pair_adjacent_grades_only() -> None:
    assert Contrast().find((3, 0, 1, None, 0, 3)) == [(2, [1, 4])]
    assert Contrast().find((2, 1, 0)) == [(0, [1]), (1, [2])]
    assert Contrast().find((0, None, 0)) == []


def test_without_alps_all_lower_grades_are_contrasted_and_core_contrasts_relevant_with_irrelevant() -> None:
    grades = (3, 0, 1, None, 0, 2)
    assert Contrast("lower").find(grades) == [(0, [1, 2, 4, 5]), (2, [1, 4]), (5, [1, 2, 4])]
    assert Contrast("irrelevant", gold_grade=2).find(grades) == [(0, [1, 4]), (5, [1, 4])]
    assert Contrast("irrelevant", gold_grade=2).find((1, 0)) == []
    with pytest.raises(InputError, match="`contrast` 'both'"):
        Contrast("both")


def test_per_query_a_query_with_many_chosen_documents_counts_once() -> None:
    def context(query_id: str, grades: tuple[int, ...]) -> SelectionContext:
        return SelectionContext("toy", query_id, 0, "q", tuple(("", "d") for _ in grades), grades)

    masses = {"many": np.float32([[[3.0, 3.0, 3.0, 0.0]]]), "one": np.float32([[[0.0, 3.0]]])}
    lists = [context("many", (1, 1, 1, 0)), context("one", (1, 0))]
    values = {}
    for per_query in (False, True):
        policies = [
            CoreSelection(1.0, contrast=Contrast(per_query=per_query)),
            QRSelection(per_query=per_query, is_calibrated=False),
        ]
        for policy in policies:
            for each in lists:
                mass = masses[each.query_id]
                policy.add(each, HeadStatistics(mass, mass, np.zeros((1, 1), np.float32), 10))
        values[per_query] = [float(next(iter(policy.columns().values()))[0, 0]) for policy in policies]
    good, bad = 1 / (1 + math.exp(-3)), 1 / (1 + math.exp(3))
    assert values[False] == pytest.approx([(3 * good + bad) / 4, 9 / 4])
    assert values[True] == pytest.approx([(good + bad) / 2, 3 / 2])


def test_contexts_are_judged_queries_in_retriever_order_then_in_random_orders(contexts: list[SelectionContext]) -> None:
    assert [(context.query_id, context.order) for context in contexts] == [
        (q, n) for n in (0, 1) for q in ("q1", "q2", "q3")
    ]
    assert contexts[0].grades == (2, 0, 1, 3, 0)  # the negative grade counts as 0
    assert contexts[1].grades == (0, 2, 0, 1, None)
    assert (
        sorted(contexts[3].documents) == sorted(contexts[0].documents)
        and contexts[3].documents != contexts[0].documents
    )
    by_text = dict(zip(contexts[0].documents, contexts[0].grades, strict=True))
    assert [by_text[document] for document in contexts[3].documents] == list(contexts[3].grades)


def test_a_random_order_does_not_depend_on_the_other_queries(collection: Collection) -> None:
    template = PromptTemplate()
    full = collection_contexts(collection, template, depth=5, permutations=2, seed=1)
    one = collection_contexts(collection, template, depth=5, permutations=2, seed=1, only={"q2"})
    held_out = collection_contexts(collection, template, depth=5, permutations=2, seed=1, hold_out={"q1", "q3"})
    assert one == held_out == [context for context in full if context.query_id == "q2"]
    other_seed = collection_contexts(collection, template, depth=5, permutations=2, seed=2, only={"q2"})
    assert other_seed != one


def test_contexts_follow_the_prompt_order_of_the_template(collection: Collection) -> None:
    forward = collection_contexts(collection, PromptTemplate(), depth=4)
    backward = collection_contexts(collection, PromptTemplate(order="reversed"), depth=4)
    assert [context.grades[::-1] for context in backward] == [context.grades for context in forward]
    shuffled = collection_contexts(collection, PromptTemplate(), depth=4, permutations=2, with_retriever_order=False)
    assert {context.order for context in shuffled} == {1, 2}


def test_a_batch_gives_the_statistics_of_its_single_contexts(
    reader: AttentionReader, contexts: list[SelectionContext]
) -> None:
    encoded = [
        reader.encoder.encode(context.query, context.documents[: 5 - n]) for n, context in enumerate(contexts[:3])
    ]
    for one, many in zip(
        (head_statistics(reader, [context])[0] for context in encoded), head_statistics(reader, encoded), strict=True
    ):
        assert one.sequence_length == many.sequence_length
        for name in ("raw_LHN", "calibrated_LHN", "entropy_LH"):
            assert getattr(one, name).shape == getattr(many, name).shape
            assert np.allclose(getattr(one, name), getattr(many, name), atol=1e-5)


def test_masses_of_a_context_never_sum_to_more_than_one(
    reader: AttentionReader, contexts: list[SelectionContext]
) -> None:
    statistics = head_statistics(reader, [reader.encoder.encode(contexts[0].query, contexts[0].documents)])[0]
    assert (statistics.raw_LHN >= 0).all() and (statistics.raw_LHN.sum(-1) <= 1 + 1e-5).all()


def test_fewer_layers_give_the_same_numbers_for_the_layers_that_are_read(reader, contexts) -> None:
    whole, pruned = CoreSelection(TEMPERATURE), CoreSelection(TEMPERATURE)
    accumulate(reader, contexts, [whole])
    accumulate(reader, contexts, [pruned], num_layers=2)
    assert pruned.columns()["S"].shape == (2, HEADS)
    assert np.array_equal(pruned.columns()["S"], whole.columns()["S"][:2])
    assert head_set(pruned, reader, top_k=3).l_max <= 1


def test_the_same_input_gives_the_same_file_also_from_the_cache(
    reader, contexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = StatisticsCache(tmp_path / "cache", reader_key(reader))

    def select(name: str, cached: bool) -> bytes:
        policy = EntropySelection(TEMPERATURE)
        source = accumulate(reader, contexts, [policy], cache=cache if cached else None)
        head_set(policy, reader, top_k=3, source=source).save(tmp_path / name)
        return (tmp_path / name).read_bytes()

    plain, filled = select("a.json", False), select("b.json", True)
    monkeypatch.setattr(reader, "read", lambda *_, **__: pytest.fail("the cache was not used"))
    assert plain == filled == select("c.json", True)


def test_a_torn_cache_file_is_computed_again(reader, contexts, tmp_path: Path) -> None:
    cache = StatisticsCache(tmp_path, "key")
    encoded = reader.encoder.encode(contexts[0].query, contexts[0].documents)
    cache.save(encoded, head_statistics(reader, [encoded])[0])
    assert isinstance(cache.load(encoded, LAYERS), HeadStatistics)
    assert StatisticsCache(tmp_path, "other").load(encoded, LAYERS) is None
    path = cache.path(encoded)
    path.write_bytes(path.read_bytes()[:100])
    assert cache.load(encoded, LAYERS) is None


def test_deeper_statistics_serve_a_pruned_selection_and_shallower_ones_do_not(reader, contexts, tmp_path: Path) -> None:
    pruned = AttentionReader.load(reader.name, last_layer=1)
    assert reader_key(pruned) == reader_key(reader)
    cache = StatisticsCache(tmp_path, reader_key(reader))
    encoded = reader.encoder.encode(contexts[0].query, contexts[0].documents)
    shallow = head_statistics(pruned, [encoded], 2)[0]
    cache.save(encoded, shallow)
    assert cache.load(encoded, LAYERS) is None
    cache.save(encoded, head_statistics(reader, [encoded])[0])
    served = cache.load(encoded, 2)
    assert served is not None
    assert all(np.array_equal(value, getattr(served, name)) for name, value in vars(shallow).items())


def test_the_fingerprint_changes_with_the_weights(reader: AttentionReader, tmp_path: Path) -> None:
    same = AttentionReader.load(make_tiny_model(tmp_path / "same"))
    other = AttentionReader.load(make_tiny_model(tmp_path / "other", seed=1))
    assert reader_key(same) == reader_key(reader) != reader_key(other)


def test_heads_json_ranks_every_head_and_says_what_it_was_computed_from(reader, contexts, tmp_path: Path) -> None:
    policy = EntropySelection(TEMPERATURE, WEIGHT)
    source = accumulate(reader, contexts, [policy])
    heads = head_set(policy, reader, top_k=5, source=source)
    heads.save(tmp_path / "heads.json")
    loaded = HeadSet.load(tmp_path / "heads.json")
    assert loaded == heads and len(loaded.table) == LAYERS * HEADS
    phis = [row["phi"] for row in loaded.table]
    assert phis == sorted(phis, reverse=True)
    assert [(row["layer"], row["head"]) for row in loaded.table[:5]] == list(loaded.heads)
    assert [row["is_chosen"] for row in loaded.table] == [True] * 5 + [False] * (LAYERS * HEADS - 5)
    assert loaded.settings == {
        "temperature": TEMPERATURE,
        "entropy_weight": WEIGHT,
        "is_calibrated": False,
        "contrast": "adjacent",
        "per_query": False,
    }
    assert loaded.source["queries"] == 2 and loaded.source["contexts"] == 4  # q3 has no adjacent grades
    assert "torch" in loaded.source["versions"]


def test_only_contexts_that_some_policy_uses_are_run(reader: AttentionReader, contexts: list[SelectionContext]) -> None:
    core, qr = CoreSelection(TEMPERATURE), QRSelection(gold_grade=3)
    assert accumulate(reader, contexts, [core, qr])["queries"] == 3
    assert core.scores.count == 2 * 5 and qr.masses.count == 2 * 2


def test_no_contrast_anywhere_is_the_users_error(reader: AttentionReader, contexts: list[SelectionContext]) -> None:
    policy = EntropySelection()
    accumulate(reader, [context for context in contexts if context.query_id == "q3"], [policy])
    with pytest.raises(InputError, match="adjacent grades"):
        policy.columns()


def test_no_query_left_is_the_users_error(collection: Collection) -> None:
    with pytest.raises(InputError, match="`only`"):
        collection_contexts(collection, PromptTemplate(), depth=5, only={"nobody"})
