"""`headrank report`: the page of a run, the matrix's tables and figures, the head table."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

from headrank.commands import main
from headrank.errors import InputError
from headrank.evaluation.comparison import Settings
from headrank.evaluation.homogenisation import mean_middle_zone_std
from headrank.evaluation.promotion import promotion
from headrank.evaluation.published import FIGURE_BENCHMARKS
from headrank.experiments.cell_archive import write_archive
from headrank.experiments.cells import find_cells
from headrank.method.heads import HeadSet
from headrank.reports import figures
from headrank.reports.analyses import CellAnalyses
from headrank.reports.conditions import group_cells
from headrank.reports.contests import choose_challenger, compare_methods, label_cells, moved_most, verdict
from headrank.reports.training_curves import read_training_log
from tests.result_cells import make_cell, make_heads, make_matrix

BEFORE = ((11, 2), (11, 3), (16, 7), (21, 9))
AFTER = ((14, 14), (11, 3), (16, 13), (11, 2))


@pytest.fixture
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the drawing by a one-pixel picture; tests of the figures themselves are elsewhere. Collects what was
    asked for.
    """
    pixel = bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
        "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
    )
    drawn: list[str] = []

    def fake(name: str):
        def draw(*arguments: object, **named: object) -> list[Path]:
            path = next(argument for argument in [*named.values(), *arguments] if isinstance(argument, Path))
            path.parent.mkdir(parents=True, exist_ok=True)
            outputs = [path.parent / f"{path.name}.{ending}" for ending in ("png", "pdf")]
            for output in outputs:
                output.write_bytes(pixel)
            drawn.append(name)
            return outputs

        return draw

    for name in figures.__all__:
        monkeypatch.setattr(figures, name, fake(name))
    return drawn


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = make_matrix(tmp_path / "demo", benchmarks=("toy",), queries=30)
    make_heads(*BEFORE).save(folder / "heads.before.json")
    make_heads(*AFTER).save(folder / "heads.after.json")
    (folder / "train").mkdir()
    events = [{"event": "train", "iteration": step, "total": 1 / step, "accuracy": 0.5} for step in range(1, 5)]
    (folder / "train" / "metrics.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in events) + '{"event": "tra'
    )
    return folder


