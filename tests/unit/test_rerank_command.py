"""`headrank rerank`: complete runs, resumable, split over processes, clear lines for bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrank.commands import build_verb_parser, main
from headrank.commands.rerank import job_from
from headrank.errors import InputError
from headrank.formats import read_corpus, read_run
from headrank.method.heads import HeadSet
from headrank.method.prompt import PromptTemplate
from headrank.reranking import rerank_job
from headrank.reranking.exported_model import FORMAT
from headrank.reranking.partial_results import PartialResults
from headrank.reranking.rerank_job import RerankJob
from headrank.reranking.rerank_outputs import Target
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    "flea",
    "host",
    "warm",
    "concrete",
    "floor",
    "violin",
    "bow",
    "cycle",
    "month",
    "dollar",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    """Six queries with ten candidates each; every document is shared by all queries."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "queries.tsv").write_text("".join(f"q{i}\twhat is {WORDS[i]}\n" for i in range(6)))
    rows = [
        {
            "docid": f"d{i}",
            "title": "",
            "text": f"The {word} is {WORDS[i - 1]} of {WORDS[i - 2]}.",
        }
        for i, word in enumerate(WORDS)
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.bm25.txt").write_text(
        "".join(f"q{q} Q0 d{(d + q) % 10} {d + 1} {20 - d} bm25\n" for q in range(6) for d in range(10))
    )
    HeadSet(((0, 1), (2, 3)), "test", "tiny", 4, 8).save(folder / "heads.json")
    return folder


def arguments(model: Path, collection: Path, output: Path, *extra: str) -> list[str]:
    return [
        "rerank",
        "--model",
        str(model),
        "--collection",
        str(collection),
        "--heads",
        str(collection / "heads.json"),
    ] + [
        "--output",
        str(output),
        *extra,
    ]


def test_a_switch_of_the_prompt_leaves_the_others_as_the_models_own_heads_have_them(
    collection: Path, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "exported")
    own = PromptTemplate(query_rows="instruction", order="reversed", max_words=5)
    heads = dataclasses.replace(HeadSet.load(collection / "heads.json"), prompt=own)
    (model / "headrank.json").write_text(json.dumps({"format": FORMAT, "heads": heads.to_dict()}))
    words = ["rerank", "--model", str(model), "--collection", str(collection), "--meta", str(tmp_path / "meta.json")]
    assert main([*words, "--output", str(tmp_path / "out.txt"), "--max-words", "4"]) == 0
    assert json.loads((tmp_path / "meta.json").read_text())["prompt_hash"] == dataclasses.replace(own, max_words=4).hash


def share(model: Path, collection: Path, *targets: Target, **more: Any) -> None:
    """Several methods off one forward."""
    rerank_job.rerank(RerankJob(str(model), targets, collection=str(collection), **more))


def test_icr_does_not_take_the_prompt_of_the_method_it_shares_a_forward_with(
    model: Path, collection: Path, tmp_path: Path
) -> None:
    short = dataclasses.replace(HeadSet.load(collection / "heads.json"), prompt=PromptTemplate(max_words=4))
    short.save(tmp_path / "short.json")
    targets = [
        Target("icr", str(tmp_path / "icr.txt")),
        Target("core", str(tmp_path / "core.txt"), str(tmp_path / "short.json")),
    ]
    with pytest.raises(InputError, match="icr and core have different prompts .max_words 300 and 4;"):
        share(model, collection, *targets)
    share(model, collection, *targets, prompt={"max_words": 4})
    assert (tmp_path / "icr.txt").exists() and (tmp_path / "core.txt").exists()


def test_texts_below_the_depth_are_not_needed_for_jsonl(model: Path, collection: Path, tmp_path: Path) -> None:
    run = (collection / "run.bm25.txt").read_text().splitlines()
    (collection / "run.bm25.txt").write_text("\n".join([*run, "q0 Q0 unknown 11 1 bm25"]) + "\n")
    assert main(arguments(model, collection, tmp_path / "out.jsonl", "--depth", "4")) == 0
    (first, *_) = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert [candidate["doc"] for candidate in first["candidates"] if candidate["docid"] == "unknown"] == [{}]


