"""Whether a passage store is whole and in good health: header, segments, saturation. Reads records, no keys, and
imports no torch.
"""

from __future__ import annotations

from headrank.doctor.finding import Finding, Findings, split_error
from headrank.errors import InputError
from headrank.passage_store.store import PassageStore

TOO_SATURATED = 1e-3  # of all int8 numbers; a store's own corpus stays well below one in a hundred thousand


def look_at_store(store: str) -> list[Finding]:
    """The findings on one store; whether it fits a model is the trial's question."""
    findings = Findings("store")
    try:
        _look(findings, PassageStore(store))
    except InputError as error:
        findings.problem(*split_error(str(error)))
    return findings.found


def _look(findings: Findings, store: PassageStore) -> None:
    header, counts = store.header, store.summary()
    findings.ok(
        f"{store.folder}: {counts['passages']:,} passages in {header.dtype}, {header.bytes_per_token:,.0f} bytes "
        "per token, of "
        f"{header.identity.model}; 'headrank index --verify' reads the keys too",
        **counts,
    )
    if not len(store):
        findings.note("the store is empty: every passage will be computed")
    if counts["unsealed"]:
        findings.note(
            f"{counts['unsealed']} segments are open: they are being written, or their writer was killed; reading "
            "is safe"
        )
    share = counts["saturated"] / max(1, counts["numbers"])
    if header.dtype == "int8" and share > TOO_SATURATED:
        findings.problem(
            f"{share:.2%} of the numbers did not fit the int8 scales: later passages are unlike the first ones",
            "index into a new store, whose scales are measured on all of them, or use --dtype bf16",
        )
