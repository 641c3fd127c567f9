"""HippoRAG's and ICR's JSON files as benchmarks: small files of the same shape, with the recall that their own code
would give.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_tools.sources.paragraph_json import read_questions
from headrank.commands import main
from headrank.formats import read_qrels, read_queries, read_run

CORPUS = [{"title": f"T{n}", "text": f"passage number {n}", "idx": n} for n in range(6)]


def paragraph(number: int, is_supporting: bool) -> dict[str, Any]:
    return {"title": f"T{number}", "paragraph_text": f"passage number {number}", "is_supporting": is_supporting}


def icr_file(folder: Path) -> Path:
    """Two questions of three candidates; the first has three gold passages, of which two were retrieved."""
    listed = [[(3, False), (1, True), (0, True)], [(5, True), (4, False), (3, False)]]
    rows = [
        {
            "id": f"x{n}",
            "question": f"question {n}?",
            "num_gold_docs": gold,
            "paragraphs": [paragraph(*each) for each in one],
        }
        for n, (one, gold) in enumerate(zip(listed, (3, 1), strict=True))
    ]
    path = folder / "icr_multihop_musique_colbertv2_top_20.json"
    path.write_text(json.dumps(rows))
    return path


def hippo_file(folder: Path, name: str = "musique") -> Path:
    """MuSiQue's layout with the corpus beside it, and ColBERT's ranking of the same lists."""
    rows = [
        {
            "id": "x0",
            "question": "question 0?",
            "paragraphs": [paragraph(2, True), paragraph(0, True), paragraph(1, True), paragraph(4, False)],
        },
        {"id": "x1", "question": "question 1?", "paragraphs": [paragraph(5, True), paragraph(4, False)]},
    ]
    (folder / f"{name}_corpus.json").write_text(json.dumps(CORPUS))
    (folder / f"{name}.json").write_text(json.dumps(rows))
    ranked = {0: [3, 1, 0], 1: [5, 4, 3]}
    lines = [
        f"{query}\t{passage}\t{rank}\t{9.5 - rank}"
        for query, found in ranked.items()
        for rank, passage in enumerate(found, start=1)
    ]
    (folder / "ranking.tsv").write_text("\n".join(lines) + "\n")
    return folder / f"{name}.json"


def prepare(home: Path, *words: object) -> int:
    return main(["benchmark", "prepare", *map(str, words), "--home", str(home)])


def test_icrs_file_holds_the_candidates_and_unretrieved_gold_stays_in_the_judgements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(tmp_path, "musique", "--from", icr_file(tmp_path)) == 0
    folder = tmp_path / "musique"
    assert read_queries(folder / "queries.tsv") == {"0": "question 0?", "1": "question 1?"}  # by place, as ICR counts
    qrels = read_qrels(folder / "qrels.txt")
    assert len(qrels["0"]) == 3 and len(qrels["1"]) == 1
    assert [len(rows) for rows in read_run(folder / "run.bm25.txt").values()] == [3, 3]
    # Recall@2: 1 of 3 and 1 of 1; Recall@5: 2 of 3 and 1 of 1
    printed = capsys.readouterr().out
    assert "R@2 of the candidates: 66.67; the paper's colbertv2: 37.94" in printed
    assert "R@5 of the candidates: 83.33; the paper's colbertv2: 49.52" in printed


def test_hipporags_file_with_colberts_ranking_gives_the_same_recall(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(tmp_path, "musique", "--from", hippo_file(tmp_path), "--run", tmp_path / "ranking.tsv") == 0
    printed = capsys.readouterr().out
    assert "R@2 of the candidates: 66.67" in printed and "R@5 of the candidates: 83.33" in printed
    qrels = read_qrels(tmp_path / "musique" / "qrels.txt")
    assert qrels == {"0": {"2": 1, "0": 1, "1": 1}, "1": {"5": 1}}


def test_a_trec_run_serves_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.txt").write_text("0 Q0 3 1 3 c\n0 Q0 1 2 2 c\n0 Q0 0 3 1 c\n1 Q0 5 1 9 c\n")
    assert prepare(tmp_path, "2wiki", "--from", hippo_file(tmp_path), "--run", tmp_path / "run.txt") == 0
    assert "R@2 of the candidates: 66.67" in capsys.readouterr().out


def test_hotpotqas_layout_names_gold_by_title_and_its_corpus_is_a_dictionary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"_id": "h", "question": "q?", "supporting_facts": [["A", 0], ["B", 1], ["A", 1]]}
    row["context"] = [["A", ["one. ", "two."]], ["B", ["three."]], ["C", ["four."]]]
    (tmp_path / "hotpotqa.json").write_text(json.dumps([row]))
    (tmp_path / "hotpotqa_corpus.json").write_text(
        json.dumps({"C": ["four."], "A": ["one. ", "two."], "B": ["three, otherwise."]})
    )
    (tmp_path / "ranking.tsv").write_text("0\t1\t1\n0\t0\t2\n")
    assert prepare(tmp_path, "hotpotqa", "--from", tmp_path / "hotpotqa.json", "--run", tmp_path / "ranking.tsv") == 0
    # B's text differs; its title decides
    assert read_qrels(tmp_path / "hotpotqa" / "qrels.txt") == {"0": {"1": 1, "2": 1}}
    assert "R@2 of the candidates: 50.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["musique"], "has no candidates; give a run of colbertv2 with --run"),
        (["dl19"], "JSON files are read for hotpotqa, 2wiki and musique"),
        (["musique", "--run", "none.tsv"], "none.tsv: no such file"),
    ],
)
def test_what_is_missing_is_said_with_the_flag(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = hippo_file(tmp_path)
    assert prepare(tmp_path, words[0], "--from", path, *words[1:]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / words[0]).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": ""}, "question 1: needs a 'question'"),
        ({"paragraphs": [{"title": "T", "text": "x"}]}, "question 1, paragraph 0: needs is_supporting"),
        ({"paragraphs": []}, "question 1: has neither 'paragraphs' nor 'context'"),
        ({"num_gold_docs": 0}, "1 supporting paragraphs, and num_gold_docs is 0"),
        ({"num_gold_docs": "3"}, "'num_gold_docs' must be a whole number, found '3'"),
    ],
)
def test_a_wrong_question_is_named_by_its_place(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = icr_file(tmp_path)
    rows = json.loads(path.read_text())
    rows[1] |= change
    path.write_text(json.dumps(rows))
    assert prepare(tmp_path, "musique", "--from", path) == 2
    assert message in capsys.readouterr().err


def test_a_ranking_of_other_questions_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = hippo_file(tmp_path)
    (tmp_path / "ranking.tsv").write_text("0\t1\t1\n7\t1\t1\n")
    assert prepare(tmp_path, "musique", "--from", path, "--run", tmp_path / "ranking.tsv") == 2
    assert "ranking.tsv:2: question 7 is not among the 2" in capsys.readouterr().err


def test_cores_lists_mark_positives_and_hard_negatives_and_leave_the_rest_open(tmp_path: Path) -> None:
    marks = [(True, False), (False, True), (False, False)]
    rows = [
        {"question": "q", "paragraphs": [{"paragraph_text": "t", "is_positive": p, "is_negative": n} for p, n in marks]}
    ]
    (tmp_path / "nq_core.json").write_text(json.dumps(rows))
    assert [each.grade for each in read_questions(tmp_path / "nq_core.json")[0].paragraphs] == [1, 0, None]


def test_a_colbert_model_makes_the_candidates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library with a tiny checkpoint in the layout of ColBERTv2's own, and the MaxSim of a loop."""
    pytest.importorskip("sentence_transformers", minversion="6.0")
    from data_tools.sources.colbert_engine import load_colbert, search_colbert
    from headrank.formats import Document
    from tests.tiny_models import make_tiny_colbert

    folder = make_tiny_colbert(tmp_path / "colbert")
    assert prepare(tmp_path, "musique", "--from", hippo_file(tmp_path), "--colbert", folder) == 0
    assert "exact MaxSim" in capsys.readouterr().out
    encoder = load_colbert(str(folder), "cpu")
    documents = [Document(str(n), each["title"], each["text"]) for n, each in enumerate(CORPUS)]
    found = search_colbert(encoder, documents, {"0": "question 0?"}, 6)["0"]
    (query,) = encoder.encode_query(["question 0?"])
    passages = encoder.encode_document([f"{each['title']} {each['text']}" for each in CORPUS])
    slow = [sum(max(float(q @ d) for d in passage) for q in query) for passage in passages]
    assert dict(found) == pytest.approx({str(n): value for n, value in enumerate(slow)}, abs=1e-4)
    assert [doc_id for doc_id, _ in found] == sorted(map(str, range(6)), key=lambda n: -slow[int(n)])
    assert read_run(tmp_path / "musique" / "run.bm25.txt").keys() == {"0", "1"}
