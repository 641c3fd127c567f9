"""Benchmarks of speed and number formats: their arithmetic on made-up times, and their own yardsticks. No seconds
are asserted.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import int8_ways, late_speed, number_formats, start_up
from headrank.reranking.decoder import Projection
from headrank.reranking.reader import AttentionReader
from tests.tiny_models import make_tiny_model


def test_differences_are_paired_by_query_and_collection() -> None:
    values = {
        "float32": {"a/1": 0.5, "a/2": 0.7, "b/1": 0.2},
        "int8": {"a/1": 0.6, "a/2": 0.7, "b/1": 0.1},
    }
    rows = {(row["row"], row["collection"]): row for row in number_formats.table(values, ["a", "b"])}
    assert rows["int8", "a"]["ndcg"] == pytest.approx(65.0) and rows["int8", "a"]["change"] == pytest.approx(5.0)
    low, high = rows["int8", "a"]["interval"]
    assert low >= 0.0 and high <= 10.0 + 1e-9
    assert rows["int8", "b"]["change"] == pytest.approx(-10.0) and rows["float32", "b"]["change"] == 0.0


def test_every_format_stands_against_its_own_floor_and_float32(capsys: pytest.CaptureFixture[str]) -> None:
    ways = {"float32": 6.0, "floor-float32": 4.0, "int8": 2.0, "floor-int8": 1.0}
    late_speed.show({"20": {name: [[cpu, cpu]] for name, cpu in ways.items()}})
    printed = capsys.readouterr().out
    assert (
        "float32 / its floor 1.50" in printed
        and "int8 / its floor 2.00" in printed
        and "float32 / int8 3.00 (goal 2)" in printed
    )


def test_all_contenders_see_all_passages_in_every_round() -> None:
    seen: list[tuple[str, int]] = []
    ways = {name: (lambda some, name=name: seen.append((name, len(some)))) for name in ("one", "other")}
    found = late_speed.measure(ways, list("abcd"), [2, 4], rounds=2)
    assert seen[2:] == [("one", 2), ("other", 2)] * 2 + [("one", 4), ("other", 4)] * 2
    assert {size: {name: len(rounds) for name, rounds in of_size.items()} for size, of_size in found.items()} == {
        size: {"one": 2, "other": 2} for size in ("2", "4")
    }


def test_the_floor_of_a_start_runs_on_a_model_of_the_embedded_kind(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "llama")
    start_up.write_collection(tmp_path)
    command = [
        sys.executable,
        "-c",
        start_up.FLOOR,
        str(tmp_path / "input.json"),
        str(tmp_path / "model"),
        "2",
        "float32",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_stand_in_with_linear_modules_computes_what_the_decoder_does(tmp_path: Path) -> None:
    decoder = AttentionReader.load(make_tiny_model(tmp_path, "llama"), device="cpu", dtype="float32").model
    decoder.attend = int8_ways.attend
    other = int8_ways.WithLinear(decoder)
    assert not any(isinstance(module, Projection) for module in other.modules())
    ids, positions = torch.tensor([[5, 9, 2, 7]]), torch.arange(4)[None]
    with torch.inference_mode():
        assert torch.equal(other(ids, positions), decoder(ids, positions))
