"""`headrank select-heads` and the method registry on a tiny model: files, determinism, resuming, errors, complete
runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrank.commands import main
from headrank.errors import InputError
from headrank.method.heads import HeadSet
from headrank.method.prompt import QUERY_ROWS, PromptTemplate
from headrank.methods import METHODS, build_ranker
from headrank.reranking.exported_model import FORMAT as EXPORTED
from headrank.reranking.reranker import HeadRankReranker
from tests.unit.test_selection import write_collection

DOCUMENTS = [
    "a flea lives long",
    {"title": "Floor", "text": "the floor costs six dollars"},
    "rosin makes the bow grip",
    "a warm host",
]


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_collection(tmp_path_factory.mktemp("select") / "toy")


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3")


def select(model: Path, collection: Path, output: Path, *more: str) -> int:
    return main(
        [
            "select-heads",
            "--model",
            str(model),
            "--collection",
            str(collection),
            "--depth",
            "5",
            "--no-picture",
            "--output",
            str(output),
            *more,
        ]
    )


def test_the_default_is_the_papers_selection_and_prints_the_chosen_heads(model, collection, tmp_path, capsys) -> None:
    assert select(model, collection, tmp_path / "heads.json", "--top-k", "3") == 0
    heads = HeadSet.load(tmp_path / "heads.json")
    assert heads.method == "entropy" and len(heads.heads) == 3 and heads.source["collections"] == ["toy"]
    assert heads.settings["depth"] == 5 and heads.settings["layers_read"] == 4
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("phi", heads.to_dict()["names"][0], "heads.json"))


def test_the_same_command_gives_the_same_bytes_and_resumes_from_its_cache(model, collection, tmp_path) -> None:
    more = ("--permutations", "1", "--seed", "4", "--cache", str(tmp_path / "cache"))
    for name in ("a.json", "b.json"):
        assert select(model, collection, tmp_path / name, *more) == 0
    cached = sorted((tmp_path / "cache").iterdir())
    cached[0].unlink()  # as if the first run had been interrupted
    assert select(model, collection, tmp_path / "c.json", *more) == 0
    assert select(model, collection, tmp_path / "d.json", *more[:4]) == 0
    assert len(cached) == 4 and len({(tmp_path / f"{name}.json").read_bytes() for name in "abcd"}) == 1


def test_all_methods_at_once_write_one_file_each(model, collection, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("headrank.selection.niah.is_right", lambda *_: True)  # a random model answers nothing
    assert (
        select(
            model, collection, tmp_path / "heads.json", "--method", "all", "--needles", "2", "--haystack-words", "20"
        )
        == 0
    )
    found = {path.name: HeadSet.load(path) for path in tmp_path.glob("*.json")}
    assert set(found) == {f"heads.{method}.json" for method in ("core", "entropy", "niah", "qr", "qr-ndcg")}
    assert {heads.method: len(heads.heads) for heads in found.values()} == {
        "core": 8,
        "entropy": 8,
        "niah": 8,
        "qr": 16,
        "qr-ndcg": 16,
    }
    assert (
        found["heads.qr.json"].settings["gold_grade"] == 2 and found["heads.qr.json"].settings["is_calibrated"] is True
    )
    assert found["heads.core.json"].settings["is_calibrated"] is False
    assert (
        found["heads.niah.json"].settings["answered"] == 2
        and found["heads.niah.json"].source["haystack"] == "collection"
    )


def test_two_methods_share_the_forwards_and_choose_what_each_would_alone(model, collection, tmp_path) -> None:
    assert (
        select(model, collection, tmp_path / "heads.json", "--method", "core", "entropy", "core", "--no-picture") == 0
    )
    assert {path.name for path in tmp_path.iterdir()} == {"heads.core.json", "heads.entropy.json"}
    for method in ("core", "entropy"):
        assert select(model, collection, tmp_path / "alone.json", "--method", method) == 0
        assert (tmp_path / "alone.json").read_bytes() == (tmp_path / f"heads.{method}.json").read_bytes()


def test_switches_reach_the_policy(model, collection, tmp_path) -> None:
    more = [
        "--temperature",
        "0.05",
        "--entropy-weight",
        "0",
        "--calibrated",
        "--prune",
        "0.5",
        "--query-rows",
        "instruction",
        "--top-k",
        "2",
    ]
    assert select(model, collection, tmp_path / "heads.json", *more) == 0
    heads = HeadSet.load(tmp_path / "heads.json")
    assert (
        heads.settings["temperature"] == 0.05
        and heads.settings["entropy_weight"] == 0
        and heads.settings["is_calibrated"] is True
    )
    assert heads.l_max <= 1 and heads.num_layers == 4 and len(heads.table) == 16  # two of four layers were read
    assert heads.prompt.query_rows == "instruction" and {row["G"] for row in heads.table} == {1.0}


def test_the_prompt_of_other_heads_is_taken_where_no_switch_is_given(model, collection, tmp_path) -> None:
    assert select(model, collection, tmp_path / "first.json", "--max-words", "4", "--query-rows", "instruction") == 0
    assert select(model, collection, tmp_path / "same.json", "--prompt-of", str(tmp_path / "first.json")) == 0
    assert (
        select(
            model, collection, tmp_path / "longer.json", "--prompt-of", str(tmp_path / "first.json"), "--max-words", "5"
        )
        == 0
    )
    first, same, longer = (HeadSet.load(tmp_path / f"{name}.json").prompt for name in ("first", "same", "longer"))
    assert same == first
    assert (longer.max_words, longer.query_rows) == (5, "instruction")


def test_an_exported_model_lends_its_prompt_too(model, collection, tmp_path, capsys) -> None:
    assert select(model, collection, tmp_path / "first.json", "--document-layout", "parallel") == 0
    (tmp_path / "exported").mkdir()
    exported = {"format": EXPORTED, "heads": HeadSet.load(tmp_path / "first.json").to_dict()}
    (tmp_path / "exported" / "headrank.json").write_text(json.dumps(exported))
    assert select(model, collection, tmp_path / "same.json", "--prompt-of", str(tmp_path / "exported")) == 0
    assert HeadSet.load(tmp_path / "same.json").prompt == HeadSet.load(tmp_path / "first.json").prompt
    assert HeadSet.load(tmp_path / "same.json").prompt.is_parallel
    capsys.readouterr()
    assert select(model, collection, tmp_path / "none.json", "--prompt-of", str(tmp_path)) == 2
    assert "no headrank.json there; give a heads.json or a model" in capsys.readouterr().err


def test_held_out_queries_are_not_read(model, collection, tmp_path) -> None:
    (tmp_path / "ids.txt").write_text("q1\n")
    for name, flag in (("only.json", "--only"), ("rest.json", "--hold-out")):
        assert select(model, collection, tmp_path / name, flag, str(tmp_path / "ids.txt")) == 0
    only, rest = (HeadSet.load(tmp_path / name).source for name in ("only.json", "rest.json"))
    assert only["queries"] == rest["queries"] == 1 and only["contexts_sha256"] != rest["contexts_sha256"]


def test_several_collections_are_read_together(model, collection, tmp_path) -> None:
    other = write_collection(tmp_path / "other")
    assert select(model, collection, tmp_path / "heads.json", "--collection", str(other)) == 0
    source = HeadSet.load(tmp_path / "heads.json").source
    assert source["collections"] == ["other", "toy"] and source["queries"] == 4


def select_on(model: Path, contexts: Path, output: Path, *more: str) -> int:
    return main(
        [
            "select-heads",
            "--model",
            str(model),
            "--contexts",
            str(contexts),
            "--no-picture",
            "--output",
            str(output),
            *more,
        ]
    )


def test_heads_of_the_lists_that_are_trained_on(model, collection, tmp_path) -> None:
    def pairs(name: str, *more: str) -> None:
        assert (
            main(["pairs", "--collection", str(collection), "--depth", "5", "--output", str(tmp_path / name), *more])
            == 0
        )

    pairs("whole")  # contexts.jsonl holds the retriever's top 5 of q1 and q2, as the collection does
    assert select_on(model, tmp_path / "whole", tmp_path / "lists.json") == 0
    assert select(model, collection, tmp_path / "collection.json") == 0
    lists, whole = (HeadSet.load(tmp_path / name) for name in ("lists.json", "collection.json"))
    assert lists.table == whole.table and lists.source == whole.source and lists.settings == whole.settings
    pairs("sublists", "--sublists", "2", "--sublist-size", "3", "--unjudged-as-zero")
    assert (
        select_on(model, tmp_path / "sublists", tmp_path / "short.json", "--permutations", "2", "--no-retriever-order")
        == 0
    )
    short = HeadSet.load(tmp_path / "short.json")
    # 3 queries x 2 lists x 2 orders
    assert short.settings["depth"] == 3 and short.source["contexts"] == 12 and short.table != whole.table


@pytest.mark.parametrize("flag", ["--collection", "--corpus", "--only", "--run"])
def test_lists_and_a_collection_are_refused_together(model, collection, tmp_path, capsys, flag) -> None:
    assert select_on(model, tmp_path, tmp_path / "heads.json", flag, str(collection)) == 2
    assert f"--contexts and {flag} both say which lists to read" in capsys.readouterr().err


def test_a_folder_without_lists_is_one_line(model, tmp_path, capsys) -> None:
    assert select_on(model, tmp_path / "nowhere", tmp_path / "heads.json") == 2
    assert "nowhere" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_picture_of_the_head_map_lies_beside_the_file(model, collection, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    command = [
        "select-heads",
        "--model",
        str(model),
        "--collection",
        str(collection),
        "--depth",
        "5",
        "--output",
        str(tmp_path / "heads.json"),
    ]
    assert main(command) == 0
    assert (tmp_path / "heads.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--top-k", "99"], "--top-k 99"),
        (["--prune", "1"], "--prune"),
        (["--temperature", "0"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--entropy-weight", "inf"], "--entropy-weight"),
        (["--method", "niah", "--haystack-words", "3000", "--needles", "1"], "a haystack and its question take"),
        (["--permutations", "-1"], "--permutations"),
        (["--no-retriever-order"], "--no-retriever-order leaves no order of a list; add --permutations N"),
        (["--collection", "nowhere"], "nowhere"),
        (["--only", "missing.txt"], "missing.txt"),
    ],
)
def test_a_users_error_is_one_line_and_code_2(model, collection, tmp_path, capsys, more, message) -> None:
    assert select(model, collection, tmp_path / "heads.json", *more) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("headrank select-heads:") and message in error
    assert not (tmp_path / "heads.json").exists()


@pytest.mark.parametrize(
    ("output", "more", "message"),
    [
        ("heads.json", ["--top-k", "17", "--prune", "0.5"], "16 heads of the 2 layers"),
        (".", [], "it is a folder"),
        ("file/heads.json", [], "cannot be written"),
    ],
)
def test_what_would_fail_at_the_end_fails_before_the_first_forward(
    model, collection, tmp_path, capsys, monkeypatch, output, more, message
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("headrank.selection.selection.accumulate", lambda *_, **__: pytest.fail("a list was read"))
    assert select(model, collection, tmp_path / output, *more) == 2
    assert message in capsys.readouterr().err


def test_every_method_of_the_table_gives_complete_lists(model, collection, tmp_path) -> None:
    select(model, collection, tmp_path / "heads.json")
    requests = [("how long does a flea live", DOCUMENTS), ("cost of a floor", DOCUMENTS[:2])]
    for name, method in METHODS.items():
        ranker = build_ranker(
            name,
            model,
            tmp_path / "heads.json" if method.needs_heads else None,
            batch_size=2,
            calibrate=True,
            device="cpu",
        )
        results = ranker.score_batch(requests)
        assert [len(result.scores) for result in results] == [4, 2], name


def test_icr_is_the_calibrated_sum_over_every_head(model: Path) -> None:
    heads = HeadSet.all_heads(4, 8, model=str(model))
    expected = HeadRankReranker.from_pretrained(model, heads).score_batch([("flea", DOCUMENTS)])[0].scores
    raw = build_ranker("icr", model, calibrate=False).score_batch([("flea", DOCUMENTS)])[0].scores
    found = build_ranker("icr", model).score_batch([("flea", DOCUMENTS)])[0].scores
    assert found.tolist() == expected.tolist() != raw.tolist()


def test_first_stage_rankers_keep_the_order_of_their_run() -> None:
    for name in ("bm25", "colbertv2"):
        assert build_ranker(name, None).score_batch([("q", DOCUMENTS)])[0].scores.tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("ber25", {}, "not one of bm25"),
        ("core", {}, "needs heads"),
        ("headrank", {}, "no headrank.json"),
        ("icr", {"api_base": "http://x"}, "'api_base'"),
        ("rankgpt", {"calibrate": False}, "'calibrate'"),
    ],
)
def test_what_a_method_cannot_use_is_refused(model: Path, method: str, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_ranker(method, model, **options)


def test_the_prompt_of_the_heads_is_used_unless_another_is_given(model, collection, tmp_path) -> None:
    select(model, collection, tmp_path / "heads.json", "--order", "reversed")
    assert json.loads((tmp_path / "heads.json").read_text())["prompt"]["order"] == "reversed"
    assert build_ranker("core", model, tmp_path / "heads.json").reader.encoder.template.order == "reversed"
    assert (
        build_ranker("core", model, tmp_path / "heads.json", prompt=PromptTemplate()).reader.encoder.template.order
        == "retriever"
    )


def test_contrast_and_mean_are_switches_that_the_file_tells(model, collection, tmp_path) -> None:
    more = ("--contrast", "irrelevant", "--per-query", "--prompt", "core", "--instruction", r"Which helps?\n\nQuery: ")
    assert select(model, collection, tmp_path / "heads.json", *more) == 0
    heads = HeadSet.load(tmp_path / "heads.json")
    assert {name: heads.settings[name] for name in ("contrast", "per_query", "gold_grade")} == {
        "contrast": "irrelevant",
        "per_query": True,
        "gold_grade": 2,
    }
    assert (heads.prompt.query_rows, heads.prompt.document_label) == ("instruction-query-next", "[document {}] ")
    assert heads.prompt.instruction == "Which helps?\n\nQuery: "
    assert select(model, collection, tmp_path / "plain.json") == 0
    assert HeadSet.load(tmp_path / "plain.json").table != heads.table


def test_lists_of_labelled_paragraphs_select_heads_too(model, tmp_path) -> None:
    marks = [("a flea lives long", True, False), ("the floor costs", False, True), ("rosin", False, False)]
    paragraphs = [
        {"paragraph_text": text, "is_positive": positive, "is_negative": negative} for text, positive, negative in marks
    ]
    (tmp_path / "nq_core.json").write_text(
        json.dumps([{"question": "how long does a flea live", "paragraphs": paragraphs}])
    )
    words = [
        "select-heads",
        "--model",
        str(model),
        "--paragraphs",
        str(tmp_path / "nq_core.json"),
        "--method",
        "core",
        "--no-picture",
    ]
    assert main([*words, "--contrast", "irrelevant", "--output", str(tmp_path / "heads.json")]) == 0
    heads = HeadSet.load(tmp_path / "heads.json")
    assert heads.source["collections"] == ["nq_core"] and heads.settings["depth"] == 3


def test_every_reading_of_the_query_is_compared_with_the_papers_heads(model, collection, tmp_path, capsys) -> None:
    assert select(model, collection, tmp_path / "heads.json", "--compare-paper", "Qwen3-0.6B") == 0
    printed = capsys.readouterr().out
    for rows in QUERY_ROWS:
        assert HeadSet.load(tmp_path / f"heads.{rows}.json").prompt.query_rows == rows
        assert f"| {rows} |" in printed
    assert "L11-H2, L11-H3, L16-H7" in printed
    assert select(model, collection, tmp_path / "heads.json", "--compare-paper") == 2
    assert "names none of them, give one" in capsys.readouterr().err


def test_heads_in_common_are_counted_from_zero_and_from_one() -> None:
    from headrank.commands.compare_heads import comparison

    heads = HeadSet(((11, 2), (16, 7), (10, 1), (5, 5)), "entropy", "m", 28, 16)
    (row,) = comparison({"query": heads}, "Qwen3-0.6B").rows
    assert row == ("query", "2 / 8", "1 / 8", "L11-H2, L16-H7")
