"""A study file: what it may say, and what a person is told about a mistake in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrank.errors import InputError
from headrank.experiments.study_file import merged, read_about, read_study

ROOT = Path(__file__).resolve().parents[2]
STUDY = """\
about: a toy
output: out
data:
  collections: [toy]
training:
  lr: 1e-4
  flags: {bf16: true}
runs:
  full: {}
  faster:
    training: {lr: 3e-4, flags: {headrank-beta: 0}}
benchmarks:
  toy: {collection: toy}
measure:
  rows:
    - {method: bm25}
"""


def write(folder: Path, text: str = STUDY) -> Path:
    (folder / "study.yaml").write_text(text)
    return folder / "study.yaml"


def refusal(path: Path, *changes: str) -> str:
    with pytest.raises(InputError) as caught:
        read_study(path, changes)
    assert "\n" not in str(caught.value), "one line"
    return str(caught.value)


def test_a_run_changes_what_it_names_and_shares_the_rest(tmp_path: Path) -> None:
    loaded = read_study(write(tmp_path))
    full, faster = (loaded.recipes[name].training for name in ("full", "faster"))
    assert full is not None and faster is not None
    assert (full.lr, faster.lr) == (1e-4, 3e-4)
    assert full.flags == {"bf16": True} and faster.flags == {"bf16": True, "headrank-beta": 0}
    assert loaded.recipes["full"].pairs == loaded.recipes["faster"].pairs


def test_seeds_are_runs_that_differ_in_their_seed(tmp_path: Path) -> None:
    loaded = read_study(write(tmp_path), ["runs={}", "seeds=[4, 7]"])
    assert {name: recipe.training and recipe.training.seed for name, recipe in loaded.recipes.items()} == {
        "seed-4": 4,
        "seed-7": 7,
    }


def test_a_study_cannot_be_changed_once_it_is_read(tmp_path: Path) -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError):
        read_study(write(tmp_path)).study.output = Path("elsewhere")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("  lr: 1e-4", "  learning_rate: 1e-4", 6, ["training", "learning_rate"]),
        ("  lr: 1e-4", "  seeed: 1", 6, ["seeed", "'seed'"]),
        ("  lr: 1e-4", "  lr: -1", 6, ["training.lr", "greater than 0", "-1"]),
        ("{bf16: true}", "{bff16: true}", 7, ["bff16", "'bf16'"]),
        ("{bf16: true}", "{lr: 1}", 7, ["'lr'", "setting of its own"]),
        ("method: bm25", "method: bm52", 16, ["bm52", "'bm25'"]),
        ("method: bm25", "method: core", 16, ["core", "needs heads"]),
        ("lr: 3e-4", "lrr: 3e-4", 11, ["lrr", "'lr'"]),
        ("collections: [toy]", "collections: []", 4, ["data.collections", "at least 1"]),
        ("about: a toy", "about: [a toy", 2, ["not YAML"]),
        ("about: a toy", "output: x", 2, ["'output' is a duplicate of", "study.yaml:1"]),
    ],
)
def test_a_mistake_is_one_line_with_its_place_and_the_nearest_name(
    tmp_path: Path, old: str, new: str, line: int, words: list[str]
) -> None:
    said = refusal(write(tmp_path, STUDY.replace(old, new, 1)))
    assert f"study.yaml:{line}:" in said, said
    assert not [word for word in words if word not in said], said


def test_a_mistake_in_set_is_said_of_set_and_not_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert refusal(path, "training.lrr=1").startswith("--set training.lrr=1: ")
    assert "KEY=VALUE" in refusal(path, "training.lr")
    assert "'training.lr' is a value" in refusal(path, "training.lr.x=1")


def test_set_is_the_last_word(tmp_path: Path) -> None:
    loaded = read_study(write(tmp_path), ["training.lr=1e-5", "benchmarks.toy.depths=[5, 10]"], output="elsewhere")
    assert loaded.recipes["full"].training and loaded.recipes["full"].training.lr == 1e-5
    assert loaded.study.benchmarks["toy"].depths == [5, 10] and loaded.study.output == Path("elsewhere")
    assert loaded.recipes["faster"].training and loaded.recipes["faster"].training.lr == 3e-4, (
        "a run's own setting wins over the recipe's"
    )


def test_a_folder_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, STUDY.replace("collections: [toy]", 'collections: ["${TOYS:-data}/toy", "${BOX}/toy"]'))
    monkeypatch.delenv("TOYS", raising=False)
    monkeypatch.delenv("BOX", raising=False)
    said = refusal(path)
    assert "BOX" in said and "export" in said
    monkeypatch.setenv("BOX", "/box")
    assert read_study(path).study.data.collections == [Path("data/toy"), Path("/box/toy")]


def test_a_file_that_is_not_there_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path)
    assert "did you mean" in refusal(tmp_path / "sudy.yaml") and "study.yaml" in refusal(tmp_path / "sudy.yaml")


def test_merging_replaces_lists_and_null_removes() -> None:
    base = {"a": {"x": 1, "y": [1, 2]}, "b": 3}
    assert merged(base, {"a": {"y": [3]}, "b": None}) == {"a": {"x": 1, "y": [3]}, "b": None}
    assert base == {"a": {"x": 1, "y": [1, 2]}, "b": 3}, "the base stays"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_study_of_the_project_can_be_planned(path: Path) -> None:
    from headrank.experiments.plan_study import plan_study

    planned = plan_study(read_study(path))
    assert planned.phases and read_about(path)
    assert len({phase.name for phase in planned.phases}) == len(planned.phases)
