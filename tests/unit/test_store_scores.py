"""Scores from a store: those of the pass without one, whatever is found or missing, in any order and any batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from headrank.errors import InputError
from headrank.method.late_layout import PassageKeys, QueryVectors, late_scores
from headrank.passage_store.content import passage_digest
from headrank.passage_store.header import KeyIdentity, StoreHeader
from headrank.passage_store.indexing import IndexSettings, index_corpus, index_pairs
from headrank.passage_store.keys import StoredForm, measure_scales, pool_tokens
from headrank.passage_store.scan import TILE_TOKENS, Scanner
from headrank.passage_store.source import StoredPassages
from headrank.passage_store.store import Entry, PassageStore, create_store
from headrank.passage_store.upkeep import verify
from headrank.passage_store.writer import StoreWriter, writing
from headrank.reranking.late_reader import LateReader, heads_of_pairs
from headrank.reranking.reader import AttentionReader
from headrank.reranking.reranker import HeadRankReranker
from tests.tiny_models import FAMILIES, make_tiny_model
from tests.unit.test_late_layout import every_head

OF_A_LISTS_DEVIATION = 1e-4  # fp32: another order of summation
OF_FLOAT_PRODUCTS = 1e-5  # bf16 and fp32 stores: the library may choose another kernel for another number of keys
SIZE, PAIR_OF_HEAD = 16, (1, 0, 1, 2, 1)
WEIGHTS, OFFSETS = torch.tensor([0.7, -2.0, 1.5, 1.0, -0.4]), torch.tensor([0.1, 0.2, -0.3, 0.0, 0.5])
LENGTHS = (7, 1, 0, 12, 30, 5, 0, 19)


def random_query(seed: int, num_rows: int = 5, spread: float = 0.6) -> QueryVectors:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(1, len(PAIR_OF_HEAD), num_rows, SIZE, generator=generator) * spread
    opening = torch.randn(1, len(PAIR_OF_HEAD), num_rows, generator=generator)
    return QueryVectors(vectors, opening, torch.full((1, num_rows), 1 / num_rows))


def random_keys(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[torch.Tensor]:
    """Keys with a constant in every channel, as models have it."""
    generator = torch.Generator().manual_seed(seed)
    constant = 3 * torch.randn(3, 1, SIZE, generator=generator)
    return [constant + torch.randn(3, length, SIZE, generator=generator) for length in lengths]


def stored(
    folder: Path, keys: Sequence[torch.Tensor], dtype: str, pool: int = 1
) -> tuple[Scanner, list[Entry], StoredForm]:
    """A store with these keys, and what scans it."""
    scales = measure_scales([part for part in keys if part.shape[1]], pool)
    pairs = tuple((layer, 0) for layer in range(3))
    header = StoreHeader(KeyIdentity("m", "w", "none", "t", {}, SIZE), pairs, dtype, pool, scales=scales.digest)
    create_store(folder, header, scales)
    form = StoredForm(dtype, pool, scales)
    digests = [passage_digest(("", str(number))) for number in range(len(keys))]
    with writing(folder), StoreWriter(folder, header) as writer:
        for digest, part in zip(digests, keys, strict=True):
            writer.add(digest, form.encode(part)[0], part.shape[1])
    entries = PassageStore(folder).find(digests)
    assert all(entries)
    return Scanner(form, [0, 1, 2], PAIR_OF_HEAD, SIZE), [entry for entry in entries if entry], form


def exact(query: QueryVectors, keys: Sequence[torch.Tensor], floor: float) -> torch.Tensor:
    """Scores [N] from ``late_scores`` with these keys."""
    most = max(part.shape[1] for part in keys)
    padded = torch.stack([torch.nn.functional.pad(part, (0, 0, 0, most - part.shape[1])) for part in keys])
    passages = PassageKeys(padded, torch.tensor([part.shape[1] for part in keys]))
    return late_scores(query, passages, PAIR_OF_HEAD, WEIGHTS, OFFSETS, floor)[0]


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_the_scan_equals_late_scores_of_the_stored_numbers(tmp_path: Path, dtype: str, floor: float) -> None:
    keys, query = random_keys(), random_query(1)
    scanner, entries, form = stored(tmp_path / "s", keys, dtype)
    decoded = [form.decode(entry.keys_ATD) for entry in entries]
    scores = scanner.scores([query], entries, WEIGHTS, OFFSETS, floor)[0]
    reference = exact(query, decoded, floor)
    # int8: the query has 15 bits
    assert torch.allclose(scores, reference, atol=(3e-3 if dtype == "int8" else 1e-4) * float(reference.std()))
    assert scores[2] == 0 and scores[6] == 0, "empty passages say nothing"
    assert torch.allclose(scores, exact(query, keys, floor), atol=0.05 * float(reference.std()))


@pytest.mark.parametrize("pool", [2, 4])
def test_a_pooled_key_counts_for_the_tokens_it_stands_for(tmp_path: Path, pool: int) -> None:
    keys, query = random_keys(), random_query(2)
    scanner, entries, _ = stored(tmp_path / "s", keys, "fp32", pool)
    repeated = []
    for part in keys:
        groups = [part[:, start : start + pool] for start in range(0, part.shape[1], pool)]
        repeated.append(
            torch.cat([group.mean(1, keepdim=True).expand_as(group) for group in groups], 1) if groups else part
        )
    assert torch.allclose(
        scanner.scores([query], entries, WEIGHTS, OFFSETS, 0.1)[0], exact(query, repeated, 0.1), atol=1e-4
    )
    assert [entry.num_keys for entry in entries] == [-(-length // pool) for length in LENGTHS]


def test_pooling_by_hand() -> None:
    keys = torch.tensor([[[1.0], [3.0], [10.0]]])
    assert pool_tokens(keys, 2).tolist() == [[[2.0], [10.0]]] and pool_tokens(keys, 4).item() == pytest.approx(14 / 3)
    assert pool_tokens(keys[:, :0], 2).shape == (1, 0, 1)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_no_list_order_or_batch_changes_a_score(tmp_path: Path, dtype: str) -> None:
    """int8: not a bit. Floats: within 1e-5 of the list's deviation."""
    lengths = [random.Random(0).randrange(0, 40) for _ in range(60)]
    queries = [random_query(seed, num_rows=3 + seed) for seed in range(4)]
    scanner, entries, _ = stored(tmp_path / "s", random_keys(lengths), dtype)
    whole = scanner.scores(queries, entries, WEIGHTS, OFFSETS, 0.1)
    bound = 0.0 if dtype == "int8" else OF_FLOAT_PRODUCTS * float(whole.std())
    for seed in range(12):
        draw = random.Random(seed)
        chosen = draw.sample(range(60), draw.choice([1, 2, 5, 17, 60]))
        some = draw.sample(range(4), draw.choice([1, 2, 4]))
        scores = scanner.scores(
            [queries[place] for place in some], [entries[place] for place in chosen], WEIGHTS, OFFSETS, 0.1
        )
        assert float((scores - whole[some][:, chosen]).abs().max()) <= bound


