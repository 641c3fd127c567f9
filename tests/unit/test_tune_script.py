"""launch/tune.sh with a stand-in for python: rows that are finished on the same data are not run again."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.launcher_stand_in import ROOT, Pipeline


class TestTuning:
    """launch/tune.sh with the same stand-in."""

    def run(self, pipeline: Pipeline, rows: str, **variables: str) -> tuple[int, list[str], str]:
        (pipeline.folder / "rows.tsv").write_text(rows)
        settings = {"SETTINGS": str(pipeline.folder / "rows.tsv"), "VALID_QUERIES": str(pipeline.folder / "held.qids")}
        return pipeline.run(script="tune.sh", **{**settings, **variables})

    def test_rows_run_once_and_a_changed_row_again(self, pipeline):
        code, made, _ = self.run(pipeline, "a\t--lr 1e-4\n# no row\nb\t")  # no line end after the last
        assert (code, made) == (0, ["pairs", "pairs", "select-heads", "pretrain_headrank.py", "pretrain_headrank.py", "report"])
        assert self.run(pipeline, "a\t--lr 1e-4\nb\t\n")[1] == ["report"]
        assert self.run(pipeline, "a\t--lr 2e-4\nb\t\n")[1] == ["pretrain_headrank.py", "report"]
        assert "--lr 2e-4" in pipeline.calls.read_text()
        assert self.run(pipeline, "b\t\n", ITERATIONS="9")[1] == ["pretrain_headrank.py", "report"]

    def test_rows_on_other_pairs_lists_or_heads_are_run_again_with_reference_scores_of_their_own(self, pipeline):
        def cache() -> str:
            return re.findall(r"--headrank-reference-cache (\S+)", pipeline.calls.read_text())[0]

        train = pipeline.folder / "train.qids"
        train.write_text("q2\n")
        given = {"TRAIN_QUERIES": str(train)}
        self.run(pipeline, "a\t\n", **given)
        caches = [cache()]
        for variable, value, steps in (
            ("PAIRS_FLAGS", "--depth 7", ["pairs", "select-heads"]),
            ("VALID_FLAGS", "--depth 7", ["pairs"]),
            ("FOUND", "other heads", ["select-heads"]),
        ):
            given[variable] = value
            if variable == "FOUND":
                (pipeline.output / "heads.json").unlink()
            (pipeline.output / "rows/a/state").write_text("of the old data")
            assert self.run(pipeline, "a\t\n", **given)[1] == [*steps, "pretrain_headrank.py", "report"], variable
            assert (pipeline.output / "rows/a/state").read_text() == ""
            caches.append(cache())
            assert self.run(pipeline, "a\t\n", **given)[1] == ["report"]
        assert len(set(caches)) == 4
        train.write_text("q3\n")
        assert self.run(pipeline, "a\t\n", **given)[1] == ["pairs", "select-heads", "report"], (
            "the stand-in's pairs are the same, and so are the rows"
        )

    def test_an_unfinished_row_begins_anew_because_its_checkpoint_has_no_optimizer(self, pipeline):
        self.run(pipeline, "a\t\n", STOP_EARLY="1")
        (pipeline.output / "rows/a/state").write_text("a checkpoint")
        assert self.run(pipeline, "a\t\n")[1] == ["pretrain_headrank.py", "report"]
        assert (pipeline.output / "rows/a/state").read_text() == ""

    def test_the_examples_in_the_header_work(self):
        header = (ROOT / "launch/tune.sh").read_text().split("set -euo pipefail")[0]
        examples = [line.removeprefix("#   ") for line in header.splitlines() if line.startswith("#   ")]
        assert len(examples) == 2
        clean = {name: value for name, value in os.environ.items() if name not in ("VALID_QUERIES", "SETTINGS")}
        for example in examples:
            done = subprocess.run(
                ["bash", "-c", example], cwd=ROOT, env={**clean, "DRY_RUN": "1"}, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0 and "pretrain_headrank.py" in done.stdout, done.stderr

    @pytest.mark.parametrize(
        ("rows", "variables", "words"),
        [
            ("a --seed 3\n", {}, "a tab parts it from its flags"),
            ("../evil\t\n", {}, "'../evil' is no name"),
            ("a\t\na\t--lr 1\n", {}, "'a' is there twice"),
            ("# nothing\n", {}, "no rows"),
            ("a\t\n", {"JOBS": "0"}, "JOBS '0' is not a whole number"),
            ("a\t\n", {"ITERATIONS": "abc"}, "ITERATIONS 'abc' is not a whole number"),
            ("a\t\n", {"VALID_QUERIES": ""}, "VALID_QUERIES is missing"),
            ("a\t\n", {"COLLECTION": "nowhere"}, "no queries.tsv there"),
        ],
    )
    def test_a_mistake_is_one_line_before_anything_runs(self, pipeline, rows, variables, words):
        code, made, said = self.run(pipeline, rows, **variables)
        assert (code, made, len(said.splitlines())) == (2, [], 1) and words in said
