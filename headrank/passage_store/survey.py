"""What a corpus holds that a store does not, and a sample of it: what the estimate and the scales are made from. No
torch in here.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrank.passage_store.content import passage_digest
from headrank.passage_store.store import PassageStore

SAMPLE = 128  # passages
_AT_A_TIME = 4096


@dataclass
class Survey:
    """Counts over a corpus; a passage that appears twice counts once."""

    num_missing: int = 0
    num_present: int = 0
    missing_characters: int = 0
    sample: list[tuple[str, str]] = field(default_factory=list)

    @property
    def sample_characters(self) -> int:
        """Characters of the sample, counted as those of the corpus are."""
        return sum(map(_characters, self.sample))


def survey(corpus: Iterable[tuple[str, str]], store: PassageStore | None, size: int = SAMPLE) -> Survey:
    """Read a corpus once. The sample is even over what is missing, and the same every time."""
    found, seen, draw = Survey(), set[bytes](), random.Random(0)
    documents = iter(corpus)
    while block := list(itertools.islice(documents, _AT_A_TIME)):
        digests = [passage_digest(document) for document in block]
        entries = store.find(digests) if store is not None else [None] * len(block)
        for document, digest, entry in zip(block, digests, entries, strict=True):
            if digest in seen:
                continue
            seen.add(digest)
            if entry is not None:
                found.num_present += 1
                continue
            found.num_missing += 1
            found.missing_characters += _characters(document)
            if len(found.sample) < size:
                found.sample.append(document)
            elif (place := draw.randrange(found.num_missing)) < size:
                found.sample[place] = document
    return found


def _characters(document: tuple[str, str]) -> int:
    return len(document[0]) + len(document[1])
