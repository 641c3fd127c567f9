"""The benchmark matrix: what is planned, what is done again and what is not, and how it is split."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrank.commands import benchmark_run
from headrank.errors import InputError
from headrank.experiments.cell_jobs import CellGroup, CellSettings, rerank_job
from headrank.experiments.cells import find_cells
from headrank.experiments.matrix_plan import (
    MatrixBenchmark,
    MatrixCell,
    MatrixModel,
    find_heads,
    model_name,
    parse_shard,
    plan_cells,
)
from headrank.experiments.phases import Command, Phase
from headrank.experiments.processes import start
from headrank.formats import read_run, write_json, write_jsonl, write_run
from headrank.method.heads import HeadSet
from headrank.reranking.rerank_job import RerankJob, rerank
from tests.in_process import run_calls_here
from tests.result_cells import make_heads
from tests.tiny_models import make_tiny_model
from tests.toy_collections import make_collection


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    make_collection(tmp_path / "toy", {"1": [0, 2, None, 1], "2": [1, 0, 3, 0]})
    return tmp_path / "toy"


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    benchmark_run.add_arguments(parser)
    return parser.parse_args(list(words))


class FakeRerank:
    """Stands for the reranking of a job: reverses every list, and writes what the real one would. Can fail for one
    method.
    """

    def __init__(self, fails_on: str = "") -> None:
        self.jobs: list[RerankJob] = []
        self.fails_on = fails_on

    def __call__(self, job: RerankJob) -> None:
        self.jobs.append(job)
        for target in job.targets:
            if target.method == self.fails_on:
                raise InputError(f"{target.method}: broken")
            assert job.collection is not None and target.scores is not None and target.meta is not None
            lists, rows = {}, []
            for query_id, listed in read_run(Path(job.collection) / "run.bm25.txt").items():
                head = listed[: job.depth]
                lists[query_id] = sorted(((row.doc_id, float(row.rank)) for row in head), key=lambda pair: -pair[1])
                row = {
                    "query_id": query_id,
                    "doc_ids": [row.doc_id for row in head],
                    "scores": [float(row.rank) for row in head],
                }
                rows.append(row | {"ranks": [row.rank for row in head]})
            write_run(target.output, lists, "x")
            write_jsonl(target.scores, rows)
            facts = {"model": job.model, "method": target.method, "seconds_per_query": 0.25, "versions": {"torch": "2"}}
            write_json(target.meta, facts)


Run = Callable[..., tuple[int, list[RerankJob]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a matrix with a fake reranking; returns the exit code and the jobs that were done."""

    def run_matrix(words: Sequence[str], fails_on: str = "", **more: Any) -> tuple[int, list[RerankJob]]:
        fake = FakeRerank(fails_on)
        run_calls_here(monkeypatch, lambda call: call.function(*call.arguments, do=fake))
        return benchmark_run.run(parse(*words), **more), fake.jobs

    return run_matrix


def test_every_cell_is_a_directory_with_run_scores_and_metrics(collection: Path, tmp_path: Path, run: Run) -> None:
    output = tmp_path / "out"
    words = [
        "--models",
        "models/small",
        "--methods",
        "bm25",
        "icr",
        "--benchmarks",
        str(collection),
        "--output",
        str(output),
    ]
    code, jobs = run([*words, "--measures", "RR", "NDCG@10", "--depths", "4"])
    assert code == 0
    cells = {cell.method: cell for cell in find_cells(output)}
    assert {str(cell.path.relative_to(output)) for cell in cells.values()} == {
        "toy/top4-retriever/first-stage/bm25",
        "toy/top4-retriever/small/icr",
    }
    assert cells["bm25"].metrics["measures"] == pytest.approx(
        {"RR": (0.5 + 1.0) / 2 * 2 / 3, "nDCG@10": cells["bm25"].value("nDCG@10")}
    )
    assert (cells["icr"].model, cells["icr"].metrics["seconds_per_query"], cells["icr"].metrics["versions"]) == (
        "small",
        0.25,
        {"torch": "2"},
    )
    assert run([*words, "--name", "Paper-1B", "--methods", "icr"])[0] == 0
    assert (output / "toy/top40-retriever/Paper-1B/icr/metrics.json").is_file()
    with pytest.raises(InputError, match="there are 2 models"):
        run([*words, "--name", "one", "--models", "a", "b"])
    assert [row.grades for row in cells["icr"].scores()] == [(0, 2, None, 1), (1, 0, 3, 0)]
    assert (jobs[0].model, jobs[0].depth, [target.method for target in jobs[0].targets]) == ("models/small", 4, ["icr"])


