"""Tiny collections and training files made by code."""

from __future__ import annotations

from pathlib import Path

from headrank.formats import Collection, write_jsonl, write_run

GRADES = {"a/q1": [2, 1, 0, None, 1], "a/q2": [1, 0], "b/q3": [3, 2, 2, 2, 2, 2, 2, 1, 1]}


def make_collection(folder: Path, grades: dict[str, list[int | None]], prefix: str = "d") -> Collection:
    """A collection whose queries have the given grades at ranks 1, 2, ..."""
    folder.mkdir(parents=True)
    (folder / "queries.tsv").write_text("".join(f"{query_id}\tquery {query_id}\n" for query_id in grades))
    rows = {
        query_id: [(f"{prefix}{query_id}-{i}", 100.0 - i) for i in range(len(listed))]
        for query_id, listed in grades.items()
    }
    write_run(folder / "run.bm25.txt", rows, "bm25")
    write_jsonl(
        folder / "corpus.jsonl",
        (
            {"docid": doc_id, "title": "", "text": f"text of {doc_id}"}
            for listed in rows.values()
            for doc_id, _ in listed
        ),
    )
    lines = [
        f"{q} 0 {doc_id} {grade}\n"
        for q, listed in grades.items()
        for (doc_id, _), grade in zip(rows[q], listed, strict=True)
        if grade is not None
    ]
    (folder / "qrels.txt").write_text("".join(lines) + "elsewhere 0 x 1\n")
    return Collection.open(folder)


def write_training_files(folder: Path, grades: dict[str, list[int | None]] = GRADES) -> Path:
    """contexts.jsonl and pairs.jsonl with all adjacent pairs of the given lists."""
    contexts, pairs = [], []
    for context_id, listed in grades.items():
        query_id = context_id.split("/")[1]
        documents = [
            {
                "doc_id": f"{query_id}d{i}",
                "title": "",
                "text": f"passage number {i} of {query_id} about fleas",
                "rank": 2 * i + 1,
                "grade": grade,
            }
            for i, grade in enumerate(listed)
        ]
        contexts.append(
            {"context_id": context_id, "query_id": query_id, "query": f"what is {query_id}", "documents": documents}
        )
        pairs += [
            {
                "context_id": context_id,
                "query_id": query_id,
                "chosen": high["doc_id"],
                "rejected": low["doc_id"],
                "chosen_grade": high["grade"],
                "rejected_grade": low["grade"],
            }
            for high in documents
            for low in documents
            if high["grade"] is not None and low["grade"] is not None and high["grade"] - low["grade"] == 1
        ]
    write_jsonl(folder / "contexts.jsonl", contexts)
    write_jsonl(folder / "pairs.jsonl", pairs)
    return folder
