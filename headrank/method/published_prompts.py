"""Prompts of published methods in words of our switches, read in their own code, and where each differs from ours.

icr      github.com/OSU-NLP-Group/In-Context-Reranking: best candidate last, the label "[1]" counted as the document's,
         rows from the late instruction to the end of the prompt. icr-qa is its instruction for questions, which it uses
         on QA_BENCHMARKS.
core     github.com/linhhtran/CoRe-Reranking: "[document 1]" before each document, rows from the late instruction
         to the first token after the query.

What stays ours: separators of one blank line for every model, titles where a collection has them (CoRe's has none), and
spans that end with the document (CoRe's reranking counts one token more).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrank.errors import InputError

QA_INSTRUCTION = "Please answer the following question based on the information in the paragraphs above.\n\nQuery: "
# ICR's experiments.py; webis-touche2020 is not among the paper's benchmarks
QA_BENCHMARKS = frozenset({"trec-covid", "fiqa", "dbpedia", "nq", "hotpotqa", "2wiki", "musique"})

PUBLISHED_PROMPTS: Mapping[str, Mapping[str, Any]] = {
    "icr": {"order": "reversed", "query_rows": "instruction", "label_in_span": True},
    "icr-qa": {"order": "reversed", "query_rows": "instruction", "label_in_span": True, "instruction": QA_INSTRUCTION},
    "core": {"query_rows": "instruction-query-next", "document_label": "[document {}] "},
}


def published_prompt(name: str, benchmark: str | None = None) -> dict[str, Any]:
    """The switches of a published prompt; 'icr' becomes 'icr-qa' on the benchmarks where ICR does so."""
    if name not in PUBLISHED_PROMPTS:
        raise InputError(f"prompt {name!r} is not one of {', '.join(PUBLISHED_PROMPTS)}")
    return dict(PUBLISHED_PROMPTS["icr-qa" if name == "icr" and benchmark in QA_BENCHMARKS else name])
