"""A toy training job made by code: a tiny random model, its heads.json, and a few contexts with graded documents."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from headrank.method.heads import HeadSet
from tests.tiny_models import SIZES, make_tiny_model

_WORDS = (
    "flea host warm cycle concrete floor dollar square foot rosin bow grip string violin passage document query months"
).split()
HEADS = ((1, 2), (0, 5), (2, 1), (2, 6))  # l_max = 2 of layers 0..3, spread over both halves of the heads


@dataclass(frozen=True)
class ToyJob:
    """Directories of a toy job."""

    model: Path
    heads: Path
    train: Path
    valid: Path

    def flags(self, *more: str) -> list[str]:
        """The flags that name them, plus small defaults."""
        return [
            *(
                "--headrank-model",
                str(self.model),
                "--headrank-heads",
                str(self.heads),
                "--train-data-path",
                str(self.train),
            ),
            *("--lr", "1e-3", "--log-interval", "1", "--headrank-pairs-per-context", "4", *more),
        ]


def make_toy_job(
    directory: Path, *, num_queries: int = 6, num_documents: int = 8, seed: int = 0, family: str = "qwen3"
) -> ToyJob:
    """Write everything; documents of grade g repeat g of the query's words, so there is something to learn."""
    model = make_tiny_model(directory / "model", family, seed=seed)
    heads = HeadSet(HEADS, "headrank", str(model), SIZES["num_hidden_layers"], SIZES["num_attention_heads"])
    heads.save(directory / "heads.json")
    for name, first, count in (("train", 0, num_queries), ("valid", num_queries, 3)):
        write_toy_lists(directory / name, first, count, num_documents)
    return ToyJob(model, directory / "heads.json", directory / "train", directory / "valid")


def make_toy_collection(directory: Path, *, num_queries: int = 8, num_documents: int = 8) -> Path:
    """The same kind of texts as a collection folder, with query ids for training (all but two) and held out (two)."""
    directory.mkdir(parents=True)
    queries, corpus, qrels, run = [], [], [], []
    for number in range(num_queries):
        query, documents = _documents(number, num_documents)
        queries.append(f"q{number}\t{query}\n")
        for document in documents:
            name = f"q{number}-{document['doc_id']}"
            corpus.append(json.dumps({"docid": name, "title": "", "text": document["text"]}) + "\n")
            qrels.append(f"q{number} 0 {name} {document['grade']}\n")
            run.append(f"q{number} Q0 {name} {document['rank']} {100 - document['rank']} toy\n")
    ids = [f"q{number}\n" for number in range(num_queries)]
    files = {"queries.tsv": queries, "corpus.jsonl": corpus, "qrels.txt": qrels, "run.bm25.txt": run}
    for name, lines in {**files, "train.qids": ids[:-2], "heldout.qids": ids[-2:]}.items():
        (directory / name).write_text("".join(lines))
    return directory


def _documents(number: int, num_documents: int, num_words: int = 6) -> tuple[str, list[dict]]:
    """A query of three words and its documents of at least ``num_words``; a document of grade g holds g of the
    query's.
    """
    rng = random.Random(number)
    words = rng.sample(_WORDS, 3)
    grades = [rng.randrange(4) for _ in range(num_documents - 4)] + [0, 1, 2, 3]
    documents = []
    for rank, grade in enumerate(grades, start=1):
        text = rng.choices(_WORDS, k=num_words + rng.randrange(5)) + words[:grade]
        rng.shuffle(text)
        documents.append({"doc_id": f"d{rank}", "title": "", "text": " ".join(text), "rank": rank, "grade": grade})
    return " ".join(words), documents


def write_toy_lists(
    directory: Path, first_query: int, num_queries: int, num_documents: int, num_words: int = 6
) -> None:
    """contexts.jsonl and pairs.jsonl of some queries."""
    directory.mkdir(parents=True)
    with open(directory / "contexts.jsonl", "w") as contexts, open(directory / "pairs.jsonl", "w") as pairs:
        for number in range(first_query, first_query + num_queries):
            query, documents = _documents(number, num_documents, num_words)
            names = {"context_id": f"toy/q{number}", "query_id": f"q{number}"}
            contexts.write(json.dumps({**names, "query": query, "documents": documents}) + "\n")
            for chosen in documents:
                for rejected in documents:
                    if chosen["grade"] == rejected["grade"] + 1:
                        row = {"chosen": chosen["doc_id"], "rejected": rejected["doc_id"]}
                        grades_row = {"chosen_grade": chosen["grade"], "rejected_grade": rejected["grade"]}
                        pairs.write(json.dumps({**names, **row, **grades_row}) + "\n")