def test_every_candidate_comes_back_once_and_those_beyond_the_depth_keep_their_order(
    model: Path, collection: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.txt"
    scores, meta = tmp_path / "scores.jsonl", tmp_path / "meta.json"
    assert (
        main(
            arguments(
                model,
                collection,
                output,
                "--depth",
                "6",
                "--scores",
                str(scores),
                "--meta",
                str(meta),
            )
        )
        == 0
    )
    before, after = read_run(collection / "run.bm25.txt"), read_run(output)
    for query_id, rows in before.items():
        assert {row.doc_id for row in after[query_id]} == {row.doc_id for row in rows}
        assert [row.doc_id for row in after[query_id][6:]] == [row.doc_id for row in rows[6:]]
        written = np.array([row.score for row in after[query_id]], dtype=np.float32)
        assert (np.diff(written) < 0).all(), "no ties in float32"
    lines = [json.loads(line) for line in scores.read_text().splitlines()]
    assert [line["query_id"] for line in lines] == list(before) and lines[0]["ranks"] == [1, 2, 3, 4, 5, 6]
    assert json.loads(meta.read_text())["layers_used"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "meta.json",
        "out.txt",
        "scores.jsonl",
        "toy",
    ]


def test_an_interrupted_run_goes_on_where_it_stopped(
    model: Path, collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, resumed = tmp_path / "whole.txt", tmp_path / "resumed.txt"
    assert main(arguments(model, collection, whole)) == 0
    scored: list[str] = []
    original = rerank_job._score

    def interrupt_after_three(ranker: object, batch: list) -> list:
        if len(scored) == 3:
            raise KeyboardInterrupt
        scored.extend(request.query_id for request in batch)
        return list(original(ranker, batch))

    monkeypatch.setattr(rerank_job, "_score", interrupt_after_three)
    assert main(arguments(model, collection, resumed)) == 130
    assert not resumed.exists()
    partial = next(tmp_path.glob("resumed.txt.partial-*"))
    partial.write_text(partial.read_text() + '{"query_id": "q4", "doc')  # torn by the kill
    again: list[str] = []
    monkeypatch.setattr(
        rerank_job,
        "_score",
        lambda ranker, batch: again.extend(r.query_id for r in batch) or list(original(ranker, batch)),
    )
    assert main(arguments(model, collection, resumed)) == 0
    assert again == ["q3", "q4", "q5"]
    assert resumed.read_text() == whole.read_text()
    assert not list(tmp_path.glob("*.partial-*"))


def test_two_processes_write_one_file_equal_to_one_process(model: Path, collection: Path, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone.txt", tmp_path / "shared.txt"
    assert main(arguments(model, collection, alone)) == 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "headrank",
    ]
    subprocess.run(
        command + arguments(model, collection, shared),
        check=True,
        env=environment,
        cwd=tmp_path,
        timeout=240,
        capture_output=True,
    )
    one, other = read_run(alone), read_run(shared)
    assert list(one) == list(other)
    for query_id, rows in one.items():  # the processes use fewer threads each, so sums may differ in the last bit
        assert [row.doc_id for row in rows] == [row.doc_id for row in other[query_id]]
        assert np.allclose([row.score for row in rows], [row.score for row in other[query_id]], atol=1e-6)


def test_shuffling_changes_the_prompt_but_not_the_set(model: Path, collection: Path, tmp_path: Path) -> None:
    straight, shuffled = tmp_path / "a.txt", tmp_path / "b.txt"
    assert main(arguments(model, collection, straight)) == 0
    assert main(arguments(model, collection, shuffled, "--shuffle", "7")) == 0
    one, other = read_run(straight), read_run(shuffled)
    assert {q: {r.doc_id for r in rows} for q, rows in one.items()} == {
        q: {r.doc_id for r in rows} for q, rows in other.items()
    }
    assert one != other


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        ((), lambda texts, rank: rank),
        (("--order", "reversed"), lambda texts, rank: len(texts) - 1 - rank),
        (("--document-layout", "parallel"), lambda texts, rank: sorted(texts).index(texts[rank])),
    ],
)
def test_positions_are_where_a_document_stood_in_the_prompt(
    model: Path, collection: Path, tmp_path: Path, flags: tuple, place: Any
) -> None:
    scores = tmp_path / "scores.jsonl"
    assert (
        main(arguments(model, collection, tmp_path / "run.txt", "--depth", "6", "--scores", str(scores), *flags)) == 0
    )
    corpus = read_corpus(collection / "corpus.jsonl")
    for row in map(json.loads, scores.read_text().splitlines()):
        texts = [(corpus[doc_id].title, corpus[doc_id].text) for doc_id in row["doc_ids"]]
        assert row["positions"] == [place(texts, rank) + 1 for rank in range(len(texts))]


