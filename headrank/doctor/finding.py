"""One finding of the doctor, and how a list of them reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """A fact: fine as it is, worth knowing, or wrong, which comes with the remedy. ``facts`` are numbers for --json."""

    part: str
    status: Status
    says: str
    remedy: str = ""
    facts: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.status == "problem"), "a problem has a remedy, and nothing else has"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is empty is left out."""
        values = asdict(self) | {"facts": dict(self.facts)}
        return {key: value for key, value in values.items() if value}


class Findings:
    """The findings of one part, collected in order."""

    def __init__(self, part: str) -> None:
        self.part, self.found = part, list[Finding]()

    def ok(self, says: str, **facts: Any) -> None:
        """Fine as it is."""
        self._add("ok", says, "", facts)

    def note(self, says: str, **facts: Any) -> None:
        """Worth knowing; nothing has to be done."""
        self._add("note", says, "", facts)

    def problem(self, says: str, remedy: str, **facts: Any) -> None:
        """Wrong, with what to do."""
        self._add("problem", says, remedy, facts)

    def _add(self, status: Status, says: str, remedy: str, facts: dict[str, Any]) -> None:
        self.found.append(Finding(self.part, status, without_home(says), without_home(remedy), tuple(facts.items())))


def without_home(text: str) -> str:
    """The text with the user's home folder as ~: reports are pasted into public issues."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def split_error(message: str) -> tuple[str, str]:
    """(what is wrong, the remedy) of an InputError's line, which puts the remedy behind its last semicolon."""
    wrong, semicolon, remedy = message.rpartition("; ")
    return (wrong, remedy) if semicolon else (message, "see the message; HEADRANK_LOG=DEBUG shows more")


def as_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Text for people: a heading per part, a line per finding, the remedy below."""
    part = None
    for finding in findings:
        if finding.part != part:
            part = finding.part
            yield f"{part}:"
        yield f"  {finding.status:<8} {finding.says}"
        if finding.remedy:
            yield f"  {'':<8} -> {finding.remedy}"