def test_a_finished_cell_is_not_done_again(collection: Path, tmp_path: Path, run: Run) -> None:
    words = ["--models", "m", "--methods", "icr", "--benchmarks", str(collection), "--output", str(tmp_path / "out")]
    assert [len(run(given)[1]) for given in (words, words, [*words, "--restart"], words)] == [1, 0, 1, 0]


def test_a_finished_cell_is_measured_again_when_other_measures_are_asked_for(
    collection: Path, tmp_path: Path, run: Run
) -> None:
    words = ["--models", "m", "--methods", "icr", "--benchmarks", str(collection), "--output", str(tmp_path / "out")]
    run(words)
    _, again = run([*words, "--measures", "RR", "R@2"])
    assert not again
    (cell,) = find_cells(tmp_path / "out")
    assert list(cell.metrics["measures"]) == ["RR", "R@2"]
    assert cell.metrics["seconds_per_query"] == 0.25


def test_a_cell_that_cannot_be_measured_stops_nothing(
    collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Run
) -> None:
    make_collection(tmp_path / "other", {"7": [0, 1]})
    (tmp_path / "other" / "qrels.txt").write_text("elsewhere 0 x 1\n")
    names = [str(tmp_path / "other"), str(collection)]
    words = ["--models", "m", "--methods", "bm25", "icr", "--benchmarks", *names, "--output", str(tmp_path / "o")]
    assert run(words)[0] == 1
    assert [(cell.benchmark, cell.method) for cell in find_cells(tmp_path / "o")] == [("toy", "bm25"), ("toy", "icr")]
    assert "no judged query is in the run" in capsys.readouterr().out


def test_what_could_not_be_measured_is_not_begun(collection: Path, tmp_path: Path, run: Run) -> None:
    words = ["--models", "m", "--methods", "icr", "--benchmarks", str(collection), "--output", str(tmp_path / "o")]
    with pytest.raises(InputError, match="`depths` 0"):
        run([*words, "--depths", "4", "0"])
    with pytest.raises(InputError, match="`depths`: duplicate value 4"):
        run([*words, "--depths", "4", "4"])
    (collection / "qrels.txt").unlink()
    with pytest.raises(InputError, match=r"toy.*has no qrels\.txt"):
        run(words)
    assert not (tmp_path / "o").exists()


def test_a_failed_cell_stops_nothing_and_is_tried_again(collection: Path, tmp_path: Path, run: Run) -> None:
    heads = tmp_path / "heads.json"
    make_heads((1, 2), method="core").save(heads)
    words = [
        "--models",
        "m",
        "--methods",
        "core",
        "icr",
        "--benchmarks",
        str(collection),
        "--heads",
        str(heads),
        "--output",
        str(tmp_path / "o"),
    ]
    assert run(words, fails_on="core")[0] == 1
    assert [cell.method for cell in find_cells(tmp_path / "o")] == ["icr"]
    code, again = run(words)
    assert code == 0
    assert [(target.method, target.heads) for job in again for target in job.targets] == [("core", str(heads))]


def test_a_cell_begun_with_other_heads_is_refused(collection: Path, tmp_path: Path, run: Run) -> None:
    heads = tmp_path / "heads.json"
    words = [
        "--models",
        "m",
        "--methods",
        "core",
        "--benchmarks",
        str(collection),
        "--heads",
        str(heads),
        "--output",
        str(tmp_path / "o"),
    ]
    make_heads((1, 2), method="core").save(heads)
    run(words)
    make_heads((1, 3), method="core").save(heads)
    with pytest.raises(InputError, match=r"made with other settings \(.*heads.json changed\).*--restart"):
        run(words)


def test_another_model_at_the_same_place_is_not_the_one_that_was_measured(
    collection: Path, tmp_path: Path, run: Run
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"one")
    words = [
        "--models",
        str(model),
        "--methods",
        "icr",
        "--benchmarks",
        str(collection),
        "--output",
        str(tmp_path / "o"),
    ]
    run(words)
    (model / "model.safetensors").write_bytes(b"another")
    with pytest.raises(InputError, match=r"made with other settings \(.*model changed\).*--restart"):
        run(words)


