"""From a study to phases: what is shared between runs, what depends on what, and which cells there are."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from headrank.errors import InputError
from headrank.experiments.cell_jobs import CellGroup
from headrank.experiments.phases import Call, Command, Phase, require_inputs, select_phases
from headrank.experiments.plan_study import StudyPlan, plan_study
from headrank.experiments.study_file import read_study

BASE = {
    "output": "out",
    "model": "models/tiny",
    "data": {"collections": ["train"], "train_queries": "train.qids"},
    "training": {"global_batch_size": 4, "lr": 1e-4},
    "benchmarks": {"toy": {"collection": "toy", "depths": [10]}},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def planned(*changes: str, **more: object) -> StudyPlan:
    Path("study.yaml").write_text(json.dumps({**BASE, **more}))  # JSON is YAML
    return plan_study(read_study("study.yaml", changes))


def names(plan: StudyPlan) -> list[str]:
    return [phase.name for phase in plan.phases]


def words(plan: StudyPlan, name: str) -> list[str]:
    phase = next(phase for phase in plan.phases if phase.name == name)
    assert isinstance(phase.action, Command)
    return shlex.split(str(phase.action))


def rows(*given: dict[str, object]) -> dict[str, object]:
    return {"rows": list(given)}


def test_a_run_has_its_own_phases_only_from_where_it_differs() -> None:
    plan = planned(runs={"full": {}, "slow": {"training": {"lr": 1e-5}}, "random": {"pairs": {"random_pairs": True}}})
    shared = [name for name in names(plan) if "/" not in name]
    assert shared == ["pairs", "heads"]
    assert [name for name in names(plan) if name.startswith("pairs/")] == ["pairs/random"]
    assert {name for name in names(plan) if name.startswith("train/")} == {"train/full", "train/slow", "train/random"}
    assert "--random-pairs" in words(plan, "pairs/random") and "out/random/pairs" in words(plan, "train/random")
    assert "out/pairs" in words(plan, "train/slow") and "1e-05" in words(plan, "train/slow")


def test_the_commands_of_a_plan_are_what_the_real_parsers_accept() -> None:
    from headrank.commands import build_verb_parser
    from megatron_patches.training.arguments import parse_arguments

    plan = planned(
        measure=rows({"method": "icr"}, {"method": "headrank", "model": "final"}),
        report={"kind": "run", "heads": True, "view": {"benchmark": "toy"}},
        heads={"methods": ["entropy", "core", "niah"], "prune": 0.3},
        rounds=2,
    )
    verbs = set()
    for phase in plan.phases:
        if isinstance(phase.action, Call):
            continue
        parts = words(plan, phase.name)
        if "pretrain_headrank.py" in parts[1]:
            args = parse_arguments(parts[2:])
            assert (args.global_batch_size, args.lr, args.exit_signal_handler) == (4, 1e-4, True)
            continue
        assert parts[1:3] == ["-m", "headrank"]
        build_verb_parser(parts[3]).parse_args(parts[4:])
        verbs.add(parts[3])
    assert verbs == {"pairs", "select-heads", "export-hf", "report", "view"}


def test_a_teacher_labels_every_collection_before_lists_and_readout_and_needs_no_judgements() -> None:
    from headrank.commands import build_verb_parser

    plan = planned(
        data={"collections": ["web", "health"], "held_out_queries": "valid.qids"},
        labels={"teacher": "minilm", "ranks": "1-10,15", "only": {"health": "health.qids"}},
        pairs={"judged_only": True, "list_words": [40, 300]},
        heads={"readout": {"lists": 5, "max_layer": [20], "groups": [16]}},
        export={"adapter_only": True},
    )
    assert names(plan)[:5] == ["label/web", "label/health", "pairs", "held-out", "heads"]
    for name in ("label/web", "label/health", "pairs", "held-out", "heads", "export", "reselect", "model"):
        parts = words(plan, name)
        build_verb_parser(parts[3]).parse_args(parts[4:])
    by_name = {phase.name: phase for phase in plan.phases}
    assert words(plan, "label/health")[-4:] == ["--only", "health.qids", "--output", "out/labels/health.teacher.trec"]
    for name in ("pairs", "held-out", "heads"):
        assert "out/labels/web.teacher.trec" in words(plan, name) and {"label/web", "label/health"} <= set(
            by_name[name].needs
        )
        assert not any(path.name == "qrels.txt" for path in by_name[name].external)
    assert "40 300" in " ".join(words(plan, "pairs")) and "--adapter-only" in words(plan, "export")
    fitted_again = words(plan, "reselect")
    assert (
        fitted_again[fitted_again.index("--model") + 1]
        == fitted_again[fitted_again.index("--prompt-of") + 1]
        == "out/round-1/hf"
    )
    assert "--adapter-only" not in words(plan, "model") and words(plan, "model")[-1] == "out/model"


def test_runs_of_labels_that_are_there_need_no_teacher() -> None:
    Path("runs").mkdir()
    Path("runs/train.minilm.trec").write_text("")
    plan = planned(labels={"folder": "runs"})
    assert names(plan)[0] == "pairs" and "runs/train.minilm.trec" in words(plan, "pairs")
    with pytest.raises(InputError, match="labels: labels come from a teacher or from a folder of runs"):
        planned(labels={"folder": "runs", "teacher": "minilm"})


def test_a_second_round_trains_the_first_rounds_model_with_its_new_heads() -> None:
    plan = planned(rounds=2)
    second = words(plan, "train/round-2")
    assert second[second.index("--headrank-model") + 1] == "out/round-1/hf"
    assert second[second.index("--headrank-heads") + 1] == "out/round-1/heads.json"
    assert "reselect/round-1" in next(phase for phase in plan.phases if phase.name == "train/round-2").needs


def test_training_seeds_are_the_seeds_of_one_row_and_variants_of_the_untrained_model() -> None:
    plan = planned(
        seeds=[1, 2],
        measure=rows(
            {"method": "headrank", "variant": "untrained", "heads": "before"},
            {"method": "headrank", "variant": "control", "heads": "after"},
            {"method": "headrank", "model": "final", "name": "ours"},
        ),
    )
    found = [
        (each.cell.method, each.cell.model and each.cell.model.name, each.cell.model and each.cell.model.seed)
        for each in plan.cells
    ]
    assert found == [
        ("headrank+untrained", "tiny", None),
        ("headrank+control-1", "tiny", None),
        ("headrank+control-2", "tiny", None),
        ("headrank", "ours", 1),
        ("headrank", "ours", 2),
    ]


def test_named_runs_are_variants_and_a_single_one_needs_no_name() -> None:
    plan = planned(
        runs={
            "full": {},
            "no-prox": {"training": {"flags": {"headrank-beta": 0}}},
            "ranknet": {"training": {"flags": {"headrank-loss": "ranknet"}}},
        },
        measure=rows(
            {"method": "headrank", "model": "final", "runs": ["full"]},
            {"method": "headrank", "model": "final", "runs": ["no-prox", "ranknet"]},
        ),
    )
    assert [each.cell.method for each in plan.cells] == ["headrank", "headrank+no-prox", "headrank+ranknet"]


def test_attention_rows_of_one_model_are_read_off_one_forward_unless_the_study_says_otherwise() -> None:
    given = [
        {"method": "bm25"},
        {"method": "icr"},
        {"method": "headrank", "variant": "untrained", "heads": "before"},
        {"method": "headrank", "model": "final"},
    ]
    together = [["bm25"], ["icr", "headrank+untrained"], ["headrank"]]
    assert cells_of_phases(planned(measure=rows(*given))) == together
    alone = cells_of_phases(planned("measure.share_forward=false", measure=rows(*given)))
    assert alone == [["bm25"], ["icr"], ["headrank+untrained"], ["headrank"]]


def cells_of_phases(plan: StudyPlan) -> list[list[str]]:
    return [[cell.method for cell in group_of(phase).cells] for phase in plan.phases if phase.name.startswith("cells/")]


def group_of(phase: Phase) -> CellGroup:
    assert isinstance(phase.action, Call)
    group = phase.action.arguments[0]
    assert isinstance(group, CellGroup)
    return group


def test_settings_of_a_benchmark_are_its_own() -> None:
    plan = planned(
        benchmarks={
            "short": {"collection": "toy", "depths": [10], "max_words": 64},
            "long": {
                "collection": "toy",
                "depths": [20],
                "max_words": 128,
                "measures": ["R@5"],
                "queries": "some.qids",
            },
        },
        measure=rows({"method": "icr"}),
    )
    found = {
        each.cell.benchmark.name: (each.cell.depth, each.settings.max_words, each.cell.benchmark.measures)
        for each in plan.cells
    }
    assert found == {"short": (10, 64, ("nDCG@10",)), "long": (20, 128, ("R@5",))}


def test_a_row_with_fuse_reads_the_row_that_is_the_same_without() -> None:
    row = {"method": "headrank", "heads": "before"}
    plan = planned(measure=rows(row, {**row, "variant": "fused", "fuse": 0.5}))
    assert [each.cell.method for each in plan.cells] == ["headrank", "headrank+fused"]
    fused = next(phase for phase in plan.phases if phase.name.endswith("headrank+fused"))
    assert fused.needs == ("cells/toy/top10-retriever/tiny/headrank",)
    with pytest.raises(InputError, match="no row without it"):
        planned(measure=rows({**row, "variant": "fused", "fuse": 0.5}))


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        ({"method": "headrank", "model": "final"}, ["training=null"], ["final model", "model: base"]),
        ({"method": "headrank", "heads": "after"}, ["reselect=null"], ["after training", "reselect"]),
        ({"method": "core", "heads": "core"}, [], ["'core'", "heads.methods"]),
    ],
)
def test_a_row_that_reads_what_nothing_makes_is_refused(
    row: dict[str, object], changes: list[str], words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        planned(*changes, measure=rows(row))
    assert "study.yaml" in str(caught.value) and not [word for word in words if word not in str(caught.value)]


def test_two_rows_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="both called icr on toy"):
        planned(measure=rows({"method": "icr"}, {"method": "icr", "layout": "parallel"}))


def test_a_phase_asks_only_for_what_it_reads() -> None:
    plan = planned(measure=rows({"method": "icr"}))
    Path("train.qids").touch()
    Path("train").mkdir()
    for name in ("queries.tsv", "qrels.txt", "run.bm25.txt", "corpus.jsonl.gz"):
        (Path("train") / name).touch()
    require_inputs(select_phases(plan.phases, ["pairs", "heads", "train"]), plan.phases)  # no word about the benchmark
    with pytest.raises(InputError, match=r"cells/toy.*toy/queries\.tsv: no such file"):
        require_inputs(select_phases(plan.phases, ["cells"]), plan.phases)


def test_what_is_read_may_not_lie_where_the_study_writes() -> None:
    plan = planned("data.collections=[out/pairs]")
    Path("train.qids").touch()
    Path("out/pairs").mkdir(parents=True)
    for name in ("queries.tsv", "qrels.txt", "run.bm25.txt", "corpus.jsonl"):
        (Path("out/pairs") / name).touch()
    with pytest.raises(InputError, match="would replace"):
        require_inputs(plan.phases, plan.phases)


def test_an_unknown_phase_names_those_there_are() -> None:
    with pytest.raises(InputError, match="`only` trian.*pairs, heads, train"):
        select_phases(planned().phases, ["trian"])


def test_retrieved_collections_lie_in_the_studys_folder() -> None:
    plan = planned("data.collections=[dl21, local]", retrieve={"index": "x", "topics": {"dl21": "dl21-passage"}})
    pairs = words(plan, "pairs")
    assert [pairs[place + 1] for place, word in enumerate(pairs) if word == "--collection"] == [
        "out/collections/dl21",
        "local",
    ]
    assert "retrieve/dl21" in next(phase for phase in plan.phases if phase.name == "pairs").needs


def test_a_depth_that_gives_the_same_lists_again_is_left_out() -> None:
    from tests.toy_collections import make_collection

    make_collection(Path("toy"), {"q1": [1] * 20, "q2": [0] * 12})
    plan = planned(benchmarks={"toy": {"collection": "toy", "depths": [10, 20, 40]}}, measure=rows({"method": "icr"}))
    assert [each.cell.depth for each in plan.cells] == [10, 20]


def test_without_held_out_queries_the_last_checkpoint_is_exported_and_with_them_the_best() -> None:
    def source(plan: StudyPlan) -> str:
        parts = words(plan, "export")
        return parts[parts.index("--checkpoint") + 1]

    assert source(planned()) == "out/round-1/train"
    plan = planned("data.held_out_queries=held.qids", "held_out_pairs={depth: 7}")
    assert source(plan) == "out/round-1/train/best"
    assert "--only held.qids --depth 7" in " ".join(words(plan, "held-out")) and "--depth 100" in " ".join(
        words(plan, "pairs")
    )


def test_given_heads_are_trained_and_not_selected_before() -> None:
    plan = planned("heads.file=given.json")
    assert "heads" not in names(plan) and "reselect" in names(plan)
    train = words(plan, "train")
    assert train[train.index("--headrank-heads") + 1] == "given.json"
    assert Path("given.json") in next(phase for phase in plan.phases if phase.name == "train").external


def test_a_truncated_model_is_cut_out_of_the_checkpoint_and_a_whole_one_copied() -> None:
    assert "--exported" in words(planned(), "model") and "--truncate" not in words(planned(), "model")
    cut = words(planned("export.truncate=true"), "model")
    assert "--truncate" in cut and cut[cut.index("--checkpoint") + 1] == "out/round-1/train" and "--exported" not in cut


def test_checkpoints_that_are_not_kept_go_after_the_last_phase_that_reads_them() -> None:
    plan = planned("training.keep_checkpoints=false")
    assert next(phase for phase in plan.phases if phase.name.startswith("discard")).needs == ("model",)


def test_a_later_round_keeps_the_first_models_scores_as_its_reference() -> None:
    plan = planned(rounds=2)
    assert "--headrank-reference-model" not in words(plan, "train/round-1")
    second = words(plan, "train/round-2")
    assert second[second.index("--headrank-reference-model") + 1] == "models/tiny"
    assert second[second.index("--headrank-model") + 1] == "out/round-1/hf"


def test_kept_steps_are_models_with_heads_of_their_own_and_rows_of_the_tables() -> None:
    steps = {"training": {"global_batch_size": 4, "lr": 1e-4, "keep_steps": [10, 20], "stop_after": 25}}
    plan = planned(**steps, measure=rows({"method": "headrank", "model": "steps"}))
    train = words(plan, "train")
    assert (
        train[train.index("--headrank-keep-iters") + 1 :][:2] == ["10", "20"]
        and train[train.index("--headrank-stop-after") + 1] == "25"
    )
    assert "out/round-1/train/iter_0000010" in words(plan, "export/step-10")
    assert "out/round-1/step-10/heads.json" in words(plan, "model/step-10")
    assert [each.cell.method for each in plan.cells] == ["headrank+step-10", "headrank+step-20"]
    with pytest.raises(InputError, match="training.keep_steps"):
        planned(measure=rows({"method": "headrank", "model": "steps"}))


def test_a_baseline_as_published_has_heads_and_a_prompt_of_its_own_beside_the_common_setting() -> None:
    selections = {
        "core-published": {"method": "core", "prompt": "core", "contrast": "irrelevant"},
        "qr-8": {"method": "qr", "top_k": 8},
        "long-niah": {"method": "niah", "haystack_words": [300, 6000], "needles": 10},
        "nq-core": {"method": "core", "paragraphs": ["nq_core.json"]},
    }
    plan = planned(
        heads={"methods": ["entropy", "core"], "top_k": 4},
        selections=selections,
        measure=rows(
            {"method": "core", "heads": "core"},
            {"method": "core", "variant": "published", "heads": "core-published", "prompt": "core"},
            {"method": "qr", "heads": "qr-8"},
            {"method": "niah", "heads": "long-niah"},
            {"method": "core", "variant": "nq", "heads": "nq-core"},
            {"method": "icr", "variant": "published", "prompt": "icr"},
        ),
    )
    core = words(plan, "selection/core-published")
    assert core[core.index("--prompt") + 1] == "core" and core[core.index("--contrast") + 1] == "irrelevant"
    assert (
        "--top-k" not in core
        and words(plan, "selection/qr-8")[words(plan, "selection/qr-8").index("--top-k") + 1] == "8"
    )
    niah = words(plan, "selection/long-niah")
    assert niah[niah.index("--haystack-words") + 1 :][:2] == ["300", "6000"]
    assert "--paragraphs" in words(plan, "selection/nq-core") and "--depth" not in words(plan, "selection/nq-core")
    cells = {each.cell.method: each for each in plan.cells}
    assert cells["core"].settings.prompt is None and cells["core+published"].settings.prompt == "core"
    assert (
        cells["core+published"].cell.heads == "out/heads.core-published.json"
        and cells["core"].cell.heads == "out/heads.core.json"
    )
    assert cells["icr+published"].cell.order == "retriever"  # of the prompt, which turns the list round


def test_without_alps_the_same_pairs_select_and_train() -> None:
    plan = planned(runs={"full": {}, "no-alps": {"pairs": {"random_pairs": True}, "heads": {"contrast": "lower"}}})
    for phase in ("heads/no-alps", "reselect/no-alps"):
        assert words(plan, phase)[words(plan, phase).index("--contrast") + 1] == "lower"
    assert "--contrast" not in words(plan, "heads")


@pytest.mark.parametrize("size", ["0.6b", "1.7b", "4b"])
def test_the_papers_presets_select_heads_and_measure_as_the_paper_does(size: str) -> None:
    plan = plan_study(read_study(Path(__file__).resolve().parents[2] / "configs" / f"paper_qwen3_{size}.yaml"))
    heads = words(plan, "heads")
    for flag, value in (
        ("--depth", "100"),
        ("--temperature", "0.001"),
        ("--entropy-weight", "0.1"),
        ("--permutations", "0"),
    ):
        assert heads[heads.index(flag) + 1] == value
    depths = {each.cell.benchmark.name: each.cell.depth for each in plan.cells}
    assert {name for name, depth in depths.items() if depth == 20} == {"hotpotqa", "2wiki", "musique"} and len(
        depths
    ) == 14
    assert {each.settings.batch_size for each in plan.cells} == {16}
    ablations = {
        each.cell.method
        for each in plan.cells
        if each.cell.method.startswith("headrank+") and "step" not in each.cell.method
    }
    wanted = {"sft", "all-heads", "no-gate", "no-alps", "no-omega", "no-prox"}
    assert ablations == ({f"headrank+{name}" for name in wanted} if size == "0.6b" else set())


def test_runs_and_seeds_multiply_and_the_seeds_of_a_run_are_one_row() -> None:
    plan = planned(
        seeds=[1, 2],
        runs={"full": {}, "slow": {"training": {"lr": 1e-5}}},
        measure=rows(
            {"method": "headrank", "variant": "untrained", "heads": "before"},
            {"method": "headrank", "model": "trained", "heads": "before"},
            {"method": "headrank", "variant": "one", "model": "final", "runs": ["slow"]},
        ),
    )
    assert {name for name in names(plan) if name.startswith("train/")} == {
        "train/full.seed-1",
        "train/full.seed-2",
        "train/slow.seed-1",
        "train/slow.seed-2",
    }
    assert words(plan, "train/slow.seed-2")[words(plan, "train/slow.seed-2").index("--seed") + 1] == "2"
    found = [(each.cell.method, each.cell.model.seed) for each in plan.cells if each.cell.model is not None]
    assert found[0] == ("headrank+untrained", None)
    assert found[1:5] == [("headrank+full", 1), ("headrank+full", 2), ("headrank+slow", 1), ("headrank+slow", 2)]
    assert found[5:] == [("headrank+one", 1), ("headrank+one", 2)]


def test_the_study_of_the_claims_holds_every_query_out_once_and_pools_the_folds() -> None:
    root = Path(__file__).resolve().parents[2]
    plan = plan_study(read_study(root / "configs" / "claims.yaml"))
    cells: dict[str, set[tuple[str, int | None]]] = {}
    for each in plan.cells:
        if each.cell.model is not None:
            cells.setdefault(each.cell.method, set()).add((each.cell.benchmark.name, each.cell.model.seed))
    held_out = {(f"{name}-{fold}", seed) for name in ("dl21", "dl23") for fold in "ab" for seed in (1, 2, 3)}
    trained = {f"headrank+{name}" for name in ("full", "no-gate", "no-alps", "no-omega", "no-prox", "reselected")}
    assert {method for method in cells if cells[method] == held_out} == trained
    for each in plan.cells:  # what is measured on a fold was trained on the other
        if each.cell.method in trained:
            fold = each.cell.benchmark.name[-1]
            assert f"/{'a' if fold == 'b' else 'b'}-" in each.cell.model.path and str(each.settings.only).endswith(
                f"fold-{fold}.qids"
            )
    folds = [{line.split()[0] for line in (root / "results" / "queries" / f"fold-{fold}.qids").open()} for fold in "ab"]
    assert not folds[0] & folds[1] and len(folds[0] | folds[1]) == 103
    assert words(plan, "report")[-4:-2] == ["--pool", "headrank+full"]


def test_models_that_are_there_are_measured_without_data_and_training() -> None:
    model = {"method": "headrank", "path": "runs/a/model", "name": "trained"}
    Path("study.yaml").write_text(
        json.dumps(
            {
                "output": "out",
                "benchmarks": BASE["benchmarks"],
                "measure": rows(
                    {"method": "bm25"},
                    {"method": "core", "path": "models/small", "heads": "core.json"},
                    {**model, "seed": 1},
                    {**model, "seed": 2, "path": "runs/b/model"},
                ),
            }
        )
    )
    plan = plan_study(read_study("study.yaml"))
    assert [str(each.cell.folder) for each in plan.cells] == [
        "toy/top10-retriever/first-stage/bm25",
        "toy/top10-retriever/small/core",
        "toy/top10-retriever/trained/headrank-seed1",
        "toy/top10-retriever/trained/headrank-seed2",
    ]
    assert all(name.startswith("cells/") for name in names(plan))
    needed = {path for phase in plan.phases for path in phase.external}
    assert {Path("core.json"), Path("runs/a/model/headrank.json"), Path("runs/b/model/headrank.json")} <= needed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "m", "model": "final"}, "leave out model"),
        ({"path": "m", "heads": "before"}, "'before'"),
        ({"model": "final", "seed": 1}, "'path'"),
    ],
    ids=str,
)
def test_a_row_that_names_a_model_is_no_row_of_a_run(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        planned(measure=rows({"method": "headrank", **changes}))


def test_without_data_nothing_can_be_trained() -> None:
    Path("study.yaml").write_text(json.dumps({"output": "out", "training": {}}))
    with pytest.raises(InputError, match=r"data is missing; training and heads need data\.collections"):
        read_study("study.yaml")