def test_lists_longer_than_a_tile_and_passages_longer_than_a_tile(tmp_path: Path) -> None:
    lengths = (TILE_TOKENS // 2, TILE_TOKENS // 2, 5, TILE_TOKENS + 3, 1)
    keys, query = random_keys(lengths), random_query(3)
    scanner, entries, _ = stored(tmp_path / "s", keys, "fp32")
    assert torch.allclose(
        scanner.scores([query], entries, WEIGHTS, OFFSETS, 0.1)[0], exact(query, keys, 0.1), atol=1e-3
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_beyond_the_range_of_powers_of_two_are_summed_with_their_maximum(tmp_path: Path, sign: float) -> None:
    keys = random_keys((4, 6, 3))
    keys[1] = keys[1] + sign * 400.0
    query = random_query(4, spread=0.3)
    scanner, entries, form = stored(tmp_path / "s", keys, "fp32")
    reference = exact(query, [form.decode(entry.keys_ATD) for entry in entries], 0.0)
    assert float(reference.abs().max()) > 200
    assert torch.allclose(scanner.scores([query], entries, WEIGHTS, OFFSETS, 0.0)[0], reference, rtol=1e-5)


def test_saturated_numbers_are_cut_and_counted() -> None:
    keys = random_keys((50,))
    form = StoredForm("int8", 1, measure_scales(keys))
    assert form.encode(keys[0])[1] == 0
    outlier = keys[0].clone()
    outlier[1, 3, 5] += 1000
    numbers, saturated = form.encode(outlier)
    assert saturated == 1 and numbers[1, 3, 5] == 127
    assert (
        float((form.decode(form.encode(keys[0])[0]) - keys[0]).abs().max()) <= float(form.scales.scale_AD.max()) * 0.51
    )


WORDS = "flea lives two three months floor concrete cost dollars rosin bow violin string warm host cycle".split()


def passages(count: int, seed: int = 0) -> list[tuple[str, str]]:
    draw = random.Random(seed)
    made = [
        (draw.choice(["", "Title"]), " ".join(draw.choices(WORDS, k=draw.randrange(1, 25))) + f" {n}")
        for n in range(count)
    ]
    return [*made[:-1], ("", "")]


def documents_of(some: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"title": title, "text": text} for title, text in some]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def index(folder: Path, model: Path, some: Sequence[tuple[str, str]], **settings: object) -> dict[str, object]:
    late = LateReader(AttentionReader.load(model, prompt=every_head().prompt, dtype="float32"), every_head())
    return index_corpus(folder, late, lambda: some, IndexSettings(**settings))  # type: ignore[arg-type]


def reranker(model: Path, **options: object) -> HeadRankReranker:
    return HeadRankReranker.from_pretrained(model, every_head(), dtype="float32", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_scores_equal_the_pass_without_a_store_in_any_mix_order_and_batch(family: str, tmp_path: Path) -> None:
    changes = {"sliding_window": 160} if "sliding_window" in FAMILIES[family][1] else {}
    model = make_tiny_model(tmp_path / family, family, **changes)
    some = passages(24)
    assert index(tmp_path / "s", model, some[::2], dtype="fp32")["added"] == 12
    plain, with_store = reranker(model), reranker(model, store=tmp_path / "s")
    requests = []
    for seed in range(6):
        draw = random.Random(seed)
        chosen = draw.sample(some, draw.choice([2, 7, 24]))
        requests.append((f"how long does a flea live {seed}", documents_of(chosen)))
    requests.append(("another query", requests[0][1]))
    expected = plain.score_batch(requests)
    for batch_size in (1, 32):
        for one, other in zip(expected, with_store.score_batch(requests, batch_size=batch_size), strict=True):
            assert float(np.abs(one.scores - other.scores).max()) <= OF_A_LISTS_DEVIATION * float(one.scores.std())
            assert (one.num_tokens, one.is_shortened) == (other.num_tokens, other.is_shortened)


def test_int8_ranks_nearly_as_the_pass_without_a_store(model: Path, tmp_path: Path) -> None:
    some = passages(40)
    index(tmp_path / "s", model, some)
    expected, scores = (
        r.score("how long does a flea live", documents_of(some))
        for r in (reranker(model), reranker(model, store=tmp_path / "s"))
    )
    assert np.corrcoef(expected[:-1], scores[:-1])[0, 1] > 0.99


def test_added_passages_are_stored_once_and_found_by_others(model: Path, tmp_path: Path) -> None:
    some = passages(12)
    folder = tmp_path / "s"
    index(folder, model, some[:4])
    adding = reranker(model, store=folder, store_add=True)
    first = adding.score("flea months", documents_of(some))
    assert len(PassageStore(folder)) == 12
    assert np.array_equal(adding.score("flea months", documents_of(some)), first), (
        "scored from the store the first time, too"
    )
    with pytest.raises(InputError, match="another process is writing"):
        index(folder, model, some)
    adding.key_source.close()  # type: ignore[attr-defined]
    assert verify(folder) == (12, [])
    assert index(folder, model, [*some, *some])["added"] == 0
    assert np.array_equal(reranker(model, store=folder).score("flea months", documents_of(some)), first)


def test_a_reader_sees_what_another_process_adds(model: Path, tmp_path: Path) -> None:
    some = passages(6)
    index(tmp_path / "s", model, some[:2])
    reading = reranker(model, store=tmp_path / "s")
    index(tmp_path / "s", model, some)
    source = reading.key_source
    assert isinstance(source, StoredPassages) and source.missing(some) == []


def test_a_readout_on_a_subset_of_the_pairs_is_served_and_others_are_refused(model: Path, tmp_path: Path) -> None:
    some, every = passages(10), every_head()
    index(tmp_path / "s", model, some, dtype="fp32")
    fewer = heads_of_pairs(every, [(0, 1), (2, 0), (3, 1)], num_groups=2)
    options = {"dtype": "float32"}
    plain = HeadRankReranker.from_pretrained(model, fewer, **options)  # type: ignore[arg-type]
    options |= {"store": tmp_path / "s"}
    with_store = HeadRankReranker.from_pretrained(model, fewer, **options)  # type: ignore[arg-type]
    expected = plain.score("flea", documents_of(some))
    assert (
        np.abs(with_store.score("flea", documents_of(some)) - expected).max() <= OF_A_LISTS_DEVIATION * expected.std()
    )
    with pytest.raises(InputError, match="cannot add passages"):
        HeadRankReranker.from_pretrained(model, fewer, store_add=True, **options)  # type: ignore[arg-type]
    late = LateReader(AttentionReader.load(model, prompt=fewer.prompt), fewer)
    index_corpus(tmp_path / "few", late, lambda: some, IndexSettings())
    with pytest.raises(InputError, match="reads layer 0 group 0, .* and more, which the store does not hold"):
        reranker(model, store=tmp_path / "few")
    with pytest.raises(InputError, match="pairs, and .* others were asked for"):
        index(tmp_path / "few", model, some)


def test_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    index(tmp_path / "s", model, passages(5))
    other = make_tiny_model(tmp_path / "other", "llama", seed=9)
    with pytest.raises(InputError, match="this store cannot serve this reranker: the weights of other"):
        reranker(other, store=tmp_path / "s")


def test_what_pairs_can_be_asked_for() -> None:
    assert index_pairs("heads", [(1, 0), (2, 1)], 2, 4) == ((1, 0), (2, 1))
    assert index_pairs("all", [(1, 0), (2, 1)], 2, 4) == ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
    assert index_pairs("3:1,0:0", [(1, 0)], 2, 4) == ((0, 0), (3, 1))
    for wrong in ("4:0", "0:2", "x", "1:-1", ""):
        with pytest.raises(InputError, match="is not LAYER:GROUP"):
            index_pairs(wrong, [(1, 0)], 2, 4)
