"""The store on disk: what was committed is found again, whatever happens to the process, and damage is named."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrank.errors import InputError
from headrank.method.prompt import PromptTemplate
from headrank.passage_store.content import passage_digest
from headrank.passage_store.header import HEADER_FILE, KeyIdentity, StoreHeader
from headrank.passage_store.records import RECORD, record_checks
from headrank.passage_store.segment import INDEX, KEYS, RECORDS, SEAL
from headrank.passage_store.store import SCALES_FILE, PassageStore, Scales, create_store, segment_folders
from headrank.passage_store.upkeep import prune, verify
from headrank.passage_store.writer import StoreWriter, recover_all, writing

PAIRS, SIZE = ((0, 1), (2, 0), (2, 1)), 4
LATE = PromptTemplate(opening="<user>", document_layout="late")


def make_store(folder: Path, dtype: str = "int8", pool: int = 1) -> Path:
    scales = Scales(np.full((len(PAIRS), SIZE), 0.5, np.float32), np.ones((len(PAIRS), SIZE), np.float32))
    prompt = {
        "opening": "<user>",
        "use_chat_template": True,
        "max_words": 300,
        "branch_position": 512,
        "document_layout": "late",
    }
    identity = KeyIdentity("tiny", "w", "none", "t", prompt, SIZE)
    create_store(folder, StoreHeader(identity, PAIRS, dtype, pool, scales=scales.digest), scales)
    return folder


def keys_of(number: int, num_tokens: int | None = None) -> np.ndarray:
    length = number % 5 if num_tokens is None else num_tokens
    return np.random.default_rng(number).integers(-127, 127, (len(PAIRS), length, SIZE), np.int8)


def digest_of(number: int) -> bytes:
    return passage_digest(("", f"passage {number}"))


def fill(folder: Path, numbers: range, segment_bytes: int = 2**32) -> None:
    with writing(folder), StoreWriter(folder, StoreHeader.read(folder), segment_bytes=segment_bytes) as writer:
        for number in numbers:
            writer.add(
                digest_of(number),
                keys_of(number),
                keys_of(number).shape[1],
                saturated=number % 2,
                is_shortened=number == 3,
            )
            if number % 10 == 9:
                writer.commit()


def assert_holds(folder: Path, numbers: range, others: range = range(1000, 1010)) -> None:
    store = PassageStore(folder)
    found = store.find([digest_of(number) for number in [*numbers, *others]])
    assert [entry is not None for entry in found] == [True] * len(numbers) + [False] * len(others)
    for number, entry in zip(numbers, found, strict=False):
        assert entry is not None and np.array_equal(entry.keys_ATD, keys_of(number))
        assert (entry.num_tokens, entry.is_shortened) == (number % 5, number == 3)


def test_what_is_written_is_found_and_nothing_else(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s")
    fill(store, range(57), segment_bytes=100)
    assert len(segment_folders(store)) > 3, "segments rotate"
    assert_holds(store, range(57))
    assert verify(store) == (57, [])
    summary = PassageStore(store).summary()
    assert (summary["passages"], summary["saturated"], summary["shortened"], summary["unsealed"]) == (57, 28, 1, 0)
    assert summary["key_bytes"] == sum(number % 5 for number in range(57)) * len(PAIRS) * SIZE == summary["tokens"] * 12


def test_a_store_grows_over_several_writers_and_readers_see_it_after_a_refresh(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "s")
    fill(folder, range(20))
    store = PassageStore(folder)
    kept = store.find([digest_of(4)])[0]
    fill(folder, range(20, 40))
    assert len(segment_folders(folder)) == 1, "a small segment is continued"
    assert store.find([digest_of(30)]) == [None]
    store.refresh()
    assert store.find([digest_of(30)])[0] is not None and len(store) == 40
    assert kept is not None and np.array_equal(kept.keys_ATD, keys_of(4)), "what a reader holds stays readable"
    assert_holds(folder, range(40))


def test_uncommitted_passages_are_invisible_and_committed_ones_are_not(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "s")
    with writing(folder):
        writer = StoreWriter(folder, StoreHeader.read(folder))
        writer.add(digest_of(1), keys_of(1), 1)
        assert PassageStore(folder).find([digest_of(1)]) == [None]
        writer.commit()
        writer.add(digest_of(2), keys_of(2), 2)
        assert [entry is not None for entry in PassageStore(folder).find([digest_of(1), digest_of(2)])] == [True, False]
        writer.close()
    assert_holds(folder, range(1, 3))


KILLED = """
import sys; sys.path.insert(0, {root!r})
from pathlib import Path
from tests.unit.test_passage_store import digest_of, keys_of
from headrank.passage_store.header import StoreHeader
from headrank.passage_store.writer import StoreWriter, writing
folder = Path({folder!r})
with writing(folder):
    writer = StoreWriter(folder, StoreHeader.read(folder), segment_bytes=4000)
    for number in range(10**9):
        writer.add(digest_of(number), keys_of(number), number % 5, is_shortened=number == 3)
        if number % 7 == 6:
            writer.commit()
            print(number + 1, flush=True)
