"""A passage store at scale: `python -m benchmarks.million_passages`.

A million made-up passages of 20 tokens and 256 bytes per token (4 pairs of 64 in int8: 5.1 GB of keys), through the
same writer and reader as real ones. Stages, each in a process of its own so that memory peaks do not mix:

  write  every passage, committed as indexing does, a new segment every 4 GB
  open   open the store, look up passages that are there and some that are not, in lists of a hundred; memory before and
         after
  read   score random lists of a hundred passages, first with the pages dropped from memory, then again; check keys
         on the way

Prints seconds, rates, sizes on disk and memory. --passages 20000 is a quick try; a test runs it with fewer.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from headrank.passage_store.content import passage_digest
from headrank.passage_store.header import KeyIdentity, StoreHeader
from headrank.passage_store.store import PassageStore, Scales, create_store
from headrank.passage_store.writer import StoreWriter, writing

STAGES = ("write", "open", "read")
PAIRS, TOKENS, HEAD_SIZE = ((2, 0), (8, 0), (14, 1), (19, 1)), 20, 64
LIST, LISTS = 100, 50
_AT_A_TIME = 512


@functools.cache
def _noise() -> np.ndarray:
    return np.random.default_rng(0).integers(-127, 128, 1 << 20, np.int8)


def keys_of(number: int) -> np.ndarray:
    """The keys int8 [A, T, D] of a passage, from its number alone: a window of the same noise."""
    size = len(PAIRS) * TOKENS * HEAD_SIZE
    start = number * 40503 % (len(_noise()) - size)
    return _noise()[start : start + size].reshape(len(PAIRS), TOKENS, HEAD_SIZE)


def digest_of(number: int) -> bytes:
    """The name of a passage."""
    return passage_digest(("", f"passage {number}"))


def write(folder: Path, count: int, segment_bytes: int = 4 * 2**30) -> None:
    """Make and fill the store."""
    shape = (len(PAIRS), HEAD_SIZE)
    scales = Scales(np.full(shape, 0.05, np.float32), np.zeros(shape, np.float32))
    header = StoreHeader(KeyIdentity("made up", "w", "none", "t", {}, HEAD_SIZE), PAIRS, "int8", scales=scales.digest)
    create_store(folder, header, scales)
    with writing(folder), StoreWriter(folder, header, segment_bytes=segment_bytes) as writer:
        for number in range(count):
            writer.add(digest_of(number), keys_of(number), TOKENS)
            if number % _AT_A_TIME == _AT_A_TIME - 1:
                writer.commit()


def open_and_find(folder: Path, count: int, seed: int = 0) -> None:
    """Opening, then lookups of lists: a tenth of each is not in the store."""
    before, started = _resident_megabytes(), time.perf_counter()
    store = PassageStore(folder)
    print(
        f"opened in {1e3 * (time.perf_counter() - started):.1f} ms: {len(store):,} passages in "
        f"{len(store.segments)} segments"
    )
    opened, draw, seconds = _resident_megabytes(), np.random.default_rng(seed), []
    for _ in range(LISTS):
        numbers = draw.integers(0, count, LIST).tolist()
        numbers[: LIST // 10] = range(count, count + LIST // 10)
        digests = [digest_of(number) for number in numbers]
        started = time.perf_counter()
        entries = store.find(digests)
        seconds.append(time.perf_counter() - started)
        if [entry is not None for entry in entries] != [number < count for number in numbers]:
            raise AssertionError("a lookup found what is not there, or missed what is")
    print(
        f"lookup of {LIST} passages: {1e3 * statistics.median(seconds):.2f} ms (median of {LISTS}), "
        f"{1e3 * seconds[0]:.2f} ms the first"
    )
    print(f"memory: {before:.0f} MB before, {opened:.0f} MB opened, {_resident_megabytes():.0f} MB after {LISTS} lists")


def read(folder: Path, count: int, seed: int = 1) -> None:
    """Scores of random lists, cold and warm."""
    import torch

    from headrank.method.late_layout import QueryVectors
    from headrank.passage_store.keys import StoredForm
    from headrank.passage_store.scan import Scanner

    torch.set_num_threads(1)
    heads, rows = 3 * len(PAIRS), 11
    generator = torch.Generator().manual_seed(0)
    query = QueryVectors(
        torch.randn(1, heads, rows, HEAD_SIZE, generator=generator) * 0.2,
        torch.zeros(1, heads, rows),
        torch.full((1, rows), 1 / rows),
    )
    draw = np.random.default_rng(seed)
    lists = [draw.integers(0, count, LIST).tolist() for _ in range(LISTS)]
    dropped = _drop_pages(folder)
    store = PassageStore(folder)
    scanner = Scanner(
        StoredForm("int8", 1, store.scales), range(len(PAIRS)), [head // 3 for head in range(heads)], HEAD_SIZE
    )

    def score(numbers: Sequence[int]) -> object:
        entries = [entry for entry in store.find([digest_of(number) for number in numbers]) if entry is not None]
        if len(entries) != len(numbers) or not np.array_equal(entries[0].keys_ATD, keys_of(numbers[0])):
            raise AssertionError(f"passage {numbers[0]} is not what was written")
        return scanner.scores([query], entries, torch.ones(heads))

    for name in ("cold" if dropped else "first", "warm"):
        seconds = [_seconds(score, numbers) for numbers in lists]
        print(
            f"{name}: a list of {LIST} random passages looked up and scored in "
            f"{1e3 * statistics.median(seconds):.1f} ms (median)"
        )
    print(f"memory of the process: {_resident_megabytes():.0f} MB resident, of it mapped pages of the store")


def _seconds(work: Callable[[Sequence[int]], object], numbers: Sequence[int]) -> float:
    started = time.perf_counter()
    work(numbers)
    return time.perf_counter() - started


def _drop_pages(folder: Path) -> bool:
    """Ask the system to forget the files; False where it has no such call."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.rglob("*.bin"):
        with open(path, "rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _resident_megabytes() -> float:
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    """All stages in a folder that is removed afterwards, or one of them in a given folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=1_000_000, metavar="N", help="how many (default a million)")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.stage:
        with tempfile.TemporaryDirectory(prefix="million-passages-") as folder:
            for stage in STAGES:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.million_passages",
                    *sys.argv[1:],
                    "--stage",
                    stage,
                    "--folder",
                    folder,
                ]
                if code := subprocess.run(command, check=False).returncode:
                    return code
        return 0
    wall, cpu = time.perf_counter(), time.process_time()
    {"write": write, "open": open_and_find, "read": read}[args.stage](args.folder / "store", args.passages)
    size = sum(path.stat().st_size for path in args.folder.rglob("*") if path.is_file()) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    spent = f"{time.perf_counter() - wall:.1f} s ({time.process_time() - cpu:.1f} s of CPU)"
    print(f"{args.stage}: {spent}, peak memory {peak:,.0f} MB, {size:,.0f} MB on disk", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
