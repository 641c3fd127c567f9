"""`headrank select-heads --method readout` on a tiny model: from lists and labels to a file that reranks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from headrank import HeadRankReranker, HeadSet
from headrank.commands import main
from headrank.selection.readout_statistics import LateStatistics, PromptStatistics
from tests.tiny_models import make_tiny_model

WORDS = "the flea lives for two months and a floor costs six dollars while rosin helps the bow".split()
NUM_QUERIES, NUM_PASSAGES = 8, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight queries of five passages; the teacher likes passages that repeat the query's words."""
    folder = tmp_path_factory.mktemp("fit") / "toy"
    folder.mkdir()
    chance = random.Random(0)
    queries = {f"q{number}": " ".join(chance.sample(WORDS, 3)) for number in range(NUM_QUERIES)}
    corpus, run, qrels, labels = [], [], [], []
    for query_id, query in queries.items():
        for place in range(NUM_PASSAGES):
            doc_id, share = f"{query_id}-{place}", chance.random()
            words = [chance.choice(query.split() if chance.random() < share else WORDS) for _ in range(4 + 3 * place)]
            corpus.append(json.dumps({"docid": doc_id, "title": "", "text": " ".join(words)}))
            run.append(f"{query_id} Q0 {doc_id} {place + 1} {9 - place} bm25")
            qrels.append(f"{query_id} 0 {doc_id} {int(share > 0.5)}")
            labels.append(f"{query_id} Q0 {doc_id} {place + 1} {8 * share:.4f} teacher")
    (folder / "queries.tsv").write_text("".join(f"{name}\t{text}\n" for name, text in queries.items()))
    for name, lines in {"corpus.jsonl": corpus, "run.bm25.txt": run, "qrels.txt": qrels, "labels.trec": labels}.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def fit(model: Path, collection: Path, output: Path, *more: str) -> int:
    given = [
        "--method",
        "readout",
        "--model",
        str(model),
        "--collection",
        str(collection),
        "--num-folds",
        "4",
        "--output",
        str(output),
    ]
    return main(["select-heads", *given, "--labels", str(collection / "labels.trec"), "--device", "cpu", *more])


def test_a_fit_prints_its_table_and_writes_a_readout_that_reranks(
    model: Path, collection: Path, tmp_path: Path, capsys
) -> None:
    more = (
        "--max-layer",
        "2",
        "4",
        "--groups",
        "2",
        "16",
        "--tolerance",
        "100",
        "--l2",
        "0.01",
        "--cache",
        str(tmp_path / "cache"),
    )
    assert (
        fit(
            model,
            collection,
            tmp_path / "heads.json",
            *more,
            "--test-length",
            "--report",
            str(tmp_path / "report.json"),
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert (
        "first stage" in printed
        and printed.count("0.1,0.01") == 5 * 4
        and "* " in printed
        and "log of the length" in printed
    )
    heads = HeadSet.load(tmp_path / "heads.json")
    assert heads.prompt.is_late and heads.prompt.opening == "<|im_start|>user\n" and heads.prompt.branch_position == 512
    assert heads.l_max <= 1 and len(heads.heads) == 4, (
        "two groups of two heads: the cheapest of all, as the tolerance allows"
    )
    assert heads.readout is not None
    facts = heads.readout.fit
    assert (
        facts["lists"] == {"toy": NUM_QUERIES}
        and facts["teacher"][0]["file"] == "labels.trec"
        and facts["labels"] == "teacher"
    )
    assert [row["is_chosen"] for row in facts["cross_validation"]] == [True, False, False, False]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["with_length"] for row in report["rows"]] == [False] * 4 + [True] and len(
        report["folds"]
    ) == NUM_QUERIES
    for row in [report["first_stage"], *report["rows"]]:
        assert (
            row["quality"] == pytest.approx(np.mean(list(row["per_query"].values())), abs=0.01)
            and len(row["per_query"]) == NUM_QUERIES
        )
    assert (tmp_path / "heads.png").stat().st_size > 10_000 and (tmp_path / "heads.pdf").is_file()
    assert len(list((tmp_path / "cache").iterdir())) == NUM_QUERIES
    assert fit(model, collection, tmp_path / "again.json", *more, "--no-picture") == 0
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "heads.json").read_bytes()
    reranker = HeadRankReranker.from_pretrained(model, tmp_path / "heads.json", device="cpu")
    assert len(reranker.rank("flea lives", ["a flea lives", "rosin", "the bow"])) == 3


def test_equal_weights_say_so_in_the_file(model: Path, collection: Path, tmp_path: Path) -> None:
    assert fit(model, collection, tmp_path / "heads.json", "--equal-weights", "--groups", "2", "--no-picture") == 0
    readout = HeadSet.load(tmp_path / "heads.json").readout
    assert readout is not None and readout.weights == (0.25,) * 4 and readout.fit["weights"] == "equal"


@pytest.mark.parametrize("layout", ["parallel", "sequential", "late"])
def test_scores_of_the_written_readout_are_those_of_the_fitted_statistics(
    model: Path, collection: Path, tmp_path: Path, layout: str
) -> None:
    """What the fit saw is what the reranker computes: weights times log masses of the same heads, list by list."""
    more = ("--fit-to", "judged", "--document-layout", layout, "--dtype", "float32", "--no-picture")
    assert fit(model, collection, tmp_path / "heads.json", *more) == 0
    heads = HeadSet.load(tmp_path / "heads.json")
    assert heads.prompt.document_layout == layout and len(heads.heads) == 32 and heads.readout is not None
    reranker = HeadRankReranker.from_pretrained(model, heads, device="cpu", dtype="float32")
    documents = [("", "the flea lives for two months"), ("", "a floor costs six dollars"), ("", "rosin")]
    source = LateStatistics if layout == "late" else PromptStatistics
    found = source(reranker.reader, heads.prompt).of("how long does a flea live", documents)
    columns = [layer * 8 + head for layer, head in heads.heads]
    values = found.ratios_NKR[:, columns].astype(np.float64) - np.array(heads.readout.offsets)[:, None]
    expected = np.log(np.exp(values) + heads.readout.floor).mean(-1) @ np.array(heads.readout.weights)
    scores = reranker.score("how long does a flea live", [text for _, text in documents])
    assert np.abs(scores - expected).max() < 0.02 * max(1.0, np.ptp(expected)), "statistics are kept in half precision"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--labels", "other.trec"), "2 times for 1 collections"),
        (("--max-layer", "9"), "has only 4 layers"),
        (("--method", "readout", "core"), "run it alone"),
        (("--equal-weights", "--test-length"), "leave one out"),
        (("--hold-out", "{folder}/all.txt"), "no query has candidates and labels"),
    ],
)
def test_what_cannot_be_fitted_is_one_line(
    model: Path, collection: Path, tmp_path: Path, capsys, more: tuple[str, ...], said: str
) -> None:
    (collection / "all.txt").write_text("".join(f"q{number}\n" for number in range(NUM_QUERIES)))
    assert fit(model, collection, tmp_path / "heads.json", *(text.format(folder=collection) for text in more)) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "heads.json").exists()