"""


def test_a_writer_killed_at_any_moment_loses_nothing_committed_and_the_next_one_goes_on(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "s")
    code = KILLED.format(root=str(Path(__file__).resolve().parents[2]), folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(12)]
        time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        said += process.stdout.readlines()
    committed = int([line for line in said if line.endswith("\n")][-1])
    assert_holds(folder, range(committed))
    with writing(folder):
        recover_all(folder, StoreHeader.read(folder))
    assert verify(folder)[1] == []
    count = len(PassageStore(folder))
    assert count >= committed
    fill(folder, range(count, count + 20))
    assert_holds(folder, range(count + 20))


@pytest.mark.parametrize("cut", [1, RECORD.itemsize - 1, RECORD.itemsize, 3 * RECORD.itemsize + 5])
def test_a_torn_end_is_cut_off(tmp_path: Path, cut: int) -> None:
    folder = make_store(tmp_path / "s")
    fill(folder, range(20))
    segment = segment_folders(folder)[0]
    (segment / SEAL).unlink()
    records = (segment / RECORDS).read_bytes()
    (segment / RECORDS).write_bytes(records[:-cut])
    left = (len(records) - cut) // RECORD.itemsize
    assert_holds(folder, range(left), range(left, 20))
    fill(folder, range(left, 25))
    assert_holds(folder, range(25))
    assert verify(folder) == (25, [])


def test_damage_is_named_on_open_on_reading_or_by_verify_and_prune_keeps_the_rest(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "s")
    fill(folder, range(40))
    segment = segment_folders(folder)[0]
    raw = bytearray((segment / RECORDS).read_bytes())
    raw[4 * RECORD.itemsize + 17] ^= 1
    (segment / RECORDS).write_bytes(raw)
    with pytest.raises(InputError, match=r"record 5 is damaged; 'headrank index --prune'"):
        PassageStore(folder).find([digest_of(4)])
    with open(segment / KEYS, "r+b") as stream:
        stream.seek(-2, os.SEEK_END)
        stream.write(b"\x7e")
    count, damage = verify(folder)
    assert count == 38 and {line.what.split(":")[0] for line in damage} == {"passage 5 of 40", "passage 40 of 40"}
    with writing(folder):
        assert prune(folder) == (38, 2)
    assert verify(folder) == (38, [])
    assert_holds(folder, range(4))
    assert_holds(folder, range(5, 39), range(4, 5))
    os.truncate(segment_folders(folder)[0] / KEYS, 100)
    with pytest.raises(InputError, match="sealed with .* keys bytes, found 100"):
        PassageStore(folder)


def test_a_damaged_record_in_an_unsealed_segment_is_no_torn_end(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "s")
    fill(folder, range(10))
    segment = segment_folders(folder)[0]
    (segment / SEAL).unlink()
    raw = bytearray((segment / RECORDS).read_bytes())
    raw[2 * RECORD.itemsize] ^= 255
    (segment / RECORDS).write_bytes(raw)
    for work in (lambda: PassageStore(folder), lambda: fill(folder, range(10, 11))):
        with pytest.raises(InputError, match="record 3 is damaged"):
            work()
    with writing(folder):
        assert prune(folder) == (9, 1)
    assert verify(folder) == (9, [])


def test_prune_keeps_what_is_wanted_and_drops_what_is_there_twice(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "s")
    fill(folder, range(30), segment_bytes=150)
    fill(folder, range(25, 35))
    before = {segment.name for segment in segment_folders(folder)}
    with writing(folder):
        assert prune(folder) == (35, 5)
    assert before & {segment.name for segment in segment_folders(folder)}, "whole segments stay as they are"
    assert_holds(folder, range(35))
    with writing(folder):
        assert prune(folder, {digest_of(number) for number in range(10, 12)}) == (2, 33)
    assert_holds(folder, range(10, 12), range(12, 35))


def test_there_is_one_writer(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "s")
    with writing(folder):
        code = (
            "from pathlib import Path; from headrank.passage_store.writer import writing\nwith "
            f"writing(Path({str(folder)!r})): pass"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
        )
    assert "another process is writing to this store" in done.stderr
    with writing(folder):
        pass


def test_identity_differences_are_said_in_words(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "s")
    header = PassageStore(folder).header
    header.check_serves(dataclasses.replace(header.identity, model="a copy elsewhere"), PAIRS[:2], folder)
    changes: dict[str, Any] = {
        "weights": "x",
        "adapter": "x",
        "tokenizer": "x",
        "head_size": 8,
        "prompt": {**header.identity.prompt, "max_words": 64},
    }
    expected = ["weights of tiny", "adapter differs", "tokenizer differs", "head size is 8", "prompt's max_words is 64"]
    for (name, value), words in zip(changes.items(), expected, strict=True):
        with pytest.raises(InputError, match=words):
            header.check_serves(dataclasses.replace(header.identity, **{name: value}), PAIRS, folder)
    with pytest.raises(InputError, match="reads layer 1 group 0, which the store does not hold"):
        header.check_serves(header.identity, [(0, 1), (1, 0)], folder)
    assert header.places([(2, 1), (0, 1)]) == [2, 0]


def test_the_identity_of_a_model_follows_its_files_and_the_passages_part_of_the_prompt(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "tokenizer.json").write_text("{}")
    first = KeyIdentity.of(model, LATE, SIZE)
    assert first.difference(KeyIdentity.of(model, dataclasses.replace(LATE, instruction="another"), SIZE)) is None
    assert "max_words" in str(first.difference(KeyIdentity.of(model, dataclasses.replace(LATE, max_words=10), SIZE)))
    (model / "adapter_model.safetensors").write_bytes(b"adapter")
    assert "the adapter differs" in str(first.difference(KeyIdentity.of(model, LATE, SIZE)))
    (model / "model.safetensors").write_bytes(b"other weights")
    assert "the weights of model" in str(first.difference(KeyIdentity.of(model, LATE, SIZE)))


def test_the_identity_of_an_adapter_is_its_bases_and_its_own_files_wherever_they_lie(tmp_path: Path) -> None:
    for place in ("here", "there"):
        base, adapter = tmp_path / place / "base", tmp_path / place / "tuned"
        for folder in (base, adapter):
            folder.mkdir(parents=True)
        (base / "model.safetensors").write_bytes(b"weights")
        (base / "tokenizer.json").write_text("{}")
        (adapter / "adapter_model.safetensors").write_bytes(b"factors")
        (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "../base"}')
    here, there = (KeyIdentity.of(tmp_path / place / "tuned", LATE, SIZE) for place in ("here", "there"))
    assert here == there and here.model == "base with tuned" and str(tmp_path) not in str(here)
    assert "adapter differs" in str(KeyIdentity.of(tmp_path / "here" / "base", LATE, SIZE).difference(here))
    (tmp_path / "there" / "base" / "model.safetensors").write_bytes(b"other weights")
    assert "weights" in str(here.difference(KeyIdentity.of(tmp_path / "there" / "tuned", LATE, SIZE)))


def test_a_changed_header_or_lost_scales_are_refused(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "s")
    text = (folder / HEADER_FILE).read_text()
    (folder / HEADER_FILE).write_text(text.replace('"int8"', '"bf16"'))
    with pytest.raises(InputError, match="was changed after the store was made"):
        PassageStore(folder)
    (folder / HEADER_FILE).write_text(text)
    (folder / SCALES_FILE).unlink()
    with pytest.raises(InputError, match="scales.bin: missing or cut short"):
        PassageStore(folder)
    with pytest.raises(InputError, match="no passage store there"):
        PassageStore(tmp_path)
    with pytest.raises(InputError, match="there is a store already"):
        make_store(folder)


def test_an_index_that_does_not_fit_is_found_by_verify(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "s")
    fill(folder, range(12))
    index = segment_folders(folder)[0] / INDEX
    index.write_bytes(index.read_bytes()[::-1])
    assert "the index does not fit the records" in verify(folder)[1][0].what
    with writing(folder):
        assert prune(folder) == (12, 0)
    assert verify(folder) == (12, [])


def test_every_bit_of_a_record_enters_its_checksum() -> None:
    record = np.zeros(1, RECORD)
    checks = {int(record_checks(record)[0])}
    bits = (RECORD.itemsize - 8) * 8
    for bit in range(bits):
        raw = bytearray(record.tobytes())
        raw[bit // 8] ^= 1 << bit % 8
        checks.add(int(record_checks(np.frombuffer(bytes(raw), RECORD))[0]))
    assert len(checks) == bits + 1


def test_looking_at_a_store_needs_no_torch(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "s")
    fill(folder, range(5))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from headrank.passage_store.store import PassageStore; from headrank.passage_store.upkeep import verify\n"
        f"print(len(PassageStore({str(folder)!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.split() == ["5"]
