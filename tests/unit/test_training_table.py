"""Training runs side by side, as a tuning or several seeds leave them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrank.commands import main


def write_log(folder: Path, *measured: tuple[int, float, float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"event": "train", "iteration": 1, "loss": 2.0}]
    rows += [
        {"event": "valid", "iteration": step, "ndcg@10": ndcg, "preference_accuracy": accuracy, "contexts": 3}
        for step, ndcg, accuracy in measured
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_are_listed_by_what_they_gained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path / "small", (0, 0.5, 0.6), (5, 0.7, 0.5), (10, 0.52, 0.65))
    write_log(tmp_path / "large", (0, 0.5, 0.6), (10, 0.55, 0.6))
    write_log(tmp_path / "unfinished", (0, 0.5, 0.6))
    assert main(["report", "--training", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[2:] == [
        "| large | 10 | 50.0 | 55.0 | +5.0 | 60.0 | 60.0 | +0.0 | 3 |",
        "| small | 10 | 50.0 | 52.0 | +2.0 | 60.0 | 65.0 | +5.0 | 3 |",
    ]
    assert (tmp_path / "out" / "training.md").read_text() == printed
    assert sorted(path.name for path in (tmp_path / "out/figures/training").glob("*.png")) == ["large.png", "small.png"]


@pytest.mark.parametrize(
    ("measured", "message"), [(None, "no metrics.jsonl"), ([(0, 0.5, 0.6)], "was evaluated twice")]
)
def test_folders_without_two_evaluations_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: list | None, message: str
) -> None:
    if measured is not None:
        write_log(tmp_path / "run", *measured)
    assert main(["report", "--training", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def change_log(log: Path, line: int, **changes: object) -> None:
    """Change fields of one line; None removes them."""
    rows = [json.loads(text) for text in log.read_text().splitlines()]
    rows[line - 1] = {name: value for name, value in {**rows[line - 1], **changes}.items() if value is not None}
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_was_not_finite_or_not_counted_is_left_out_visibly_and_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        write_log(tmp_path / name, (0, 0.5, 0.6), (10, 0.55, 0.6))
    change_log(tmp_path / "a" / "metrics.jsonl", 3, **{"ndcg@10": float("nan"), "contexts": None})
    assert main(["report", "--training", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| b | 10 | 50.0 | 55.0 | +5.0 | 60.0 | 60.0 | +0.0 | 3 |",
        "| a | 10 | 50.0 | - | - | 60.0 | 60.0 | +0.0 | - |",
    ]


@pytest.mark.parametrize("changes", [{"ndcg@10": "0.55"}, {"preference_accuracy": None}, {"ndcg@10": True}], ids=str)
def test_measures_of_different_steps_are_never_paired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict
) -> None:
    write_log(tmp_path, (0, 0.5, 0.6), (5, 0.5, 0.6), (10, 0.55, 0.6))
    change_log(tmp_path / "metrics.jsonl", 4, **changes)
    assert main(["report", "--training", str(tmp_path)]) == 2
    assert f"metrics.jsonl:4: '{next(iter(changes))}' is no number" in capsys.readouterr().err


def test_a_run_of_a_study_has_the_name_of_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("default/round-1/train", "lr-3e-5/round-1/train", "other/round-2/train"):
        write_log(tmp_path / folder, (0, 0.5, 0.6), (10, 0.55, 0.6))
    assert main(["report", "--training", str(tmp_path)]) == 0
    assert {line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[2:]} == {
        "default",
        "lr-3e-5",
        "other/round-2",
    }