def test_other_judgements_measure_a_finished_cell_again_without_reranking(
    collection: Path, tmp_path: Path, run: Run
) -> None:
    words = ["--models", "m", "--methods", "icr", "--benchmarks", str(collection), "--output", str(tmp_path / "o")]
    run(words)
    (before,) = find_cells(tmp_path / "o")
    qrels = (collection / "qrels.txt").read_text().splitlines()
    (collection / "qrels.txt").write_text("\n".join(line for line in qrels if not line.endswith(" 2")) + "\n")
    code, again = run(words)
    assert code == 0
    (after,) = find_cells(tmp_path / "o")
    assert not again
    assert after.metrics["measures"] != before.metrics["measures"]


def test_orders_and_depths_are_cells_of_their_own(collection: Path, tmp_path: Path, run: Run) -> None:
    words = [
        "--models",
        "m",
        "--methods",
        "bm25",
        "icr",
        "--benchmarks",
        str(collection),
        "--output",
        str(tmp_path / "o"),
    ]
    _, jobs = run(
        [*words, "--depths", "2", "4", "--orders", "retriever", "shuffled", "reversed", "--shuffle-seed", "7"]
    )
    assert len(find_cells(tmp_path / "o")) == 2 * (1 + 3)
    assert sum(job.shuffle == 7 for job in jobs) == 2
    assert sum(job.prompt.get("order") == "reversed" for job in jobs) == 2


def test_another_layout_of_documents_is_another_setting_of_a_cell(collection: Path, tmp_path: Path, run: Run) -> None:
    words = ["--models", "m", "--methods", "icr", "--benchmarks", str(collection), "--output", str(tmp_path / "o")]
    code, jobs = run(words)
    assert code == 0
    assert "document_layout" not in jobs[0].prompt
    with pytest.raises(InputError, match="how.document_layout is new: parallel"):
        _, jobs = run([*words, "--document-layout", "parallel"])
    code, jobs = run([*words, "--document-layout", "parallel", "--restart"])
    assert code == 0
    assert jobs[0].prompt["document_layout"] == "parallel"


def test_a_dry_run_does_nothing(collection: Path, tmp_path: Path, run: Run) -> None:
    words = [
        "--models",
        "m",
        "--methods",
        "icr",
        "--benchmarks",
        str(collection),
        "--output",
        str(tmp_path / "o"),
        "--dry-run",
    ]
    code, jobs = run(words)
    assert code == 0
    assert not jobs
    assert not (tmp_path / "o").exists()


def test_shards_cover_every_cell_once(collection: Path, tmp_path: Path, run: Run) -> None:
    words = [
        "--models",
        "a",
        "b",
        "--methods",
        "bm25",
        "icr",
        "--benchmarks",
        str(collection),
        "--output",
        str(tmp_path / "o"),
    ]
    done: list[str] = []
    for index in range(3):
        _, jobs = run([*words, "--shard", f"{index}/3"])
        done += [target.output for job in jobs for target in job.targets]
    assert len(done) == len(set(done)) == 2
    assert len(find_cells(tmp_path / "o")) == 3


