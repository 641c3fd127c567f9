"""One notion of "still valid": digests, stamps, the reason why something is stale, folders that appear whole or not
at all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from headrank import artifacts
from headrank.artifacts import (
    Artifact,
    Stamp,
    atomic_folder,
    content_digest,
    describe_change,
    file_state,
    fingerprint,
    folder_states,
    model_fingerprint,
    sampled_digest,
)
from headrank.errors import InputError


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    (tmp_path / "qrels.txt").write_text("q1 0 d1 1\n")
    return Artifact(
        tmp_path / "out/pairs",
        tmp_path / "out/.study/pairs.json",
        {"depth": 20},
        (tmp_path / "qrels.txt",),
        "summary.json",
    )


def make(artifact: Artifact, seconds: float = 2.0) -> None:
    artifact.begin()
    artifact.path.mkdir(parents=True, exist_ok=True)
    (artifact.path / artifact.marker).write_text("{}")
    artifact.end(seconds)


def with_settings(artifact: Artifact, **settings: object) -> Artifact:
    return Artifact(artifact.path, artifact.stamp_path, settings, artifact.reads, artifact.marker)


def test_what_was_made_from_the_same_inputs_is_valid_and_says_how_long_it_took(artifact: Artifact) -> None:
    assert artifact.why_stale() == "not made yet"
    make(artifact)
    assert artifact.why_stale() is None
    assert artifact.stamp is not None and artifact.stamp.seconds == 2.0


def test_a_changed_setting_is_named_with_both_values(artifact: Artifact) -> None:
    make(artifact)
    assert with_settings(artifact, depth=40).why_stale() == "depth was 20, is 40"
    assert with_settings(artifact, depth=20, seed=1).why_stale() == "seed is new: 1"
    assert with_settings(artifact).why_stale() == "depth is not set any more (was 20)"
    assert with_settings(artifact, depth=30, seed=1).why_stale() == "depth was 20, is 30 (and 1 more)"


def test_a_changed_file_is_named_but_a_touched_one_is_not(artifact: Artifact) -> None:
    make(artifact)
    os.utime(artifact.reads[0], (1, 1))
    assert artifact.why_stale() is None
    artifact.reads[0].write_text("q1 0 d1 2\n")
    assert artifact.why_stale() == f"{artifact.reads[0]} changed"
    artifact.reads[0].unlink()
    assert artifact.why_stale() == f"{artifact.reads[0]} is gone"


def test_what_was_begun_is_continued_and_what_others_made_is_removed(artifact: Artifact) -> None:
    artifact.begin()
    artifact.path.mkdir(parents=True)
    (artifact.path / "half").touch()
    artifact.end(3.0, is_complete=False)
    assert artifact.why_stale() == "begun, not finished"
    artifact.begin()
    assert (artifact.path / "half").exists()
    artifact.end(1.0, is_complete=False)
    assert artifact.stamp is not None and artifact.stamp.seconds == 4.0, "the time of all attempts"
    with_settings(artifact, depth=40).begin()
    assert not artifact.path.exists()


def test_what_nobody_stamped_is_left_alone(artifact: Artifact) -> None:
    artifact.path.mkdir(parents=True)
    assert artifact.why_stale() == "was not made by this command"
    with pytest.raises(InputError, match="pairs: is there and was not made by this command"):
        artifact.begin()
    assert artifact.path.exists()


def test_without_the_file_that_is_written_last_it_is_not_valid(artifact: Artifact) -> None:
    make(artifact)
    (artifact.path / artifact.marker).unlink()
    assert artifact.why_stale() == f"{artifact.path / artifact.marker} is gone"


def test_a_stamp_cut_short_by_a_crash_counts_as_none(artifact: Artifact) -> None:
    make(artifact)
    artifact.stamp_path.write_text(artifact.stamp_path.read_text()[:40])
    assert Stamp.read(artifact.stamp_path) is None
    assert Stamp.read(artifact.path) is None


def test_equal_values_have_equal_fingerprints_whatever_the_order_of_keys() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})
    assert len(fingerprint({})) == 16
    assert describe_change({"a": {"b": 1}}, {"a": {"b": 1}}) is None


def test_the_digest_of_a_small_file_is_that_of_its_content_and_a_large_one_goes_by_size_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"0123456789")
    assert content_digest(path) == hashlib.sha256(b"0123456789").hexdigest()[:16] == file_state(path)
    monkeypatch.setattr(artifacts, "SMALL_FILE", 9)
    before = file_state(path)
    os.utime(path, (1, 1))
    assert file_state(path) != before
    assert file_state(tmp_path / "nothing") == "missing"


def test_a_folder_is_its_files_without_hidden_ones(tmp_path: Path) -> None:
    (tmp_path / "a/.cache").mkdir(parents=True)
    (tmp_path / "a/one").write_text("1")
    before = file_state(tmp_path / "a")
    (tmp_path / "a/.cache/x").write_text("hidden")
    assert file_state(tmp_path / "a") == before
    assert list(folder_states(tmp_path / "a")) == ["one"]
    (tmp_path / "a/two").write_text("2")
    assert file_state(tmp_path / "a") != before


def test_a_model_is_known_again_after_a_copy_and_told_from_a_trained_one(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    weights = bytearray(os.urandom(10 * (1 << 20)))
    (model / "model.safetensors").write_bytes(weights)
    shutil.copytree(model, tmp_path / "elsewhere/copy")
    assert model_fingerprint(model) == model_fingerprint(tmp_path / "elsewhere/copy")
    (model / "model.safetensors").write_bytes(bytes(byte ^ 1 for byte in weights))
    assert model_fingerprint(model) != model_fingerprint(tmp_path / "elsewhere/copy")
    assert model_fingerprint("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_sampled_digest_reads_a_file_of_one_block_completely(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a" * 1000)
    before = sampled_digest([tmp_path / "x"])
    (tmp_path / "x").write_bytes(b"a" * 999 + b"b")
    assert sampled_digest([tmp_path / "x"]) != before


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    output = tmp_path / "model"
    with atomic_folder(output) as folder:
        (folder / "one").write_text("1")
        assert not output.exists()
    assert (output / "one").read_text() == "1"
    with pytest.raises(FileNotFoundError), atomic_folder(output) as folder:
        (folder / "gone/two").write_text("2")
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing half-written is left"
    assert [path.name for path in output.iterdir()] == ["one"], "what had the name stays"
