"""headrank import-lists: small files of every public shape become collections that the rest of the pipeline takes."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pytest

from data_tools.build_pairs import PairSettings, build_pairs
from data_tools.contexts import CONTEXTS_FILE
from data_tools.import_lists import ImportSettings, import_lists
from data_tools.labels.sources import find_label_runs
from headrank.commands import main
from headrank.errors import InputError
from headrank.formats import Collection

BGE = [
    {
        "query": "how  long do\nfleas live",
        "pos": ["Two months."],
        "neg": ["Rosin is resin.", "Concrete is dear."],
        "prompt": "p",
        "type": "n",
    },
    {"query": "what is rosin", "pos": ["Rosin is resin."], "neg": ["Two months.", "  "]},
]
TEVATRON = [
    {
        "query_id": "q1",
        "query": "how long do fleas live",
        "positive_passages": [{"docid": "d1", "title": "Flea", "text": "Two months."}],
        "negative_passages": [
            {"docid": "d2", "title": "", "text": "Rosin is resin."},
            {"docid": 3, "text": "Concrete\tis dear."},
        ],
        "subset": "nq",
    },
    {
        "query_id": "q2",
        "query": "what is rosin",
        "positive_passages": [{"docid": "d2", "title": "", "text": "Rosin is resin."}],
        "negative_passages": [{"docid": "d1", "title": "Flea", "text": "Two months."}],
    },
]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def imported(files, output, *flags: str):
    assert main(["import-lists", *map(str, files), "--output", str(output), *flags]) == 0
    return Collection.open(output)


def by_text(collection):
    """Query text -> {passage text: grade}."""
    texts, qrels = collection.documents(), collection.qrels()
    return {
        query: {texts[doc_id].text: grade for doc_id, grade in qrels[query_id].items()}
        for query_id, query in collection.queries().items()
    }


def test_a_bge_file_becomes_a_collection_whose_ids_come_from_the_texts(tmp_path):
    collection = imported([jsonl(tmp_path / "bge.jsonl", BGE)], tmp_path / "out")
    assert by_text(collection) == {
        "how long do fleas live": {"Two months.": 1, "Rosin is resin.": 0, "Concrete is dear.": 0},
        "what is rosin": {"Rosin is resin.": 1, "Two months.": 0},
    }
    assert len(collection.documents()) == 3, "a passage of two lists is stored once, an empty one not at all"
    assert {query_id: {row.doc_id for row in rows} for query_id, rows in collection.run().items()} == {
        query_id: set(judged) for query_id, judged in collection.qrels().items()
    }


def test_a_tevatron_file_keeps_its_ids_and_titles(tmp_path):
    with gzip.open(tmp_path / "rlhn.jsonl.gz", "wt") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in TEVATRON)
    collection = imported([tmp_path / "rlhn.jsonl.gz"], tmp_path / "out")
    assert collection.qrels() == {"q1": {"d1": 1, "d2": 0, "3": 0}, "q2": {"d2": 1, "d1": 0}}
    assert collection.documents()["d1"].title == "Flea" and collection.documents()["3"].text == "Concrete\tis dear."


def test_triples_of_texts_and_of_ids_give_the_same_judgements(tmp_path):
    triples = [
        ("how long do fleas live", "Two months.", bad)
        for bad in ("Rosin is resin.", "Concrete is dear.", "Rosin is resin.")
    ]
    triples.append(("what is rosin", "Rosin is resin.", "Two months."))
    (tmp_path / "texts.tsv").write_text("".join("\t".join(row) + "\n" for row in triples))
    names = {text: str(number) for number, text in enumerate(dict.fromkeys(text for row in triples for text in row))}
    (tmp_path / "ids.tsv").write_text("".join("\t".join(names[text] for text in row) + "\n" for row in triples))
    explained = "".join(f"{name}\t{text}\n" for text, name in names.items())
    for file in ("queries.tsv", "collection.tsv"):
        (tmp_path / file).write_text(explained + "99\tnobody asks for this\n")
    texts = imported([tmp_path / "texts.tsv"], tmp_path / "a")
    flags = ("--queries", str(tmp_path / "queries.tsv"), "--passages", str(tmp_path / "collection.tsv"))
    ids = imported([tmp_path / "ids.tsv"], tmp_path / "b", *flags)
    assert by_text(texts) == by_text(ids) and len(by_text(ids)["how long do fleas live"]) == 3
    assert "99" not in ids.documents() and set(ids.queries()) == {
        names["how long do fleas live"],
        names["what is rosin"],
    }


def test_scores_become_a_run_that_pairs_takes_as_labels(tmp_path, capsys):
    rows = [{**BGE[0], "pos_scores": [7.5], "neg_scores": [1, -2.25]}, BGE[1]]
    collection = imported([jsonl(tmp_path / "bge.jsonl", rows)], tmp_path / "out")
    assert "3 scores of a teacher: headrank pairs --labels" in capsys.readouterr().out
    runs = find_label_runs([str(tmp_path / "out" / "labels")], [collection])
    build_pairs([collection], tmp_path / "train", PairSettings(), label_runs=runs)
    (context,) = [json.loads(line) for line in (tmp_path / "train" / CONTEXTS_FILE).read_text().splitlines()]
    found = {document["text"]: document["teacher_score"] for document in context["documents"]}
    assert found == {"Two months.": 7.5, "Rosin is resin.": 1.0, "Concrete is dear.": -2.25}
    summary = json.loads((tmp_path / "train" / "pairs.summary.json").read_text())
    assert summary["labels"][0]["teacher"]["sources"][0] == {
        "file": "bge.jsonl",
        "bytes": (tmp_path / "bge.jsonl").stat().st_size,
        "format": "bge",
    }


def test_pairs_are_made_of_judgements_where_there_are_no_scores(tmp_path):
    collection = imported([jsonl(tmp_path / "rlhn.jsonl", TEVATRON)], tmp_path / "out")
    (count,) = build_pairs([collection], tmp_path / "train", PairSettings())
    assert count.pairs == 3


def many(number, num_bad=6):
    return [
        {"query": f"query {n}", "pos": [f"good {n}"], "neg": [f"bad {n} {k}" for k in range(num_bad)]}
        for n in range(number)
    ]


def test_the_run_does_not_tell_where_the_good_passages_are(tmp_path):
    collection = imported([jsonl(tmp_path / "lists.jsonl", many(60))], tmp_path / "out")
    qrels = collection.qrels()
    ranks = [row.rank for query_id, rows in collection.run().items() for row in rows if qrels[query_id][row.doc_id] > 0]
    assert set(ranks) == set(range(1, 8)), "every rank of seven has one in sixty lists"


def test_negatives_and_queries_are_drawn_with_the_seed(tmp_path):
    file = jsonl(tmp_path / "lists.jsonl", many(20))
    flags = ("--max-negatives", "2", "--max-queries", "5")
    first, again = (imported([file], tmp_path / name, *flags) for name in ("a", "b"))
    other = imported([file], tmp_path / "c", *flags, "--seed", "1")
    assert first.qrels() == again.qrels() != other.qrels()
    assert len(first.queries()) == 5 and all(sorted(judged.values()) == [0, 0, 1] for judged in first.qrels().values())
    assert len(first.documents()) == 15, "the corpus holds what the lists hold"


def test_parts_are_collections_of_their_own_with_labels_by_name(tmp_path):
    rows = [row | {"pos_scores": [1], "neg_scores": [0] * 6} for row in many(5)]
    import_lists([jsonl(tmp_path / "lists.jsonl", rows)], tmp_path / "out", ImportSettings(queries_per_part=2))
    parts = [Collection.open(tmp_path / "out" / f"out-{number:04d}") for number in range(3)]
    assert [len(part.queries()) for part in parts] == [2, 2, 1] and len(parts[0].documents()) == 14
    assert (
        len(
            build_pairs(
                parts,
                tmp_path / "t",
                PairSettings(),
                label_runs=find_label_runs([str(tmp_path / "out" / "labels")], parts),
            )
        )
        == 3
    )


def test_a_query_on_several_lines_is_one_list_and_good_beats_bad(tmp_path):
    rows = [BGE[0], {"query": "how long do fleas live", "pos": ["Concrete is dear."], "neg": ["New."]}]
    collection = imported([jsonl(tmp_path / "lists.jsonl", rows)], tmp_path / "out")
    assert by_text(collection) == {
        "how long do fleas live": {"Two months.": 1, "Rosin is resin.": 0, "Concrete is dear.": 1, "New.": 0}
    }
    assert json.loads((tmp_path / "out" / "import.json").read_text())["counts"]["good and bad"] == 1


def test_lists_that_teach_nothing_are_counted_and_left_out(tmp_path, capsys):
    rows = [BGE[0], {"query": "only good", "pos": ["x"], "neg": []}]
    collection = imported([jsonl(tmp_path / "lists.jsonl", rows)], tmp_path / "out")
    assert (
        len(collection.queries()) == 1
        and "1 queries without a good or without a bad passage" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], ":1: not JSON"),
        (['{"text": "x"}'], ":1: neither 'pos' (BGE) nor 'positive_passages'"),
        (["one\ttwo"], ":1: neither a JSON object"),
        ([], "no lists; the file is empty"),
        ([json.dumps(BGE[0]), '{"query": " ", "pos": []}'], ":2: 'query' must be a text, found ' '"),
        ([json.dumps(BGE[0]), '{"query": "x", "pos": "text"}'], ":2: 'pos' must be a list of texts"),
        (
            [json.dumps({**BGE[0], "pos_scores": [1, 2]})],
            ":1: 'pos_scores' must hold a number for each of the 1 texts of 'pos', found 2",
        ),
        ([json.dumps({**BGE[0], "pos_scores": ["much"]})], ":1: the score 'much' is not a finite number"),
        (
            [json.dumps({**TEVATRON[0], "negative_passages": ["x"]})],
            ":1: 'negative_passages' must be a list of objects",
        ),
        (
            [json.dumps({**TEVATRON[0], "negative_passages": [{"docid": "x"}]})],
            ":1: a passage of 'negative_passages' needs a 'text'",
        ),
        ([json.dumps({**TEVATRON[0], "query_id": [1]})], ":1: the id '[1]' is neither a text nor a whole number"),
        (
            [json.dumps(TEVATRON[0]), json.dumps({**TEVATRON[1], "query_id": "q1"})],
            ":2: query id 'q1' had another text",
        ),
        (["a\tb\tc", "a\tb"], ":2: expected 'query<TAB>good passage<TAB>bad passage'"),
        ([json.dumps({"query": "x", "pos": ["y"], "neg": []})], "no query has a good and a bad passage"),
    ],
)
def test_a_mistake_is_one_line_with_file_and_line_and_leaves_nothing(tmp_path, capsys, lines, words):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "lists").write_text("".join(line + "\n" for line in lines))
    assert main(["import-lists", str(tmp_path / "in" / "lists"), "--output", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_contradicting_ids_can_be_replaced_by_the_texts(tmp_path):
    rows = [TEVATRON[0], {**TEVATRON[1], "query_id": "q1"}]
    collection = imported([jsonl(tmp_path / "lists.jsonl", rows)], tmp_path / "out", "--ids-from-text")
    assert set(by_text(collection)) == {"how long do fleas live", "what is rosin"}


def test_an_id_without_a_text_and_a_half_given_pair_of_files_are_refused(tmp_path):
    (tmp_path / "ids.tsv").write_text("1\t2\t3\n")
    (tmp_path / "queries.tsv").write_text("1\tquery\n")
    (tmp_path / "collection.tsv").write_text("2\tgood\n")
    files = {"queries": tmp_path / "queries.tsv", "passages": tmp_path / "collection.tsv"}
    with pytest.raises(InputError, match="collection.tsv: has no text for passage id '3'"):
        import_lists([tmp_path / "ids.tsv"], tmp_path / "out", ImportSettings(), **files)
    with pytest.raises(InputError, match="give both, or none"):
        import_lists([tmp_path / "ids.tsv"], tmp_path / "out", ImportSettings(), queries=tmp_path / "queries.tsv")


def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for number in (50, 1000):  # 1000 lists hold 7,000 passages of 2 KB: 14 MB
        rows = [
            {
                "query": f"query {n}",
                "pos": [f"good {n} " + "x" * 2000],
                "neg": [f"bad {n} {k} " + "x" * 2000 for k in range(6)],
            }
            for n in range(number)
        ]
        file = jsonl(tmp_path / f"{number}.jsonl", rows)
        del rows
        tracemalloc.start()
        import_lists([file], tmp_path / f"out-{number}", ImportSettings())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1_000_000