def test_shards_come_from_the_flag_torchrun_or_slurm() -> None:
    assert parse_shard("1/4", {"RANK": "0", "WORLD_SIZE": "2"}) == (1, 4)
    assert parse_shard(None, {"RANK": "1", "WORLD_SIZE": "2"}) == (1, 2)
    assert parse_shard(
        None, {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_COUNT": "8"}
    ) == (2, 8)
    assert parse_shard(None, {}) == (0, 1)
    for gaps in (
        {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "3"},
        {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "3"},
    ):
        with pytest.raises(InputError, match=r"array of 2 tasks with gaps.*`shard` I/N or an array of 0-1"):
            parse_shard(None, {**gaps, "SLURM_ARRAY_TASK_MAX": "7", "SLURM_ARRAY_TASK_COUNT": "2"})
    with pytest.raises(InputError, match="I from 0 to N-1"):
        parse_shard("4/4", {})


@pytest.mark.parametrize(
    ("path", "name"),
    [("models/Qwen3-0.6B", "Qwen3-0.6B"), ("embedded", "embedded"), ("runs/demo/model", "demo"), ("hf", "hf")],
)
def test_a_model_is_called_by_the_part_of_its_path_that_says_something(path: str, name: str) -> None:
    assert model_name(path) == name


def test_two_models_of_one_name_are_refused_unless_their_seeds_differ(collection: Path) -> None:
    benchmark = MatrixBenchmark("toy", collection, 20, ("nDCG@10",))
    cells = plan_cells([MatrixModel("m", "x", 1), MatrixModel("m", "y", 2)], ["icr"], [benchmark], {})
    assert [cell.folder.name for cell in cells] == ["icr-seed1", "icr-seed2"]
    with pytest.raises(InputError, match="two cells would share toy/top20-retriever/m/icr.*study file"):
        plan_cells([MatrixModel("m", "x"), MatrixModel("m", "y")], ["icr"], [benchmark], {})


def test_heads_are_given_or_inside_the_model(tmp_path: Path) -> None:
    model = MatrixModel("m", str(tmp_path))
    assert find_heads(model, "core", {"core": "a.json"}) == "a.json"
    assert find_heads(model, "icr", {"core": "a.json"}) is None
    with pytest.raises(InputError, match=r"'headrank' on m needs heads.*select-heads --method entropy.*`heads`"):
        find_heads(model, "headrank", {})
    (tmp_path / "headrank.json").write_text("{}")
    assert find_heads(model, "headrank", {}) is None


def test_a_heads_file_is_for_the_method_that_it_was_selected_by(collection: Path, tmp_path: Path, run: Run) -> None:
    for selection in ("entropy", "core", "qr-ndcg", "readout"):
        make_heads((1, 2), method=selection).save(tmp_path / f"{selection}.json")
    words = ["--models", "m", "--benchmarks", str(collection), "--output", str(tmp_path / "o"), "--share-forward"]
    files = [str(tmp_path / f"{selection}.json") for selection in ("qr-ndcg", "core", "entropy")]
    _, jobs = run([*words, "--methods", "core", "headrank", "qr", "--heads", *files])
    assert {target.method: Path(target.heads or "").stem for target in jobs[0].targets} == {
        "core": "core",
        "headrank": "entropy",
        "qr": "qr-ndcg",
    }
    with pytest.raises(InputError, match=r"core.json.*for core, which is not among --methods headrank"):
        run([*words, "--methods", "headrank", "--heads", files[1]])
    with pytest.raises(InputError, match=r"readout.json.*entropy.json is for headrank too"):
        run([*words, "--methods", "headrank", "--heads", files[2], str(tmp_path / "readout.json")])


def test_registered_names_come_from_the_resolver(collection: Path, tmp_path: Path, run: Run) -> None:
    def resolver(name: str) -> MatrixBenchmark:
        return MatrixBenchmark(name, collection, 2, ("recall@2", "R@5"), "skip")

    words = ["--models", "m", "--methods", "icr", "--benchmarks", "hotpotqa", "--output", str(tmp_path / "o")]
    assert run(words, find_benchmark=resolver)[0] == 0
    (cell,) = find_cells(tmp_path / "o")
    assert (cell.benchmark, list(cell.metrics["measures"]), cell.condition) == (
        "hotpotqa",
        ["R@2", "R@5"],
        (2, "retriever"),
    )
    with pytest.raises(InputError, match="no such collection folder"):
        run(words)


def test_a_first_stage_has_no_row_where_the_run_is_anothers(collection: Path) -> None:
    benchmarks = [
        MatrixBenchmark("own", collection, 2, ("nDCG@10",), retriever="bm25"),
        MatrixBenchmark("hops", collection, 2, ("R@2",), retriever="colbertv2"),
        MatrixBenchmark("folder", collection, 2, ("nDCG@10",)),
    ]
    cells = plan_cells([], ["bm25", "colbertv2"], benchmarks, {})
    assert [(cell.benchmark.name, cell.method) for cell in cells] == [
        ("own", "bm25"),
        ("hops", "colbertv2"),
        ("folder", "bm25"),
        ("folder", "colbertv2"),
    ]


def test_a_phase_leaves_the_process_group_but_keeps_its_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "here",
        "MASTER_PORT": "1",
        "LOCAL_RANK": "3",
    }.items():
        monkeypatch.setenv(name, value)
    names = "['RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'LOCAL_RANK']"
    command = Command((sys.executable, "-c", f"import os; print([os.environ.get(name) for name in {names}])"))
    running = start(Phase("show", command, ()), tmp_path, 1, os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR))
    assert running.process.wait(timeout=60) == 0
    assert running.last_line() == "[None, None, None, '3']"


