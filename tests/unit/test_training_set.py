"""Training samples: every pair once an epoch, the same for the same seed, resumable, sharded, cached by what
matters.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools import array_folder, token_cache
from data_tools.training_set import Sample, TrainingSet
from headrank.errors import InputError
from headrank.formats import write_jsonl
from headrank.method.prompt import PromptTemplate
from headrank.method.spans import PromptEncoder
from megatron_patches.training.held_out import held_out_samples
from tests.tiny_models import tiny_tokenizer
from tests.toy_collections import GRADES, write_training_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_training_files(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(tiny_tokenizer(), PromptTemplate())


def seen_pairs(samples: list[Sample]) -> Counter[tuple[str, int, int]]:
    """Pairs by context and retrieval ranks, whatever the order in the prompt."""
    return Counter(
        (s.context_id, int(s.retrieval_ranks[a]), int(s.retrieval_ranks[b])) for s in samples for a, b in s.pairs
    )


def all_pairs() -> Counter[tuple[str, int, int]]:
    return Counter(
        (context_id, i + 1, j + 1)
        for context_id, listed in GRADES.items()
        for i, high in enumerate(listed)
        for j, low in enumerate(listed)
        if high is not None and low is not None and high - low == 1
    )


def epoch_of(training_set: TrainingSet, epoch: int) -> list[Sample]:
    return [training_set.sample(epoch, index) for index in range(len(training_set))]


def assert_equal_samples(one: Sample, other: Sample) -> None:
    assert (one.context_id, one.query_id, one.permutation) == (other.context_id, other.query_id, other.permutation)
    for name in ("retrieval_ranks", "grades", "pairs"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(one.encoded.input_ids, other.encoded.input_ids)


@pytest.mark.parametrize("pairs_per_context", [1, 2, 3, 16])
@pytest.mark.parametrize("permutations", [0, 3])
def test_an_epoch_of_pairs_shows_every_pair_exactly_once(
    folder: Path, encoder: PromptEncoder, pairs_per_context: int, permutations: int
) -> None:
    training_set = TrainingSet(folder, encoder, pairs_per_context, permutations=permutations)
    sizes = [sum(1 for pair in all_pairs() if pair[0] == context_id) for context_id in GRADES]
    assert len(training_set) == sum(-(-size // pairs_per_context) for size in sizes)
    for epoch in (0, 1):
        samples = epoch_of(training_set, epoch)
        assert seen_pairs(samples) == all_pairs()
        assert all(1 <= len(sample.pairs) <= pairs_per_context for sample in samples)
        by_context = {name: [len(s.pairs) for s in samples if s.context_id == name] for name in GRADES}
        assert all(max(lengths) - min(lengths) <= 1 for lengths in by_context.values())


def test_one_pair_a_context_is_the_papers_pair_by_pair(folder: Path, encoder: PromptEncoder) -> None:
    training_set = TrainingSet(folder, encoder, pairs_per_context=1)
    assert len(training_set) == training_set.num_pairs == sum(all_pairs().values())


def test_an_epoch_of_contexts_shows_every_context_once_and_enough_epochs_every_pair_once(
    folder: Path, encoder: PromptEncoder
) -> None:
    training_set = TrainingSet(folder, encoder, pairs_per_context=2, epoch="contexts")
    assert len(training_set) == len(GRADES)
    for epoch in range(3):
        assert sorted(sample.context_id for sample in epoch_of(training_set, epoch)) == sorted(GRADES)
    wanted = [pair for pair in all_pairs() if pair[0] == "b/q3"]
    epochs = -(-len(wanted) // 2)
    samples = [
        sample for epoch in range(epochs) for sample in epoch_of(training_set, epoch) if sample.context_id == "b/q3"
    ]
    assert seen_pairs(samples) == Counter(wanted)


def test_samples_describe_the_list_in_prompt_order(folder: Path, encoder: PromptEncoder) -> None:
    training_set = TrainingSet(folder, encoder, permutations=2, with_retriever_order=True)
    assert training_set.permutation_ids == (0, 1, 2)
    for context, (context_id, listed) in enumerate(GRADES.items()):
        query_id = context_id.split("/")[1]
        for permutation in training_set.permutation_ids:
            sample = training_set.whole_context(context, permutation)
            order = sample.retrieval_ranks - 1
            assert sorted(order) == list(range(len(listed)))
            assert (permutation != 0) or (order == np.arange(len(listed))).all()
            assert sample.grades.tolist() == [-1 if listed[i] is None else listed[i] for i in order]
            assert seen_pairs([sample]) == Counter({pair: 1 for pair in all_pairs() if pair[0] == context_id})
            expected = encoder.encode(
                f"what is {query_id}", [("", f"passage number {i} of {query_id} about fleas") for i in order]
            )
            np.testing.assert_array_equal(sample.encoded.input_ids, expected.input_ids)
            for field in dataclasses.fields(expected):
                if field.name != "input_ids":
                    assert getattr(sample.encoded, field.name) == getattr(expected, field.name)


@pytest.mark.parametrize(
    ("options", "order"), [({}, 0), ({"permutations": 2}, 1), ({"permutations": 2, "with_retriever_order": True}, 1)]
)
def test_held_out_lists_are_read_in_their_first_shuffle_where_there_is_one(
    folder: Path, encoder: PromptEncoder, options: dict[str, Any], order: int
) -> None:
    samples = held_out_samples(TrainingSet(folder, encoder, **options), limit=None)
    assert [sample.permutation for sample in samples] == [order] * len(GRADES)


def test_a_reversed_template_puts_the_best_document_last(folder: Path) -> None:
    encoder = PromptEncoder(tiny_tokenizer(), PromptTemplate(order="reversed"))
    sample = TrainingSet(folder, encoder).whole_context(0, 0)
    assert sample.retrieval_ranks.tolist() == [5, 4, 3, 2, 1]


def test_the_seed_and_the_epoch_decide_the_samples_and_nothing_else_does(folder: Path, encoder: PromptEncoder) -> None:
    one, two = (TrainingSet(folder, encoder, 2, seed=5, permutations=2) for _ in range(2))
    epoch_of(two, 3)  # what was asked before must not matter
    for index in range(len(one)):
        assert_equal_samples(one.sample(1, index), two.sample(1, index))

    def order(training_set: TrainingSet, epoch: int) -> list[list[list[int]]]:
        return [sample.pairs.tolist() for sample in epoch_of(training_set, epoch)]

    assert order(one, 0) != order(one, 1)
    assert order(one, 0) != order(TrainingSet(folder, encoder, 2, seed=6, permutations=2), 0)


def test_orders_of_documents_do_not_depend_on_the_training_seed(folder: Path, encoder: PromptEncoder) -> None:
    one, two, other = (
        TrainingSet(folder, encoder, seed=seed, permutations=2, permutation_seed=orders)
        .whole_context(2, 1)
        .retrieval_ranks.tolist()
        for seed, orders in [(1, 0), (2, 0), (1, 9)]
    )
    assert one == two != other


def test_all_orders_of_a_context_take_their_turn(folder: Path, encoder: PromptEncoder) -> None:
    training_set = TrainingSet(folder, encoder, permutations=3, epoch="contexts")
    turns = {
        name: [s.permutation for epoch in range(3) for s in epoch_of(training_set, epoch) if s.context_id == name]
        for name in GRADES
    }
    assert all(sorted(turn) == [1, 2, 3] for turn in turns.values())


@pytest.mark.parametrize("unit", ["pairs", "contexts"])
def test_where_a_sample_is_from_is_known_without_assembling_it(folder: Path, encoder: PromptEncoder, unit: str) -> None:
    training_set = TrainingSet(folder, encoder, 2, permutations=3, epoch=unit)
    for index in range(4 * len(training_set)):
        sample = training_set.at(index)
        assert training_set.context_at(index) == (sample.context_index, sample.permutation)


def test_ranks_share_the_samples_and_a_resumed_job_sees_what_the_first_would_have(
    folder: Path, encoder: PromptEncoder
) -> None:
    training_set = TrainingSet(folder, encoder, 2)
    alone = list(islice(training_set.shard(0, 0, 1), 24))
    assert alone == list(range(24))
    four = [list(islice(training_set.shard(0, rank, 4), 6)) for rank in range(4)]
    assert [index for step in zip(*four, strict=True) for index in step] == alone
    resumed = [list(islice(training_set.shard(12, rank, 2), 6)) for rank in range(2)]
    assert sorted(resumed[0] + resumed[1]) == alone[12:]
    length = len(training_set)
    assert_equal_samples(training_set.at(length + 3), training_set.sample(1, 3))
    with pytest.raises(ValueError, match="rank 2"):
        next(training_set.shard(0, 2, 2))


def cache_names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache").iterdir() if path.is_dir()}


def test_the_cache_is_reused_and_changes_with_data_tokenizer_prompt_truncation_and_orders(tmp_path: Path) -> None:
    folder = write_training_files(tmp_path)
    tokenizer, template = tiny_tokenizer(), PromptTemplate()
    known: set[str] = set()

    def expect(new: bool, encoder: PromptEncoder, **options: int) -> None:
        before = len(known)
        TrainingSet(folder, encoder, **options)
        known.update(cache_names(folder))
        assert (len(known) > before) == new

    expect(True, PromptEncoder(tokenizer, template))
    expect(False, PromptEncoder(tokenizer, template))
    expect(False, PromptEncoder(tiny_tokenizer(), PromptTemplate()), pairs_per_context=1, seed=99)
    expect(True, PromptEncoder(tokenizer, template), permutations=2)
    expect(True, PromptEncoder(tokenizer, dataclasses.replace(template, max_words=3)))
    expect(True, PromptEncoder(tokenizer, dataclasses.replace(template, query_rows="instruction")))
    expect(True, PromptEncoder(tokenizer, template, max_length=400))
    expect(True, PromptEncoder(tokenizer, template, calibrate=False))
    other = tiny_tokenizer()
    other.add_tokens(["flea"])
    expect(True, PromptEncoder(other, template))
    framed = tiny_tokenizer()
    framed.chat_template = framed.chat_template.replace("assistant", "helper")
    expect(True, PromptEncoder(framed, template))
    write_training_files(tmp_path, {**GRADES, "b/q3": [1, 0]})
    expect(True, PromptEncoder(tokenizer, template))


def test_the_cache_can_live_elsewhere_and_is_mapped_not_loaded(
    folder: Path, encoder: PromptEncoder, tmp_path: Path
) -> None:
    training_set = TrainingSet(folder, encoder, permutations=7, cache_directory=tmp_path / "elsewhere")
    assert len([path for path in (tmp_path / "elsewhere").iterdir() if path.is_dir()]) == 1
    assert isinstance(training_set.cache.tokens, np.memmap)


def test_builders_that_start_together_build_one_cache(tmp_path: Path) -> None:
    folder = write_training_files(tmp_path)
    with ThreadPoolExecutor(4) as pool:  # each thread opens the lock file anew, as a process would
        lengths = set(
            pool.map(lambda _: len(TrainingSet(folder, PromptEncoder(tiny_tokenizer(), PromptTemplate()))), range(4))
        )
    assert len(lengths) == 1
    assert len(cache_names(folder)) == 1


def test_an_interrupted_build_leaves_no_cache(tmp_path: Path, encoder: PromptEncoder) -> None:
    folder = write_training_files(tmp_path)
    with open(folder / "pairs.jsonl", "a") as stream:
        stream.write("{broken\n")
    with pytest.raises(InputError, match=r"pairs\.jsonl:\d+: not JSON"):
        TrainingSet(folder, encoder)
    assert cache_names(folder) == set()


def is_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def is_read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize(
    ("place", "name", "fault", "reason"),
    [
        (token_cache, "_write_rows", is_full, "No space left on device"),
        (tempfile, "mkdtemp", is_read_only, "Read-only file system"),
    ],
    ids=["full", "read-only"],
)
def test_a_folder_that_cannot_hold_the_cache_is_named_in_one_line(
    tmp_path, monkeypatch, encoder, place, name, fault, reason
) -> None:
    folder = write_training_files(tmp_path)
    monkeypatch.setattr(place, name, fault)
    with pytest.raises(array_folder.UnwritableCache) as raised:
        TrainingSet(folder, encoder)
    expected = f"{folder}/cache: the token cache cannot be written ({reason}); make room or make the folder writable"
    assert str(raised.value) == expected and cache_names(folder) == set()


def test_a_finished_cache_is_used_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch, encoder: PromptEncoder
) -> None:
    folder = write_training_files(tmp_path)
    length = len(TrainingSet(folder, encoder))
    monkeypatch.setattr(Path, "mkdir", is_read_only)
    monkeypatch.setattr(tempfile, "mkdtemp", is_read_only)
    assert len(TrainingSet(folder, encoder)) == length


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context_id": "c/unknown"}, "is not in contexts.jsonl"),
        ({"chosen": "stranger"}, "document 'stranger' is not in context"),
        ({"chosen_grade": 7}, "has grade 7 here and"),
        ({"chosen_grade": 0, "rejected_grade": 0}, "is not above"),
        ({"rejected": 5}, "'rejected' is 5"),
    ],
)
def test_pairs_that_do_not_fit_their_contexts_are_named(
    tmp_path: Path, encoder: PromptEncoder, change: dict, words: str
) -> None:
    folder = write_training_files(tmp_path)
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    rows[-1] = {**rows[-1], **change}
    write_jsonl(folder / "pairs.jsonl", rows)
    with pytest.raises(InputError, match=r"pairs\.jsonl") as raised:
        TrainingSet(folder, encoder)
    assert words in str(raised.value)


def test_pairs_in_another_order_than_the_contexts_are_refused(tmp_path: Path, encoder: PromptEncoder) -> None:
    folder = write_training_files(tmp_path)
    lines = (folder / "pairs.jsonl").read_text().splitlines(keepends=True)
    (folder / "pairs.jsonl").write_text("".join(lines[::-1]))
    with pytest.raises(InputError, match="same order of contexts"):
        TrainingSet(folder, encoder)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"pairs_per_context": 0}, "at least 1"), ({"permutations": -1}, "permutations"), ({"epoch": "days"}, "days")],
)
def test_wrong_settings_are_refused(folder: Path, encoder: PromptEncoder, options: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        TrainingSet(folder, encoder, **options)