def test_the_run_page_answers_the_four_questions(
    run_folder: Path, quick_figures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--run", str(run_folder)]) == 0
    assert capsys.readouterr().out.split() == [
        str(run_folder / "report" / name) for name in ("report.md", "report.html", "report.json")
    ]
    markdown = (run_folder / "report" / "report.md").read_text()
    for question in (
        "Did it get better?",
        "Where?",
        "At what cost?",
        "Which heads?",
        "How did training go?",
        "How was this made?",
    ):
        assert f"## {question}" in markdown
    assert "**On toy, top 20, HeadRank is better than BM25: nDCG@10" in markdown
    assert "HeadRank is better than CoRe" in markdown
    assert "Shared heads: 2 of 4 (L11-H3, L11-H2)." in markdown
    assert "| 2 | L11-H3 | L11-H3 | ✓ |" in markdown
    assert "17 of 28" in markdown
    assert set(quick_figures) >= {
        "draw_measures",
        "draw_query_changes",
        "draw_promotion",
        "draw_position_curves",
        "draw_pareto",
        "draw_head_depth",
    }


def test_head_sets_are_found_where_the_pipeline_leaves_them(tmp_path: Path, quick_figures: list[str]) -> None:
    folder = make_matrix(tmp_path / "demo", benchmarks=("toy",))
    for name, heads in (("heads.json", BEFORE), ("round-1/heads.json", AFTER), ("round-2/heads.json", AFTER[::-1])):
        make_heads(*heads).save(folder / name)
    main(["report", "--run", str(folder)])
    markdown = (folder / "report" / "report.md").read_text()
    assert "Core heads, before and after round-1" in markdown
    assert "| 1 | L11-H2 | L11-H2 | ✓ |" in markdown


def test_the_run_page_names_the_query_that_moved_most(run_folder: Path, quick_figures: list[str]) -> None:
    main(["report", "--run", str(run_folder)])
    (contest,) = json.loads((run_folder / "report" / "report.json").read_text())["contests"]
    cells = {cell.method: cell.per_query("nDCG@10") for cell in find_cells(run_folder)}
    change = {query: cells["headrank"][query] - cells["bm25"][query] for query in cells["bm25"]}
    assert contest["moved_most"]["query_id"] == max(change, key=lambda query: abs(change[query]))
    assert contest["moved_most"]["change"] == pytest.approx(max(map(abs, change.values())))


def test_query_words_are_shown_and_escaped(run_folder: Path, quick_figures: list[str], tmp_path: Path) -> None:
    collection = tmp_path / "collection"
    collection.mkdir()
    (collection / "queries.tsv").write_text(
        "".join(f"q{number}\twhat is <b>{number}</b> | x\n" for number in range(1, 31))
    )
    main(["report", "--run", str(run_folder), "--collection", str(collection)])
    page = (run_folder / "report" / "report.html").read_text()
    assert "what is &lt;b&gt;" in page
    assert "<b>" not in page
    assert "&lt;b>" in (run_folder / "report" / "report.md").read_text()


def test_a_run_that_got_worse_is_called_worse(run_folder: Path, quick_figures: list[str]) -> None:
    main(["report", "--run", str(run_folder), "--challenger", "icr", "--measure", "NDCG@10"])
    assert "ICR is worse than CoRe" in (run_folder / "report" / "report.md").read_text()


def test_the_html_page_needs_nothing_else(run_folder: Path, quick_figures: list[str]) -> None:
    main(["report", "--run", str(run_folder)])
    page = (run_folder / "report" / "report.html").read_text()
    assert 'src="data:image/png;base64,' in page
    assert 'src="figures' not in page
    assert "<script" not in page


def test_the_matrix_is_rebuilt_byte_for_byte(tmp_path: Path, quick_figures: list[str]) -> None:
    folder = make_matrix(tmp_path / "matrix")
    outputs = []
    for name in ("one", "two"):
        assert main(["report", "--matrix", str(folder), "--output", str(tmp_path / name)]) == 0
        outputs.append(
            {path.relative_to(tmp_path / name): path.read_bytes() for path in sorted((tmp_path / name).rglob("*.*"))}
        )
    assert outputs[0] == outputs[1]
    names = {str(path) for path in outputs[0]}
    assert {
        f"tables/{table}_top_20.{ending}" for table in ("overview", "ndcg10") for ending in ("md", "tex", "csv")
    } <= names
    assert not any("multihop" in name or "ablation" in name for name in names)


def test_matrix_tables_show_ours_beside_the_papers_and_leave_the_rest_empty(
    tmp_path: Path, quick_figures: list[str]
) -> None:
    folder = make_matrix(tmp_path / "matrix")
    main(["report", "--matrix", str(folder)])
    rows = (folder / "report" / "tables" / "ndcg10_top_20.csv").read_text().splitlines()
    header = rows[0].split(",")
    paper = next(
        dict(zip(header, row.split(","), strict=True))
        for row in rows
        if row.startswith("paper (top 40),Qwen3-0.6B,HeadRank")
    )
    ours = next(
        dict(zip(header, row.split(","), strict=True)) for row in rows if row.startswith("ours,Qwen3-0.6B,HeadRank")
    )
    assert (paper["dl19 nDCG@10"], paper["average nDCG@10"]) == ("59.93", "44.56")
    assert ours["dl20 nDCG@10"] == ours["average nDCG@10"] == ""
    assert float(ours["dl19 nDCG@10"]) > 0
    main(["report", "--matrix", str(folder), "--no-published"])
    assert "paper" not in (folder / "report" / "tables" / "ndcg10_top_20.csv").read_text()


def test_the_matrix_page_tests_every_row_against_the_first_stage(tmp_path: Path, quick_figures: list[str]) -> None:
    folder = make_matrix(tmp_path / "matrix")
    assert main(["report", "--matrix", str(folder)]) == 0
    assert "| minus BM25 |" in (folder / "report" / "report.md").read_text()


def test_conditions_never_share_a_table(tmp_path: Path, quick_figures: list[str]) -> None:
    folder = make_matrix(tmp_path / "matrix", benchmarks=("dl19",))
    make_cell(folder, "Qwen3-0.6B", "icr", "dl19", order="shuffled")
    main(["report", "--matrix", str(folder)])
    shuffled = (folder / "report" / "tables" / "overview_top_20_shuffled.md").read_text()
    assert "ICR" in shuffled
    assert "BM25" in shuffled  # a first-stage run is the same in every order
    assert "HeadRank" not in shuffled
    assert "(paper" not in (folder / "report" / "tables" / "ndcg10_top_20_shuffled.md").read_text()


@pytest.mark.parametrize(("depth", "mark"), [(40, "(paper)"), (20, "(paper, top 40)")])
def test_numbers_of_another_depth_say_so_in_the_papers_tables(
    depth: int, mark: str, tmp_path: Path, quick_figures: list[str]
) -> None:
    folder = make_matrix(tmp_path / "matrix", benchmarks=("dl19",), depth=depth)
    main(["report", "--matrix", str(folder)])
    table = (folder / "report" / "tables" / f"ndcg10_top_{depth}.md").read_text()
    papers = [line.split("|")[2].strip() for line in table.splitlines() if line.startswith("|") and "(paper" in line]
    assert "*HeadRank " + mark + "*" in papers
    assert all(label.endswith(f" {mark}*") for label in papers)


def test_a_copy_of_a_cell_is_not_taken_for_a_seed(
    tmp_path: Path, quick_figures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_matrix(tmp_path / "matrix", benchmarks=("dl19",))
    cell = next(cell.path for cell in find_cells(folder) if cell.method == "headrank")
    shutil.copytree(cell, folder / "backup")
    assert main(["report", "--matrix", str(folder)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"headrank report: {folder / 'backup'} and {cell}: both are Qwen3-0.6B HeadRank on dl19")
    assert len(error.splitlines()) == 1


def test_rows_of_variants_models_and_seeds_keep_their_own_numbers(tmp_path: Path, quick_figures: list[str]) -> None:
    for model, method, seed in itertools.product(("trained", "other"), ("headrank", "headrank+trained"), (1, 2)):
        make_cell(tmp_path, model, method, "toy", seed=seed)
    main(["report", "--run", str(tmp_path)])
    cells = find_cells(tmp_path)
    markdown = (tmp_path / "report" / "report.md").read_text()
    table = markdown[markdown.index("| Method | Std |") :].split("\n\n")[0]
    shown = dict(line.strip("| ").split(" | ") for line in table.splitlines()[2:])
    assert shown == {label: f"{mean_middle_zone_std(cell.scores()):.3f}" for label, cell in label_cells(cells).items()}


def test_labels_name_the_seed_of_every_row_that_has_others(tmp_path: Path) -> None:
    for method, seed in (("headrank", 1), ("headrank", 2), ("headrank+trained", 1)):
        make_cell(tmp_path, "m", method, "toy", seed=seed)
    assert list(label_cells(find_cells(tmp_path))) == [
        "HeadRank, m, seed 1",
        "HeadRank, m, seed 2",
        "HeadRank (trained)",
    ]


def test_ablation_rows_make_the_ablation_table(tmp_path: Path, quick_figures: list[str]) -> None:
    folder = make_matrix(tmp_path / "matrix", benchmarks=("nq",))
    make_cell(folder, "Qwen3-0.6B", "headrank+no-prox", "nq")
    main(["report", "--matrix", str(folder)])
    table = (folder / "report" / "tables" / "ablation_top_20.md").read_text()
    assert "HeadRank (no-prox)" in table
    assert "*HeadRank (no-prox) (paper, top 40 and 20)*" in table
    assert "ICR" not in table


def test_heads_alone_give_the_papers_head_table(
    tmp_path: Path, quick_figures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, heads in (("a.json", BEFORE), ("b.json", AFTER)):
        make_heads(*heads).save(tmp_path / name)
    assert main(["report", "--heads", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert capsys.readouterr().out.split()[-1] == str(tmp_path / "report" / "heads.html")
    markdown = (tmp_path / "report" / "heads.md").read_text()
    assert "| Rank | before | after | Shared |" in markdown
    assert "| Shared |  |  | 2 / 4 |" in markdown
    assert "Depth band: layers 11-21 before, 11-16 after." in markdown
    latex = (tmp_path / "report" / "heads.tex").read_text()
    assert r"2 & L11-H3 & L11-H3 & \ding{51} \\" in latex
    assert quick_figures == ["draw_head_depth", "draw_head_map", "draw_head_map"]


def test_one_head_file_is_described_alone(tmp_path: Path, quick_figures: list[str]) -> None:
    make_heads(*BEFORE).save(tmp_path / "heads.json")
    assert main(["report", "--heads", str(tmp_path / "heads.json")]) == 0
    assert "| 1 | L11-H2 | 1 | 0.9 |" in (tmp_path / "report" / "heads.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --run DIR"),
        (["--run", "x", "--matrix", "y"], "give one of --run DIR"),
        (["--run", "nowhere"], "no such folder of results"),
        (["--matrix", "."], "no metrics.json in it or below"),
        (["--heads", "nowhere.json"], "no such file"),
        (["--matrix", ".", "--measure", "foo"], "--measure foo goes with --run DIR only"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measures": {}}, "no measure in it"),
        ({"measures": {"nDCG@10": "half"}}, "nDCG@10 is 'half', not a number"),
        ({"measures": {"nDCG@10": float("nan")}}, "nDCG@10 is nan, not a number"),
        ({"per_query": {"nDCG@10": {"q1": None}}}, "q1 is None, not a number"),
        ({"per_query": {"nDCG@10": [0.5]}}, "not a number"),
        ({"seconds_per_query": "fast"}, "seconds_per_query is 'fast', not a number"),
        ({"depth": "deep"}, "depth is 'deep', not a number"),
    ],
)
@pytest.mark.parametrize("kind", ["--run", "--matrix"])
def test_metrics_that_are_no_numbers_are_named(
    kind: str,
    change: dict,
    message: str,
    run_folder: Path,
    quick_figures: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = next(cell.path for cell in find_cells(run_folder) if cell.method == "icr") / "metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert main(["report", kind, str(run_folder)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"headrank report: {path}: ")
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_measure_that_no_result_has_is_named(
    run_folder: Path, quick_figures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--run", str(run_folder), "--measure", "MAP"]) == 2
    assert "--measure AP: no result has it, they have nDCG@10, R@5; evaluate" in capsys.readouterr().err
    assert not (run_folder / "report").exists()


def test_models_given_by_path_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    names = {
        "/home/me/.cache/smol-135M": "smol-135M",
        "runs/a/model": "a/model",
        "runs/b/model": "b/model",
        "Qwen/Qwen3-4B": "Qwen3-4B",
    }
    for place, model in enumerate(names):
        path = make_cell(tmp_path / str(place), "m", "icr", "toy") / "metrics.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))
    assert {cell.model for cell in find_cells(tmp_path)} == set(names.values())


def test_a_first_stage_costs_nothing_that_was_measured(run_folder: Path, quick_figures: list[str]) -> None:
    main(["report", "--run", str(run_folder)])
    markdown = (run_folder / "report" / "report.md").read_text()
    assert "| BM25 |  | 1500 |  |  |  |" in markdown
    assert "| ICR | 2.000 | 1500 | 0.88 | 17 of 28 | 100.0 |" in markdown


def test_an_unknown_challenger_lists_the_rows(
    run_folder: Path, quick_figures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--run", str(run_folder), "--challenger", "best"]) == 2
    assert "'best' is not among the results: BM25, ICR, CoRe, HeadRank" in capsys.readouterr().err


def test_a_challenger_that_one_contest_lacks_is_replaced_there_by_the_default(
    run_folder: Path, quick_figures: list[str]
) -> None:
    for method in ("bm25", "core", "headrank"):
        make_cell(run_folder, "Qwen3-0.6B" if method != "bm25" else "", method, "other")
    assert main(["report", "--run", str(run_folder), "--challenger", "icr"]) == 0
    contests = json.loads((run_folder / "report" / "report.json").read_text())["contests"]
    assert {contest["benchmark"]: contest["challenger"] for contest in contests} == {"other": "HeadRank", "toy": "ICR"}


def test_challenger_is_plain_headrank_before_its_variants(tmp_path: Path) -> None:
    for method in ("headrank", "headrank+control", "icr"):
        make_cell(tmp_path, "m", method, "toy")
    assert choose_challenger(label_cells(find_cells(tmp_path))) == "HeadRank"


def test_the_contest_is_seen_from_the_challengers_side(tmp_path: Path) -> None:
    contest = compare_methods(
        find_cells(make_matrix(tmp_path, benchmarks=("toy",))), "nDCG@10", settings=Settings(resamples=200)
    )
    pairing = contest.against("ICR")
    mine, theirs = (contest.comparison.evaluations[label].mean("nDCG@10") for label in ("HeadRank", "ICR"))
    assert pairing.difference == pytest.approx(mine - theirs)
    assert pairing.interval[0] <= pairing.difference <= pairing.interval[1]
    assert pairing.wins > pairing.losses
    assert verdict(pairing) == "better"
    assert moved_most(contest, "BM25") in contest.comparison.evaluations["BM25"].values["nDCG@10"]


def test_a_broken_line_in_the_middle_of_a_training_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"event": "train", "iteration": 1, "total": 2.0}\nnot json\n{"event": "valid", "iteration": 1, "ndcg@10": '
        "0.5}\n"
    )
    with pytest.raises(InputError, match=r"metrics.jsonl:2: not a line of a training log"):
        read_training_log(path)


def test_costs_count_only_benchmarks_that_every_reranker_has(tmp_path: Path) -> None:
    folder = make_matrix(tmp_path, benchmarks=("dl19", "nq"))
    make_cell(folder, "Qwen3-0.6B", "headrank+control", "dl19")  # has no nq
    cells = find_cells(folder)
    points, levels = CellAnalyses.by_model(cells).costs("nDCG@10")
    on_dl19 = {cell.method: cell.value("nDCG@10") for cell in cells if cell.benchmark == "dl19"}
    assert {point.method: point.value for point in points} == {
        method: value for method, value in on_dl19.items() if method != "bm25"
    }
    assert levels == {"bm25": on_dl19["bm25"]}


def test_promotion_and_costs_count_every_benchmark_once_however_many_seeds_it_has(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        make_cell(tmp_path, "m", "headrank", "dl19", seed=seed, seconds_per_query=float(seed))
    make_cell(tmp_path, "m", "headrank", "nfcorpus", seed=1, seconds_per_query=10.0)
    cells = find_cells(tmp_path)
    ((point,), _), rates = (
        CellAnalyses.by_model(cells).costs("nDCG@10"),
        CellAnalyses.by_model(cells).promotions()["m"]["headrank"],
    )

    def mean_of(values: dict[Path, float]) -> float:
        dl19 = [value for path, value in values.items() if "dl19" in path.parts]
        (nfcorpus,) = [value for path, value in values.items() if "nfcorpus" in path.parts]
        return (sum(dl19) / 3 + nfcorpus) / 2

    assert point.seconds == pytest.approx(6.0)
    assert point.value == pytest.approx(mean_of({cell.path: cell.value("nDCG@10") for cell in cells}))
    counted = {cell.path: promotion(cell.scores()) for cell in cells}
    relevant = mean_of({path: entry.relevant_rate for path, entry in counted.items()})
    irrelevant = mean_of({path: entry.irrelevant_rate for path, entry in counted.items()})
    assert rates == pytest.approx((relevant, irrelevant, relevant - irrelevant))


def test_heads_of_two_architectures_are_refused_before_anything_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    HeadSet(((0, 1),), "entropy", "small", 4, 8).save(tmp_path / "small.json")
    HeadSet(((0, 1),), "entropy", "large", 6, 8).save(tmp_path / "large.json")
    arguments = [
        "--heads",
        str(tmp_path / "small.json"),
        str(tmp_path / "large.json"),
        "--output",
        str(tmp_path / "report"),
    ]
    assert main(["report", *arguments]) == 2
    assert "cannot be compared" in capsys.readouterr().err and not (tmp_path / "report").exists()


def test_benchmarks_at_their_own_depths_share_the_papers_tables(tmp_path: Path, quick_figures: list[str]) -> None:
    for name, depth in (("nq", 40), ("fiqa", 40), ("2wiki", 20), ("hotpotqa", 20)):
        make_matrix(tmp_path / "matrix", benchmarks=(name,), depth=depth)
        make_cell(tmp_path / "matrix", "Qwen3-0.6B", "headrank+no-prox", name, depth=depth)
    main(["report", "--matrix", str(tmp_path / "matrix")])
    tables = tmp_path / "matrix" / "report" / "tables"
    (ablation,) = tables.glob("ablation_own_depths.md")
    row = next(line for line in ablation.read_text().splitlines() if "| HeadRank (no-prox) |" in line)
    assert len(re.findall(r"\d+\.\d\d", row)) == 4, "NQ and FiQA at 40 beside 2Wiki and HotpotQA at 20"
    assert "*HeadRank (no-prox) (paper)*" in ablation.read_text(), (
        "the depths are the paper's, so its rows need no mark"
    )
    assert "Candidates per query: 40 for fiqa, nq; 20 for 2wiki, hotpotqa." in ablation.read_text()
    page = (tmp_path / "matrix" / "report" / "report.md").read_text()
    assert "## Tables, each benchmark's own depth" in page and "## Tables, top" not in page
    deviations = page[page.index("Homogenisation, each benchmark's own depth") :].splitlines()
    assert deviations[2] == "| Model | Method | 2wiki | fiqa | hotpotqa | nq | Average |", (
        "one average over the whole group"
    )


def test_a_depth_that_is_not_complete_among_the_own_depths_keeps_its_tables(tmp_path: Path) -> None:
    for name, depth in (("dl19", 40), ("dl19", 20), ("hotpotqa", 20)):
        make_matrix(tmp_path, benchmarks=(name,), depth=depth)
    cells = find_cells(tmp_path)
    groups = group_cells(cells, {"dl19": 40, "hotpotqa": 20})
    named = {group.name: sorted({(cell.benchmark, cell.condition[0]) for cell in group.cells}) for group in groups}
    assert named == {
        "each benchmark's own depth": [("dl19", 40), ("hotpotqa", 20)],
        "top 20": [("dl19", 20), ("hotpotqa", 20)],
    }
    assert [group.name for group in group_cells(cells)] == ["top 20", "top 40"]


def test_methods_and_benchmarks_are_filtered_and_the_first_stage_stays(
    tmp_path: Path, quick_figures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_matrix(tmp_path / "matrix")
    make_cell(folder, "Qwen3-0.6B", "headrank+control", "dl19")
    main(["report", "--matrix", str(folder), "--methods", "headrank*", "icr", "--benchmarks", "dl19"])
    table = (folder / "report" / "tables" / "overview_top_20.csv").read_text()
    rows = [line.split(",")[2] for line in table.splitlines()]
    assert rows == ["method", "BM25", "ICR", "HeadRank", "HeadRank (control)"] and "nfcorpus" not in table
    assert main(["report", "--matrix", str(folder), "--methods", "colbert"]) == 2
    assert "method 'colbert' is not among the results: bm25, core" in capsys.readouterr().err
    assert main(["report", "--heads", "x.json", "--methods", "icr"]) == 2
    assert "--methods and --benchmarks go with" in capsys.readouterr().err


def test_the_papers_promotion_figures_stand_beside_ours_and_say_whose_they_are(
    tmp_path: Path, quick_figures: list[str]
) -> None:
    folder = make_matrix(tmp_path / "matrix")
    main(["report", "--matrix", str(folder)])
    page = (folder / "report" / "report.md").read_text()
    assert "| Qwen3-4B | *HeadRank (paper, eight datasets)* | 57.4 | 14.2 | +43.1 |" in page
    rates = CellAnalyses.by_model(find_cells(folder)).promotions()["Qwen3-0.6B"]["icr"]
    assert f"| Qwen3-0.6B | ICR | {100 * rates[0]:.1f} | {100 * rates[1]:.1f} | {100 * rates[2]:+.1f} |" in page
    main(["report", "--matrix", str(folder), "--no-published"])
    assert "paper" not in (folder / "report" / "report.md").read_text()


def test_the_papers_heads_stand_beside_those_of_the_same_model(tmp_path: Path, quick_figures: list[str]) -> None:
    make_heads(*AFTER, model="runs/Qwen3-0.6B/hf").save(tmp_path / "query.json")
    assert main(["report", "--heads", str(tmp_path / "query.json")]) == 0
    page = (tmp_path / "report" / "heads.md").read_text()
    assert "| Rank | query | before (paper) | after (paper) |" in page
    assert "| 2 | L11-H3 | L11-H3 | L11-H3 |" in page and "| 8 |  | L13-H14 | L16-H14 |" in page
    assert "| query | 2 / 8 | 4 / 8 | L14-H14, L11-H3, L16-H13, L11-H2 |" in page
    make_heads(*AFTER).save(tmp_path / "other.json")
    main(["report", "--heads", str(tmp_path / "other.json")])
    assert "paper" not in (tmp_path / "report" / "heads.md").read_text()
    main(["report", "--heads", str(tmp_path / "other.json"), "--paper-model", "Qwen3-1.7B"])
    assert "Table 4 for Qwen3-1.7B, not ours" in (tmp_path / "report" / "heads.md").read_text()


def test_an_archive_gives_the_same_pages_as_its_folder(tmp_path: Path, quick_figures: list[str]) -> None:
    folder = make_matrix(tmp_path / "matrix")
    write_archive(find_cells(folder), folder, tmp_path / "archive")
    for source, name in (
        (folder, "one"),
        (tmp_path / "archive", "two"),
        (tmp_path / "archive" / "cells.jsonl.gz", "three"),
    ):
        main(["report", "--matrix", str(source), "--output", str(tmp_path / name)])
    pages = [(tmp_path / name / "report.md").read_text() for name in ("one", "two", "three")]
    assert pages[0] == pages[1] == pages[2]


def test_the_papers_figures_are_over_its_eight_datasets_and_its_methods(
    tmp_path: Path, quick_figures: list[str]
) -> None:
    for name in FIGURE_BENCHMARKS:
        depth = 20 if name in ("hotpotqa", "2wiki", "musique") else 40
        make_matrix(tmp_path / "matrix", benchmarks=(name,), depth=depth)
        make_cell(tmp_path / "matrix", "Qwen3-0.6B", "headrank+no-prox", name, depth=depth)
    make_matrix(tmp_path / "matrix", benchmarks=("fiqa",), depth=40)
    main(["report", "--matrix", str(tmp_path / "matrix")])
    page = (tmp_path / "matrix" / "report" / "report.md").read_text()
    eight = page[page.index("## The paper's figures, the paper's eight datasets") : page.index("## Tables")]
    assert "fiqa" not in eight and "no-prox" not in eight
    assert all(name in eight for name in FIGURE_BENCHMARKS) and "HeadRank (paper, eight datasets)" in eight
    rest = page[page.index("## Analyses, each benchmark's own depth") :]
    assert "fiqa" in rest and "no-prox" in rest and "(paper, eight datasets)" not in rest