def test_only_restricts_rerank_and_measures_alike(collection: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "ids.txt").write_text("1\n")
    words = ["--models", "m", "--methods", "icr", "--benchmarks", str(collection), "--output", str(tmp_path / "o")]
    _, jobs = run([*words, "--only", str(tmp_path / "ids.txt")])
    (cell,) = find_cells(tmp_path / "o")
    assert set(cell.per_query("nDCG@10")) == {"1"}
    assert jobs[0].only == str(tmp_path / "ids.txt")


def test_bad_names_are_refused_before_anything_runs(collection: Path, tmp_path: Path, run: Run) -> None:
    base = ["--models", "m", "--benchmarks", str(collection), "--output", str(tmp_path / "o"), "--methods"]
    with pytest.raises(InputError, match="'magic' is not one of"):
        run([*base, "magic"])
    with pytest.raises(InputError, match="heads.json: no such file"):
        run([*base, "icr", "--heads", "heads.json"])
    with pytest.raises(InputError, match="no such collection folder"):
        run(["--models", "m", "--benchmarks", "nowhere/toy", "--output", "o", "--methods", "icr"])


def test_bm25_on_dl19_is_the_papers_row(shared_data: Path, tmp_path: Path, run: Run) -> None:
    words = ["--methods", "bm25", "--benchmarks", str(shared_data / "dl19"), "--output", str(tmp_path / "o")]
    assert run(words)[0] == 0
    (cell,) = find_cells(tmp_path / "o")
    assert round(100 * cell.value("nDCG@10"), 2) == 50.58


def test_a_shared_forward_is_one_rerank_for_all_attention_methods_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    make_collection(tmp_path / "toy", {"1": [0, 2, None, 1], "2": [1, 0, 3, 0]})
    heads = tmp_path / "heads.json"
    HeadSet(((0, 1), (2, 3)), "core", "tiny", 4, 8).save(heads)
    HeadSet(((1, 1), (2, 3)), "qr", "tiny", 4, 8).save(tmp_path / "qr.json")
    words = ["--models", str(folder), "--methods", "bm25", "icr", "core", "qr", "--benchmarks", str(tmp_path / "toy")]
    words += ["--heads", str(heads), str(tmp_path / "qr.json"), "--depths", "4", "--orders", "retriever", "shuffled"]
    done: list[RerankJob] = []

    def remember(job: RerankJob) -> None:
        done.append(job)
        rerank(job)

    run_calls_here(monkeypatch, lambda call: call.function(*call.arguments, do=remember))
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    assert benchmark_run.run(parse(*words, "--share-forward", "--output", str(shared))) == 0
    assert [len(job.targets) for job in done] == [3, 3], "one job per document order"
    assert benchmark_run.run(parse(*words, "--output", str(alone))) == 0
    assert len(done) == 2 + 6
    for cell in find_cells(alone):
        twin = json.loads((shared / cell.path.relative_to(alone) / "metrics.json").read_text())
        assert twin["measures"] == pytest.approx(cell.metrics["measures"])
    assert benchmark_run.run(parse(*words, "--share-forward", "--output", str(shared))) == 0
    assert len(done) == 8, "nothing is done again"


def test_a_published_prompt_reaches_the_job_with_the_benchmarks_own_instruction(
    collection: Path, tmp_path: Path
) -> None:
    def prompt(name: str, order: str = "retriever", **settings: object) -> Mapping[str, Any]:
        benchmark = MatrixBenchmark(name, collection, 40, ("nDCG@10",))
        cell = MatrixCell(MatrixModel("m", "m"), "icr", None, benchmark, 40, order)
        return rerank_job([cell], CellGroup((cell,), CellSettings(**settings), tmp_path)).prompt  # type: ignore[arg-type]

    assert prompt("dl19", prompt="icr") == {"order": "reversed", "query_rows": "instruction", "label_in_span": True}
    assert prompt("nq", prompt="icr")["instruction"].startswith("Please answer")
    assert prompt("dl19", prompt="icr", instruction="Read. ")["instruction"] == "Read. "
    assert prompt("dl19", prompt="core", order="reversed")["order"] == "reversed" and prompt("dl19") == {}
