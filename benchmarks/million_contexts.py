"""A million contexts through the token cache and the sampler: `python -m benchmarks.million_contexts`.

Stages, each in a process of its own so that memory peaks do not mix:

  make   contexts.jsonl and pairs.jsonl with short made-up contexts (two documents of two words, one pair)
  build  tokenise them once into the memory-mapped cache
  read   open the cache, walk the order of an epoch and see that every sample comes exactly once, resume in the middle
         with four ranks, assemble samples from all over the file and compare each with its context

Prints seconds, rates, sizes on disk and peak memory. --contexts 20000 is a quick try; a test runs it with fewer.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.training_set import Sample, TrainingSet
from headrank.formats import write_jsonl

WORDS = "salt river stone flea violin bread harbour ledger comet glacier engine orchard".split()
GRADES = ((1, 0), (0, 1), (2, 1))
STAGES = ("make", "build", "read")
NUM_RANKS = 4


def context_of(index: int) -> dict[str, Any]:
    """The ``index``-th context, from its number alone."""
    words = [WORDS[index // step % len(WORDS)] for step in (1, 12, 144)]
    documents = [
        {
            "doc_id": f"{index}-{place}",
            "title": "",
            "text": f"{words[place]} {words[2]}",
            "rank": place + 1,
            "grade": grade,
        }
        for place, grade in enumerate(GRADES[index % len(GRADES)])
    ]
    return {"context_id": f"m/{index}", "query_id": str(index), "query": f"where is {words[0]}", "documents": documents}


def pairs_of(context: dict[str, Any]) -> list[dict[str, Any]]:
    """Its adjacent pairs."""
    name = {key: context[key] for key in ("context_id", "query_id")}
    return [
        {
            **name,
            "chosen": high["doc_id"],
            "rejected": low["doc_id"],
            "chosen_grade": high["grade"],
            "rejected_grade": low["grade"],
        }
        for high, low in itertools.permutations(context["documents"], 2)
        if high["grade"] - low["grade"] == 1
    ]


def make(folder: Path, num_contexts: int) -> None:
    """Write both files, streaming."""
    write_jsonl(folder / "contexts.jsonl", map(context_of, range(num_contexts)))
    write_jsonl(folder / "pairs.jsonl", (pair for index in range(num_contexts) for pair in pairs_of(context_of(index))))


def open_set(folder: Path, tokenizer: Any) -> TrainingSet:
    """The training set; the first call builds its cache."""
    from headrank.method.prompt import PromptTemplate
    from headrank.method.spans import PromptEncoder

    # the frame would be most of the tokens
    bare = PromptTemplate(opening="", instruction="Q: ", use_chat_template=False)
    return TrainingSet(folder, PromptEncoder(tokenizer, bare, 2048), pairs_per_context=1)


def check_order(data: TrainingSet) -> None:
    """Every sample of an epoch exactly once; four ranks that resume in the middle see what one would."""
    seen = np.zeros(len(data), np.uint8)
    order = data.order(0)
    for index in range(len(data)):
        seen[order[index]] += 1
    if not (seen == 1).all():
        raise AssertionError(f"{int((seen != 1).sum()):,} samples do not come exactly once")
    middle = len(data) // 2 + 1
    ranks = [list(itertools.islice(data.shard(middle, rank, NUM_RANKS), 5)) for rank in range(NUM_RANKS)]
    if sorted(itertools.chain(*ranks)) != list(range(middle, middle + 5 * NUM_RANKS)):
        raise AssertionError("ranks that resume miss or repeat samples")


def check_sample(sample: Sample, tokenizer: Any) -> None:
    """Names, grades, pairs and the texts of the spans are those of the context with that number."""
    context = context_of(sample.context_index)
    spans = [
        tokenizer.decode(sample.encoded.input_ids[begin:end].tolist()).strip()
        for begin, end in sample.encoded.document_spans
    ]
    expected = [document["text"] for document in context["documents"]]
    grades = sample.grades.tolist()
    are_adjacent = all(grades[high] - grades[low] == 1 for high, low in sample.pairs.tolist())
    is_same = sample.context_id == context["context_id"] and grades == [
        document["grade"] for document in context["documents"]
    ]
    if spans != expected or not (is_same and are_adjacent and len(sample.pairs) == 1):
        raise AssertionError(f"sample of {sample.context_id}: {spans}, {grades}, {sample.pairs.tolist()}")


def read(folder: Path, tokenizer: Any, num_samples: int) -> None:
    """Open, walk, resume, assemble."""
    start = time.perf_counter()
    data = open_set(folder, tokenizer)
    print(
        f"opened in {time.perf_counter() - start:.1f} s: {data.num_contexts:,} contexts, {data.num_pairs:,} pairs, "
        f"{len(data):,} samples"
    )
    opened = _peak_megabytes()
    start = time.perf_counter()
    check_order(data)
    print(f"order of an epoch: {len(data) / (time.perf_counter() - start):,.0f} samples/s, each exactly once")
    start = time.perf_counter()
    for sample in (data.at(index) for index in range(0, len(data), max(1, len(data) // num_samples))):
        check_sample(sample, tokenizer)
    print(f"assembled and checked {num_samples:,} samples: {num_samples / (time.perf_counter() - start):,.0f}/s")
    print(f"memory of the process: {opened:,.0f} MB opened, {_peak_megabytes():,.0f} MB in the end")


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _stage(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    from headrank.reranking.model_sources import resolve_model

    start = time.perf_counter()
    if args.stage == "make":
        make(args.folder, args.contexts)
    else:
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(args.model))
        if args.stage == "build":
            open_set(args.folder, tokenizer)
        else:
            read(args.folder, tokenizer, args.samples)
    size = sum(path.stat().st_size for path in args.folder.rglob("*") if path.is_file()) / 1e6
    print(
        f"{args.stage}: {time.perf_counter() - start:.1f} s, peak memory {_peak_megabytes():,.0f} MB, {size:,.0f} "
        "MB on disk",
        flush=True,
    )


def main() -> int:
    """All stages in a folder that is removed afterwards, or one of them in a given folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=1_000_000, metavar="N", help="how many (default a million)")
    parser.add_argument(
        "--samples", type=int, default=20_000, metavar="N", help="samples to assemble and check (default 20000)"
    )
    parser.add_argument("--model", default="embedded", metavar="M", help="whose tokenizer (default embedded)")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        _stage(args)
        return 0
    with tempfile.TemporaryDirectory(prefix="million-contexts-") as folder:
        for stage in STAGES:
            command = [
                sys.executable,
                "-m",
                "benchmarks.million_contexts",
                *sys.argv[1:],
                "--stage",
                stage,
                "--folder",
                folder,
            ]
            if code := subprocess.run(command, check=False).returncode:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