def test_rank_llm_requests_go_in_and_out(model: Path, collection: Path, tmp_path: Path) -> None:
    trec, first, second = (
        tmp_path / "run.txt",
        tmp_path / "out.jsonl",
        tmp_path / "again.txt",
    )
    assert main(arguments(model, collection, first, "--depth", "6")) == 0
    texts = [row["doc"]["text"] for line in first.read_text().splitlines() for row in json.loads(line)["candidates"]]
    assert len(texts) == 60 and all(texts), "documents below the depth keep their text"
    assert main(arguments(model, collection, trec, "--depth", "6")) == 0
    heads = str(collection / "heads.json")
    assert (
        main(
            [
                "rerank",
                "--method",
                "bm25",
                "--model",
                str(model),
                "--requests",
                str(first),
                "--output",
                str(second),
            ]
        )
        == 0
    )
    assert {q: [r.doc_id for r in rows] for q, rows in read_run(second).items()} == {
        q: [r.doc_id for r in rows] for q, rows in read_run(trec).items()
    }
    assert (
        main(
            [
                "rerank",
                "--model",
                str(model),
                "--heads",
                heads,
                "--requests",
                str(first),
                "--output",
                str(second),
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("run.bm25.txt", "q0 Q0 d99 11 1.0 bm25\n", "d99"),
        ("run.bm25.txt", "q0 Q0 d1\n", "run.bm25.txt:61"),
        ("run.bm25.txt", "q9 Q0 d1 1 1.0 bm25\n", "'q9' is not in"),
        ("run.bm25.txt", "q0 Q0 d1 12 0.5 bm25\n", "appears twice"),
        ("corpus.jsonl", "{broken\n", "corpus.jsonl:11"),
        ("queries.tsv", "q7\n", "queries.tsv:7"),
    ],
)
def test_bad_files_are_one_line_exit_two_and_leave_nothing(
    model: Path,
    collection: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    file: str,
    line: str,
    message: str,
) -> None:
    with open(collection / file, "a") as stream:
        stream.write(line)
    output = tmp_path / "out.txt"
    assert main(arguments(model, collection, output, "--depth", "40")) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and error.startswith("headrank rerank:")
    assert not output.exists() and not list(tmp_path.glob("*.partial-*"))


def test_an_empty_document_in_the_corpus_is_ranked_last(model: Path, collection: Path, tmp_path: Path) -> None:
    corpus = (collection / "corpus.jsonl").read_text().splitlines()
    corpus[3] = json.dumps({"docid": "d3", "title": "", "text": ""})
    (collection / "corpus.jsonl").write_text("\n".join(corpus) + "\n")
    output = tmp_path / "out.txt"
    assert main(arguments(model, collection, output)) == 0
    assert all(rows[-1].doc_id == "d3" for rows in read_run(output).values())


def test_methods_that_share_a_forward_write_what_each_would_write_alone(
    model: Path, collection: Path, tmp_path: Path
) -> None:
    deep = tmp_path / "deep.json"
    HeadSet(((3, 0), (0, 7), (2, 3)), "test", "tiny", 4, 8).save(deep)
    base = ["rerank", "--model", str(model), "--collection", str(collection), "--depth", "6"]
    alone = {"headrank": ["--heads", str(collection / "heads.json")], "icr": [], "core": ["--heads", str(deep)]}
    for method, flags in alone.items():
        assert main([*base, "--method", method, *flags, "--output", str(tmp_path / f"{method}.txt")]) == 0
    heads = {"headrank": str(collection / "heads.json"), "icr": None, "core": str(deep)}
    shared = [
        Target(name, f"{tmp_path}/shared/{name}/run.txt", file, meta=f"{tmp_path}/shared/{name}/meta.json")
        for name, file in heads.items()
    ]
    share(model, collection, *shared, depth=6)
    for method in alone:
        expected, found = read_run(tmp_path / f"{method}.txt"), read_run(tmp_path / "shared" / method / "run.txt")
        for query_id, rows in expected.items():
            scores = {row.doc_id: row.score for row in found[query_id]}
            np.testing.assert_allclose([scores[row.doc_id] for row in rows], [row.score for row in rows], atol=1e-6)
    facts = {method: json.loads((tmp_path / "shared" / method / "meta.json").read_text()) for method in ("icr", "core")}
    assert [facts[method]["layers_used"] for method in facts] == [4, 4] and len(facts["core"]["heads"]) == 3
    assert facts["icr"]["seconds_per_query"] > 0 and facts["core"]["seconds_per_query"] is None, (
        "ICR reads all of the forward"
    )
    assert facts["icr"]["peak_memory_bytes"] > 0 and facts["core"]["peak_memory_bytes"] is None, (
        "and so its memory is ICR's"
    )
    assert all(values["methods_sharing_the_forward"] == 3 for values in facts.values())
    assert not list(tmp_path.rglob("*.partial*"))


@pytest.mark.parametrize(
    ("method", "message"), [("bm25", "reads no attention"), ("core", "needs heads"), ("nothing", "is not one of")]
)
def test_what_cannot_share_a_forward_is_refused(
    model: Path, collection: Path, tmp_path: Path, method: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        share(model, collection, Target("icr", str(tmp_path / "out.txt")), Target(method, str(tmp_path / "x/out.txt")))
    assert not (tmp_path / "out.txt").exists() and not (tmp_path / "x").exists()


def test_two_methods_never_write_one_file(model: Path, collection: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="would be written twice"):
        share(
            model, collection, Target("icr", str(tmp_path / "run.txt")), Target("headrank", str(tmp_path / "run.txt"))
        )


def test_a_failure_has_its_line_to_itself_and_leaves_no_empty_file(
    model: Path, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (collection / "queries.tsv").write_text("".join(f"q{i}\t{'flea ' * 3000}\n" for i in range(6)))
    assert main(arguments(model, collection, tmp_path / "out.txt")) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("headrank rerank: query 'flea")
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_the_bar_counts_queries_whatever_the_batch(
    model: Path, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(model, collection, tmp_path / "out.txt", "--batch-size", "4")) == 0
    assert "6/6" in capsys.readouterr().err


def test_brackets_in_the_name_of_the_output_are_letters(model: Path, collection: Path, tmp_path: Path) -> None:
    assert main(arguments(model, collection, tmp_path / "run[1].txt", "--depth", "3")) == 0
    assert [path.name for path in tmp_path.glob("run*")] == ["run[1].txt"]


def test_a_changed_corpus_is_not_mixed_with_an_interrupted_run(model: Path, collection: Path, tmp_path: Path) -> None:
    flags = [*arguments(model, collection, tmp_path / "out.txt"), "--depth", "3"]
    args = build_verb_parser("rerank").parse_args(flags[1:])
    keys = []
    for word in ("flea", "floor"):
        corpus = (collection / "corpus.jsonl").read_text().replace("The violin", f"The {word}")
        (collection / "corpus.jsonl").write_text(corpus)
        job = job_from(args)
        keys.append(rerank_job.job_key(job, rerank_job._requests(job)))
        (collection / "corpus.jsonl").write_text(corpus.replace(f"The {word}", "The violin"))
    assert keys[0] != keys[1]


def test_no_process_writes_before_all_have_read_what_is_done(
    model: Path, collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    original = rerank_job._score
    monkeypatch.setattr(rerank_job, "world", lambda: (1, 2))
    monkeypatch.setattr(rerank_job, "barrier", lambda *_, **__: events.append("wait"))
    monkeypatch.setattr(rerank_job, "_score", lambda *given: events.append("score") or original(*given))
    assert main(arguments(model, collection, tmp_path / "out.txt", "--depth", "3")) == 0
    assert events == ["wait", "score", "score", "score", "wait", "wait"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tag", "two words"], "tag 'two words'"),
        (["--meta", "{tmp}/out.txt"], "would be written twice"),
        (["--meta", "{tmp}"], "it is a folder"),
        (["--scores", "{tmp}/toy/queries.tsv/scores.jsonl"], "cannot be written"),
        (["--method", "icr"], "selects no heads"),
        (["--method", "core", "--heads", "all"], "all of them are method icr"),
        (["--scores", "{tmp}/toy/run.bm25.txt"], "is read by this very command"),
        (["--requests", "x.jsonl"], "leave out collection"),
    ],
)
def test_what_would_fail_at_the_end_fails_before_the_model_is_loaded(
    model: Path,
    collection: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(rerank_job, "build_rankers", lambda *_: pytest.fail("a model was loaded"))
    assert main(arguments(model, collection, tmp_path / "out.txt", *(flag.format(tmp=tmp_path) for flag in flags))) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_the_facts_name_the_order_that_the_heads_brought(model: Path, collection: Path, tmp_path: Path) -> None:
    HeadSet(((0, 1),), "test", "tiny", 4, 8, PromptTemplate(order="reversed")).save(collection / "heads.json")
    assert (
        main(arguments(model, collection, tmp_path / "out.txt", "--depth", "3", "--meta", str(tmp_path / "meta.json")))
        == 0
    )
    assert json.loads((tmp_path / "meta.json").read_text())["order"] == "reversed"


def test_the_first_batch_is_a_warm_up_and_counts_in_no_mean(model: Path, collection: Path, tmp_path: Path) -> None:
    files = ("--scores", str(tmp_path / "scores.jsonl"), "--meta", str(tmp_path / "meta.json"))
    assert main(arguments(model, collection, tmp_path / "run.txt", "--batch-size", "2", *files)) == 0
    rows = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row.get("is_warm_up", False) for row in rows] == [True, True, False, False, False, False]
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert (
        meta["seconds_per_query"] == pytest.approx(sum(row["seconds"] for row in rows[2:]) / 4)
        and meta["warm_up_queries"] == 2
    )
    alone = ("--only", str(tmp_path / "one.qids"), "--meta", str(tmp_path / "one.json"))
    (tmp_path / "one.qids").write_text("q0\n")
    assert main(arguments(model, collection, tmp_path / "one.txt", *alone)) == 0
    assert json.loads((tmp_path / "one.json").read_text())["seconds_per_query"] > 0, "a single batch is all there is"


class Backwards:
    """Other processes, as a job sees them: its lists scored one by one from the last to the first."""

    def facts(self) -> dict[str, Any]:
        return {"engine": "backwards", "processes": 3}

    def rows(self, job: RerankJob, requests: Sequence[Any]) -> Iterator[dict[str, Any]]:
        rankers = rerank_job.build_rankers(job)
        for request in reversed(requests):
            for batch in rerank_job.score_lists(job, rankers, [request]):
                yield from batch


def test_lists_scored_elsewhere_give_the_same_files_and_facts_without_a_model_here(
    model: Path, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(
        model,
        collection,
        tmp_path / "here.txt",
        "--meta",
        str(tmp_path / "here.json"),
        "--scores",
        str(tmp_path / "here.jsonl"),
    )
    assert main(args) == 0
    job = job_from(build_verb_parser("rerank").parse_args(args[1:]))
    there = dataclasses.replace(
        job.targets[0],
        output=str(tmp_path / "there.txt"),
        meta=str(tmp_path / "there.json"),
        scores=str(tmp_path / "there.jsonl"),
    )
    rerank_job.rerank(dataclasses.replace(job, targets=(there,)), Backwards())
    assert (tmp_path / "there.txt").read_text() == (tmp_path / "here.txt").read_text()
    here, facts = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("here", "there"))
    same = ("heads", "layers_used", "num_layers", "prompt_hash", "order", "tokens_per_query", "num_queries")
    assert {key: facts[key] for key in same} == {key: here[key] for key in same}
    assert (facts["engine"], facts["processes"], facts["peak_memory_bytes"]) == ("backwards", 3, None), (
        "memory here is not theirs"
    )


def test_partial_results_larger_than_memory_are_read_line_by_line(tmp_path: Path) -> None:
    first = PartialResults(tmp_path / "out.txt", "key", 0)
    first.add([{"query_id": "b", "n": 1}, {"query_id": "a", "n": 2}])
    first.close()
    path = next(tmp_path.glob("*.partial-key.0.jsonl"))
    # once more, and torn by a kill
    path.write_text(path.read_text() + '{"query_id": "b", "n": 9}\n{"query_id": "c", "n"')
    again = PartialResults(tmp_path / "out.txt", "key", 0, only_ids=True)
    assert again.done == {"a": {}, "b": {}}
    assert list(again.rows()) == [{"query_id": "b", "n": 1}, {"query_id": "a", "n": 2}]
