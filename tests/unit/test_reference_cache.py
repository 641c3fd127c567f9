"""The reference cache: computed once, shared over ranks, continued after a kill, refused when it belongs to
something else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from data_tools.training_set import TrainingSet
from headrank.artifacts import model_fingerprint
from headrank.errors import InputError
from headrank.method.heads import HeadSet
from headrank.method.prompt import PromptTemplate
from headrank.method.spans import PromptEncoder
from megatron_patches.training.reference import ReferenceScores, needed_contexts, reference_key
from tests.tiny_models import tiny_tokenizer
from tests.toy_collections import write_training_files

KEY = {"model": "a", "heads": [[1, 2]], "prompt": "p", "data": "d"}


@dataclass(frozen=True)
class FakeSample:
    context_id: str
    permutation: int = 0
    retrieval_ranks: tuple[int, ...] = (1, 2, 3, 4, 5)


SAMPLES = [FakeSample(f"q{number}", number % 2) for number in range(7)]


def score(sample: FakeSample) -> np.ndarray:
    return np.random.default_rng(int(sample.context_id[1:])).normal(size=5).astype(np.float32) / 7


def test_scores_come_back_bit_for_bit(tmp_path):
    ReferenceScores(tmp_path / "r.jsonl", KEY).compute(SAMPLES, score)
    again = ReferenceScores(tmp_path / "r.jsonl", KEY)
    assert all((again.of(sample) == score(sample)).all() for sample in SAMPLES)


def test_nothing_is_computed_twice(tmp_path):
    calls = []

    def counting(sample):
        calls.append(sample.context_id)
        return score(sample)

    ReferenceScores(tmp_path / "r.jsonl", KEY).compute(SAMPLES[:4], counting)
    ReferenceScores(tmp_path / "r.jsonl", KEY).compute(SAMPLES, counting)
    assert sorted(calls) == [sample.context_id for sample in SAMPLES]


@pytest.mark.parametrize("field", list(KEY))
def test_a_stale_key_is_refused_and_the_difference_named(tmp_path, field):
    ReferenceScores(tmp_path / "r.jsonl", KEY).compute(SAMPLES, score)
    with pytest.raises(InputError, match=f"another {field}"):
        ReferenceScores(tmp_path / "r.jsonl", {**KEY, field: "other"})


@pytest.mark.parametrize("killed_after", [0, 1, 3])
def test_a_killed_computation_goes_on_where_it_stopped(tmp_path, killed_after):
    def dying(sample):
        if sample is SAMPLES[killed_after]:
            raise KeyboardInterrupt
        return score(sample)

    with pytest.raises(KeyboardInterrupt):
        ReferenceScores(tmp_path / "r.jsonl", KEY).compute(SAMPLES, dying)
    with open(tmp_path / "r.jsonl.part-0", "a") as stream:
        stream.write('{"context_id": "q5", "permu')  # torn by SIGKILL
    again = ReferenceScores(tmp_path / "r.jsonl", KEY)
    assert len(again) == killed_after
    again.compute(SAMPLES, score)
    assert all((ReferenceScores(tmp_path / "r.jsonl", KEY).of(sample) == score(sample)).all() for sample in SAMPLES)
    assert not list(tmp_path.glob("*.part-*"))


def test_ranks_split_the_work_and_all_know_everything(tmp_path):
    first, second = (ReferenceScores(tmp_path / "r.jsonl", KEY) for _ in range(2))
    parts = []
    for rank, cache in enumerate((first, second)):
        own = {}
        cache.compute(
            SAMPLES,
            score,
            rank=rank,
            world_size=2,
            is_writer=False,
            gather=lambda mine, own=own: own.update(mine) or [mine],
        )
        parts.append(own)
    assert not parts[0].keys() & parts[1].keys()
    assert len(parts[0]) + len(parts[1]) == len(SAMPLES)


def test_ranks_that_read_at_different_moments_agree_on_what_is_missing(tmp_path):
    early = ReferenceScores(tmp_path / "r.jsonl", KEY)
    ReferenceScores(tmp_path / "r.jsonl", KEY).compute(SAMPLES[:3], score)
    late = ReferenceScores(tmp_path / "r.jsonl", KEY)
    known = [dict(early._scores), dict(late._scores)]
    for cache in (early, late):
        cache.share(lambda mine: known)
    entries = [(sample.context_id, sample.permutation) for sample in SAMPLES]
    assert [entry in early for entry in entries] == [entry in late for entry in entries] == [True] * 3 + [False] * 4


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "r.jsonl").write_text(json.dumps({"format": "headrank-reference/1", "key": KEY}) + "\n{torn")
    with pytest.raises(InputError, match="r.jsonl:2"):
        ReferenceScores(tmp_path / "r.jsonl", KEY)


@pytest.mark.parametrize(
    "header", [{}, {"format": "headrank-reference/1", "key": None}, {"format": "headrank-reference/1"}]
)
def test_a_file_of_another_kind_is_refused(tmp_path, header):
    (tmp_path / "r.jsonl").write_text(json.dumps(header) + "\n")
    with pytest.raises(InputError, match="r.jsonl:1.*delete it"):
        ReferenceScores(tmp_path / "r.jsonl", KEY)


GOOD = {"context_id": "q1", "permutation": 0, "scores": [0.5, -1]}


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"scores": scores}
            for scores in (None, "0.5", ["0.5"], [0.5, None], [0.5, float("nan")], [1e39], [[0.5]], [[1], [1, 2]])
        ),
        *({"context_id": None}, {"context_id": 7}, {"permutation": "0"}, {"permutation": True}, {"permutation": None}),
    ],
    ids=str,
)
def test_a_row_that_holds_no_finite_scores_is_named_and_not_used(tmp_path, change):
    lines = [
        {"format": "headrank-reference/1", "key": KEY},
        GOOD,
        {name: value for name, value in {**GOOD, **change}.items() if value is not None},
    ]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match=r"r.jsonl:3: .*delete the file"):
        ReferenceScores(tmp_path / "r.jsonl", KEY)


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    header = json.dumps({"format": "headrank-reference/1", "key": KEY}).encode()
    (tmp_path / "r.jsonl").write_bytes(header + b'\n{"context_id": "\xff\xfe"}\n')
    with pytest.raises(InputError, match="r.jsonl:2.*UTF-8"):
        ReferenceScores(tmp_path / "r.jsonl", KEY)
    (tmp_path / "r.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(InputError, match="r.jsonl:1"):
        ReferenceScores(tmp_path / "r.jsonl", KEY)


def test_a_folder_in_its_place_is_refused(tmp_path):
    (tmp_path / "r.jsonl").mkdir()
    with pytest.raises(InputError, match="r.jsonl: a folder"):
        ReferenceScores(tmp_path / "r.jsonl", KEY)


def test_scores_that_are_not_finite_are_known_to_the_run_and_never_written(tmp_path, caplog):
    cache = ReferenceScores(tmp_path / "r.jsonl", KEY)
    cache.compute(SAMPLES, lambda sample: score(sample) * (np.nan if sample is SAMPLES[2] else 1))
    assert np.isnan(cache.of(SAMPLES[2])).all() and "'q2' are not finite" in caplog.text
    assert len(ReferenceScores(tmp_path / "r.jsonl", KEY)) == len(SAMPLES) - 1


def test_scores_of_another_number_of_documents_are_refused(tmp_path):
    cache = ReferenceScores(tmp_path / "r.jsonl", KEY)
    cache.compute(SAMPLES, lambda sample: score(sample)[:4])
    with pytest.raises(InputError, match="4 scores of 'q1', which has 5 documents"):
        cache.of(SAMPLES[1])


def test_the_fingerprint_changes_with_any_block_and_any_name(tmp_path):
    (tmp_path / "w.bin").write_bytes(bytes(3_000_000))
    before = model_fingerprint(tmp_path)
    changed = bytearray(3_000_000)
    changed[2_000_000:2_500_000] = b"\x01" * 500_000  # training changes every tensor, not one byte
    (tmp_path / "w.bin").write_bytes(changed)
    assert model_fingerprint(tmp_path) != before
    (tmp_path / "w.bin").write_bytes(bytes(3_000_000))
    assert model_fingerprint(tmp_path) == before
    (tmp_path / "w.bin").rename(tmp_path / "v.bin")
    assert model_fingerprint(tmp_path) != before


def key_of(folder: Path, tokenizer: object, **options: int) -> dict:
    """The key of scores that a model in folder/model, which has no tokenizer of its own, gives with this tokenizer."""
    (folder / "model").mkdir(exist_ok=True)
    heads = HeadSet(((1, 2),), "headrank", "tiny", 4, 8)
    lists = TrainingSet(folder, PromptEncoder(tokenizer, PromptTemplate()), **options)
    return reference_key(str(folder / "model"), heads, lists, "fp32")


def test_another_tokenizer_or_chat_template_is_another_key_whatever_the_models_directory_holds(tmp_path):
    write_training_files(tmp_path)
    key = key_of(tmp_path, tiny_tokenizer())
    assert key_of(tmp_path, tiny_tokenizer()) == key
    ReferenceScores(tmp_path / "r.jsonl", key).compute(SAMPLES, score)
    other, framed = tiny_tokenizer(), tiny_tokenizer()
    other.add_tokens(["flea"])
    framed.chat_template = framed.chat_template.replace("assistant", "helper")
    for tokenizer, words in ((other, "another tokenizer;"), (framed, "another chat_frame;")):
        with pytest.raises(InputError, match=words):
            ReferenceScores(tmp_path / "r.jsonl", key_of(tmp_path, tokenizer))


@pytest.mark.parametrize(("kept", "is_refused"), [(None, False), (900, True)])
def test_a_setting_of_an_older_version_counts_unless_it_was_off(tmp_path, kept, is_refused):
    write_training_files(tmp_path)
    key = key_of(tmp_path, tiny_tokenizer())
    ReferenceScores(tmp_path / "r.jsonl", key | {"position_span": kept}).compute(SAMPLES, score)
    if not is_refused:
        assert len(ReferenceScores(tmp_path / "r.jsonl", key)) == len(SAMPLES)
        return
    with pytest.raises(InputError, match="another position_span"):
        ReferenceScores(tmp_path / "r.jsonl", key)


def test_scores_from_before_the_tokenizer_was_in_the_key_are_refused(tmp_path):
    write_training_files(tmp_path)
    key = key_of(tmp_path, tiny_tokenizer())
    old = {name: value for name, value in key.items() if name not in ("tokenizer", "chat_frame")}
    ReferenceScores(tmp_path / "r.jsonl", old).compute(SAMPLES, score)
    with pytest.raises(InputError, match="another tokenizer and chat_frame; delete the file"):
        ReferenceScores(tmp_path / "r.jsonl", key)


class FakeSet:
    """Three contexts in two orders, visited round and round."""

    num_contexts, permutation_ids = 3, (1, 2)

    def context_at(self, index: int) -> tuple[int, int]:
        return index % 3, 1 + index // 3 % 2


@pytest.mark.parametrize(("num_samples", "expected"), [(1, 1), (4, 4), (11, 6), (600, 6)])
def test_only_what_training_visits_is_scored_and_once(num_samples, expected):
    found = list(needed_contexts(FakeSet(), num_samples))
    assert len(found) == len(set(found)) == expected
