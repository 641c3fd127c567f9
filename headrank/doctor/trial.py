"""The last word: load the model with its heads (and store) and rank three passages, as a user's first call would."""

from __future__ import annotations

import time
from pathlib import Path

from headrank.doctor.finding import Finding, Findings, split_error
from headrank.errors import InputError

_QUERY = "why does a violin bow need rosin"
_PASSAGES = (
    "The four strings of a violin are tuned in fifths.",
    "Rosin is rubbed on the hair of the bow so that it grips the string and sets it vibrating.",
    "Violin concertos of the romantic period are long.",
)


def try_reranking(
    model: str, heads: str | None, device: str | None, dtype: str | None, store: str | None
) -> list[Finding]:
    """What loading and ranking say; an InputError is the user's to mend, anything else a bug with its place."""
    findings = Findings("trial")
    try:
        _rank(findings, model, heads, device, dtype, store)
    except InputError as error:
        findings.problem(*split_error(str(error)))
    except (ImportError, RuntimeError, ValueError, KeyError, TypeError, OSError) as error:
        frame = _deepest_frame(error)
        remedy = "report it with the output of 'headrank doctor --json' and HEADRANK_LOG=DEBUG"
        findings.problem(
            f"ranking three passages failed in {frame}: {type(error).__name__}: {str(error).splitlines()[:1]}", remedy
        )
    return findings.found


def _rank(
    findings: Findings, model: str, heads: str | None, device: str | None, dtype: str | None, store: str | None
) -> None:
    from headrank.reranking.reranker import HeadRankReranker

    started = time.perf_counter()
    reranker = HeadRankReranker.from_pretrained(model, heads, device=device, dtype=dtype, store=store)
    loaded = time.perf_counter()
    order = [row["corpus_id"] for row in reranker.rank(_QUERY, _PASSAGES)]
    ranked = time.perf_counter()
    number_format = str(next(reranker.reader.model.parameters()).dtype).removeprefix("torch.")
    loading, ranking = loaded - started, ranked - loaded
    findings.ok(
        f"loaded in {loading:.1f} s, {number_format} on {reranker.reader.device}", load_seconds=round(loading, 3)
    )
    findings.ok(f"ranked {len(_PASSAGES)} passages in {ranking:.2f} s", rank_seconds=round(ranking, 3), order=order)
    if store is not None and reranker.heads.prompt.is_late:
        findings.ok(f"the store {store} fits the model and its heads")
    if order[0] != 1:
        findings.note(
            "the passage that answers the query is not first: the heads may be untrained, or of another model or prompt"
        )


def _deepest_frame(error: BaseException) -> str:
    """file:line where an exception began, without folders."""
    import traceback

    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"
