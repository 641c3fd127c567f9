"""Readers and writers: what they accept, and that a bad line is named by file and number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headrank.errors import InputError
from headrank.formats import (
    Candidate,
    Collection,
    Document,
    atomic_write,
    iterate_corpus,
    read_corpus,
    read_json,
    read_lines,
    read_qrels,
    read_queries,
    read_run,
    write_jsonl,
    write_run,
)

QUERIES = "q1\tfirst query\nq2\tsecond\twith a tab\n"
QRELS = "q1 0 d1 3\nq1 0 d2 -1\nq2 0 d1 0\n"
RUN = "q1 Q0 d2 2 1.5 tag\nq1 Q0 d1 1 2.5 tag\nq2 Q0 d1 1 -0.5 tag\n"
CORPUS = '{"docid": "d1", "title": "T", "text": "body"}\n{"_id": "d2", "contents": "other"}\n{"id": 3, "text": ""}\n'


def write(tmp_path: Path, content: str | bytes, name: str = "file.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def disguises(content: str) -> list[bytes]:
    """The same lines as other systems write them."""
    plain = content.encode()
    windows = content.replace("\n", "\r\n").encode()
    bom = b"\xef\xbb\xbf"
    return [
        plain,
        windows,
        bom + plain,
        bom + windows,
        plain.rstrip(b"\n"),
        plain.replace(b"\n", b"\n\n"),
        gzip.compress(plain),
        gzip.compress(bom + windows),
    ]


@pytest.mark.parametrize(
    ("reader", "content"), [(read_queries, QUERIES), (read_qrels, QRELS), (read_run, RUN), (read_corpus, CORPUS)]
)
def test_readers_accept_byte_order_marks_windows_line_ends_blank_lines_and_gzip(
    tmp_path: Path, reader: object, content: str
) -> None:
    results = [reader(write(tmp_path, disguise)) for disguise in disguises(content)]
    assert all(result == results[0] for result in results)
    assert len(results[0]) >= 2


def test_the_four_formats_are_read_as_written(tmp_path: Path) -> None:
    assert read_queries(write(tmp_path, QUERIES)) == {"q1": "first query", "q2": "second\twith a tab"}
    assert read_qrels(write(tmp_path, QRELS)) == {"q1": {"d1": 3, "d2": -1}, "q2": {"d1": 0}}
    assert read_run(write(tmp_path, RUN))["q1"] == [Candidate("d1", 1, 2.5), Candidate("d2", 2, 1.5)]
    assert read_corpus(write(tmp_path, CORPUS)) == {
        "d1": Document("d1", "T", "body"),
        "d2": Document("d2", "", "other"),
        "3": Document("3", "", ""),
    }


@pytest.mark.parametrize(
    ("reader", "content", "line", "words"),
    [
        (read_queries, "q1\tok\nq2 no tab\n", 2, "TAB"),
        (read_queries, "q1\tok\nq2\t  \n", 2, "TAB"),
        (read_queries, "q1\tok\nq1\tagain\n", 2, "twice"),
        (read_queries, "q1\tlines of\rq2\tan old Macintosh\r", 1, "convert the line ends"),
        (read_queries, "q1\tok\nq 2\tspace\n", 2, "space"),
        (read_qrels, "q1 0 d1 1\n\nq1 0 d2\n", 3, "expected"),
        (read_qrels, "q1 0 d1 1\nq1 0 d2 high\n", 2, "grade 'high' is not an integer"),
        (read_qrels, "q1 0 d1 1\nq1 0 d2 1.0\n", 2, "grade '1.0' is not an integer"),
        (read_qrels, "q1 0 d1 1\nq1 0 d2 1_0\n", 2, "not an integer"),
        (read_qrels, "q1 0 d1 1\nq1 0 d2 ٣\n", 2, "not an integer"),
        (read_qrels, "q1 0 d1 1\nq1 0 d2 99999999999\n", 2, "not an integer"),
        (read_qrels, "q1 0 d1 1\nq1 0 d1 2\n", 2, "two grades"),
        (read_run, "q1 Q0 d1 1 2.0 t\nq1 Q0 d2 2 1.0\n", 2, "expected"),
        (read_run, "q1 Q0 d1 1 2.0 t\nq1 Q0 d2 second 1.0 t\n", 2, "rank 'second'"),
        (read_run, "q1 Q0 d1 1 2.0 t\nq1 Q0 d2 2 one t\n", 2, "score 'one'"),
        (read_run, "q1 Q0 d1 1 2.0 t\nq1 Q0 d2 2 nan t\n", 2, "finite"),
        (read_run, "q1 Q0 d1 1 2.0 t\nq1 Q0 d2 2 1_0 t\n", 2, "finite"),
        (read_run, "q1 Q0 d1 1 2.0 t\nq1 Q0 d1 2 1.0 t\n", 2, "twice"),
        (read_corpus, '{"docid": "d1", "text": ""}\n{"docid": "d2", "text"\n', 2, "not JSON"),
        (read_corpus, '{"docid": "d1", "text": ""}\n["d2", "text"]\n', 2, "object"),
        (read_corpus, '{"docid": "d1", "text": ""}\n{"docid": "d 2", "text": ""}\n', 2, "spaces"),
        (read_corpus, '{"docid": "d1", "text": ""}\n{"text": "nameless"}\n', 2, "docid"),
        (read_corpus, '{"docid": "d1", "text": ""}\n{"docid": "d2", "text": null}\n', 2, "text"),
        (read_corpus, '{"docid": "d1", "text": ""}\n{"docid": "d2", "text": "", "title": 7}\n', 2, "title"),
        (read_corpus, '{"docid": "d1", "text": ""}\n{"docid": "d1", "text": ""}\n', 2, "twice"),
        (read_corpus, '{"docid": "d1", "text": ""}\n{"docid": "d2", "text": "\\ud800"}\n', 2, "surrogate"),
        (read_corpus, '{"docid": "d1", "text": ""}\n{"docid": ' + "9" * 5000 + ', "text": ""}\n', 2, "not JSON"),
        (read_corpus, '{"docid": "d1", "text": ""}\n' + "[" * 100_000 + "\n", 2, "nested"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(
    tmp_path: Path, reader: object, content: str, line: int, words: str
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InputError) as raised:
        reader(path)
    assert str(raised.value).startswith(f"{path}:{line}: ")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400 + len(str(path))


@pytest.mark.parametrize("reader", [read_queries, read_qrels, read_run, read_corpus])
# mtime=0: the time of collection must not stand in the names of tests, or parallel workers disagree about them
@pytest.mark.parametrize("content", [b"", b"\n \r\n\t\n", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_an_empty_file_is_an_error_that_says_so(tmp_path: Path, reader: object, content: bytes) -> None:
    with pytest.raises(InputError, match="empty"):
        reader(write(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"q1\tfine\nq2\t\xff\xfe\n", ":2: not UTF-8"),
        ("q1\tfine\n".encode("utf-16"), ":1: not UTF-8"),
        (gzip.compress(b"q1\tfine\n" * 5000, mtime=0)[:-20], "cannot be read"),
        (gzip.compress(b"q1\tfine\n", mtime=0)[:12] + b"\x00garbage\x00" * 9, "cannot be read"),
    ],
)
def test_broken_encodings_and_broken_archives_are_named(tmp_path: Path, content: bytes, place: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InputError, match=str(path)) as raised:
        list(read_lines(path))
    assert place in str(raised.value)


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_queries(tmp_path / "absent.tsv")
    with pytest.raises(InputError, match="folder"):
        read_queries(tmp_path)
    with pytest.raises(InputError, match="not a JSON file"):
        read_json(write(tmp_path, "{"))


def test_one_bad_line_in_a_million_is_found_and_the_file_is_read_as_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "qrels.txt.gz"
    bad = 777_777
    with gzip.open(path, "wt", compresslevel=1) as stream:
        stream.writelines(f"q{n // 1000} 0 d{n} {'x' if n == bad else n % 4}\n" for n in range(1, 1_000_001))
    with pytest.raises(InputError, match=rf"qrels\.txt\.gz:{bad}: grade 'x' is not an integer"):
        read_qrels(path)
    lines = read_lines(path)
    assert next(lines) == (1, "q0 0 d1 1")  # nothing beyond the first block has been read yet
    lines.close()


def test_tied_ranks_keep_the_order_of_the_file(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, "q Q0 b 0 1 t\nq Q0 a 0 1 t\nq Q0 c 0 1 t\n"))
    assert [(row.doc_id, row.rank) for row in run["q"]] == [("b", 1), ("a", 2), ("c", 3)]


def test_ranks_are_numbered_from_one_whatever_the_file_says(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, "q Q0 c 9 1 t\nq Q0 a 0 3 t\nq Q0 b 4 2 t\n"))
    assert [(row.doc_id, row.rank) for row in run["q"]] == [("a", 1), ("b", 2), ("c", 3)]


def test_a_written_run_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.txt"
    write_run(path, {"q": [("b", 0.1 + 0.2), ("a", -1e-9)]}, "tag")
    assert read_run(path)["q"] == [Candidate("b", 1, 0.3), Candidate("a", 2, -1e-9)]


def test_nothing_is_left_behind_when_writing_fails(tmp_path: Path) -> None:
    path = write(tmp_path, "old", "rows.jsonl")

    def rows() -> object:
        yield {"n": 1}
        raise InputError("half way")

    with pytest.raises(InputError, match="half way"):
        write_jsonl(path, rows())
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_file_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    write(tmp_path, "a file", "file")
    for target in (tmp_path, tmp_path / "file" / "inside.txt"):
        with pytest.raises(InputError, match="cannot be written"), atomic_write(target):
            raise AssertionError("never reached")


def test_a_collection_names_its_missing_parts(tmp_path: Path) -> None:
    write(tmp_path, QUERIES, "queries.tsv")
    with pytest.raises(InputError, match=r"corpus\.jsonl"):
        Collection.open(tmp_path)
    write(tmp_path, gzip.compress(CORPUS.encode()), "corpus.jsonl.gz")
    collection = Collection.open(tmp_path)
    with pytest.raises(InputError, match="`qrels`"):
        collection.qrels()
    with pytest.raises(InputError, match="headrank retrieve"):
        collection.run()
    with pytest.raises(InputError, match="'d9'"):
        collection.documents({"d1", "d9"})
    assert [document.doc_id for document in iterate_corpus(collection.corpus_path)] == ["d1", "d2", "3"]
    single = write(tmp_path, json.dumps({"docid": "x", "text": "y"}), "other.jsonl")
    assert list(Collection.open(tmp_path, corpus=str(single)).documents()) == ["x"]


def test_every_file_of_a_collection_may_be_gzipped(tmp_path: Path) -> None:
    for name, content in (
        ("queries.tsv", QUERIES),
        ("corpus.jsonl", CORPUS),
        ("qrels.txt", QRELS),
        ("run.bm25.txt", RUN),
    ):
        write(tmp_path, gzip.compress(content.encode()), f"{name}.gz")
    collection = Collection.open(tmp_path)
    assert (len(collection.queries()), len(collection.documents()), len(collection.qrels()), len(collection.run())) == (
        2,
        3,
        2,
        2,
    )
