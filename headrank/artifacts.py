"""One notion of "still valid": what an artefact was made from, the stamp that remembers it, and why it is stale, in
words.

An *artefact* is a file or a folder that some step made. Its *inputs* are settings (plain JSON values) and files. A
*stamp* is a small JSON file that keeps the inputs as they were when the artefact was made. The artefact is still valid
when its stamp says "complete" and the inputs of today are those of the stamp; otherwise ``Artifact.why_stale`` says
what differs, so that a person sees why work is done again.

What a file "is" depends on its size and use, and there are exactly three answers:

- ``file_state``: a small file by its content, a large one (a corpus, weights) by size and time; cheap, for files that
  stay in place.
- ``content_digest``: the whole content of any file; for what is read completely anyway.
- ``sampled_digest`` and ``model_fingerprint``: names, sizes and evenly spaced blocks; for weights. A copy of a model on
  another machine has the same fingerprint, and training changes every tensor, so that no block stays as it was.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.files import put_in_place, require_writable, write_json

FORMAT = "headrank-stamp/1"
SMALL_FILE = 1 << 24  # bytes; up to here a file is read, above its size and time stand for it
_BLOCK, _MAX_BLOCKS = 1 << 16, 64
_MISSING, _SHORT = "missing", 60
Inputs = Mapping[str, Any]


def fingerprint(facts: object) -> str:
    """Sixteen hex digits of plain JSON values; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, ensure_ascii=False, default=str).encode()).hexdigest()[:16]


def content_digest(*paths: str | os.PathLike[str]) -> str:
    """Sixteen hex digits of the whole content of files, one after the other, whatever their size."""
    return sha256_of(*paths)[:16]


def sha256_of(*paths: str | os.PathLike[str]) -> str:
    """The sha256 of files, one after the other, read in blocks."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def file_state(path: str | os.PathLike[str]) -> str:
    """A small file by content, a large one by size and time, a folder by its files that are not hidden; or
    'missing'.
    """
    path = Path(path)
    if path.is_dir():
        return fingerprint(folder_states(path))
    if not path.is_file():
        return _MISSING
    facts = path.stat()
    # reading 20 GB of corpus before every command would cost more than the command
    if facts.st_size > SMALL_FILE:
        return f"{facts.st_size} bytes of {facts.st_mtime_ns}"
    # size, time and inode are part of the key, so that a file that changes while we run is read again
    return _digest_once(str(path.absolute()), facts.st_size, facts.st_mtime_ns, facts.st_ino)


@functools.lru_cache(maxsize=10_000)
def _digest_once(path: str, size: int, time_ns: int, inode: int) -> str:
    """Hundreds of cells read the same collections and models: a file that did not change is read once per process."""
    return content_digest(path)


def folder_states(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The state of every file below a folder; hidden files and folders, where stamps and caches lie, are left out."""
    root = Path(folder)
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    # relative: a study that is moved, or mounted elsewhere, stays valid
    below = {path.relative_to(root): path for path in files}
    return {
        name.as_posix(): file_state(path)
        for name, path in below.items()
        if not any(part.startswith(".") for part in name.parts)
    }


def sampled_digest(paths: Iterable[str | os.PathLike[str]], root: str | os.PathLike[str] | None = None) -> str:
    """Sixteen hex digits over the names (below ``root``), sizes and 64 evenly spaced blocks of files; times do not
    count.
    """
    digest = hashlib.sha256()
    for path in sorted(map(Path, paths)):
        size = path.stat().st_size
        digest.update(f"{path.name if root is None else path.relative_to(root)}:{size}".encode())
        with open(path, "rb") as stream:
            for number in range(min(_MAX_BLOCKS, -(-size // _BLOCK))):
                # a fixed number of blocks, whatever the size: training changes every block, so any of them shows it
                stream.seek(number * max(_BLOCK, size // _MAX_BLOCKS))
                digest.update(stream.read(_BLOCK))
    return digest.hexdigest()[:16]


def model_fingerprint(model: str | os.PathLike[str]) -> str:
    """What tells one model from another: its files, sampled; a name on the hub stands for itself."""
    root = Path(model)
    # without a look at the hub: asking it would need a network for every command
    if not root.is_dir():
        return str(model)
    return sampled_digest((path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")), root)


@dataclass(frozen=True)
class Stamp:
    """What an artefact was made from, and whether it is complete. ``seconds`` is what it took, over all its
    attempts.
    """

    inputs: Inputs
    is_complete: bool
    seconds: float = 0.0
    made_at: str = ""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Stamp | None:
        """The stamp in a file; None where there is none. One cut short by a crash, or of another format, counts as
        none.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                return None
            return cls(
                dict(values["inputs"]), bool(values["is_complete"]), float(values["seconds"]), str(values["made_at"])
            )
        # a stamp cut short means "not known": doing it again is always right, trusting half a stamp is not
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the stamp; a reader sees the old one or the new one."""
        values = {
            "format": FORMAT,
            "is_complete": self.is_complete,
            "seconds": round(self.seconds, 3),
            "made_at": self.made_at,
        }
        write_json(path, {**values, "inputs": dict(self.inputs)})


@dataclass(frozen=True)
class Artifact:
    """Something on disk with a stamp: valid, begun or stale, and able to say why.

    ``marker`` is the file inside a folder that is written last ('' for a file). ``settings`` and the files of ``reads``
    decide what it holds; the files are looked at when they are asked for, because an earlier step may have yet to make
    them.
    """

    path: Path
    stamp_path: Path
    settings: Inputs = field(default_factory=dict)
    reads: tuple[Path, ...] = ()
    marker: str = ""

    @property
    def exists(self) -> bool:
        """Whether the artefact, or the file that is written last in it, is there."""
        return (self.path / self.marker if self.marker else self.path).exists()

    @property
    def stamp(self) -> Stamp | None:
        """What is known about the artefact that is there."""
        return Stamp.read(self.stamp_path)

    def inputs(self) -> dict[str, Any]:
        """Settings and files as they are now, as plain JSON values."""
        # looked at now and not when the plan was made: an earlier phase may have written them since
        states = {str(path): file_state(path) for path in self.reads}
        # through JSON, as the stamp on disk went: tuples become lists, so that equal settings compare equal
        settings: dict[str, Any] = json.loads(json.dumps(dict(self.settings), default=str))
        return {"settings": settings, "files": states}

    def why_stale(self) -> str | None:
        """The reason to make it (again), in words; None where it is still valid."""
        stamp = self.stamp
        if stamp is None:
            return "was not made by this command" if self.path.exists() else "not made yet"
        reason = describe_change(stamp.inputs, self.inputs())
        if reason is not None:
            return reason
        if not stamp.is_complete:
            return "begun, not finished"
        return None if self.exists else f"{self.path / self.marker if self.marker else self.path} is gone"

    def begin(self) -> None:
        """Note what it is about to be made from.

        What the same inputs began stays, to be continued; what others made is removed.

        Something that is there without a stamp is somebody else's, and an InputError instead.
        """
        inputs, stamp = self.inputs(), self.stamp
        # removing it would destroy what this program did not make
        if stamp is None and self.path.exists():
            raise InputError(
                f"{self.path}: is there and was not made by this command; move it away or choose another output"
            )
        require_writable(self.stamp_path)
        seconds = 0.0
        if stamp is not None and fingerprint(stamp.inputs) == fingerprint(inputs):
            # an interrupted attempt counts towards the time of the whole
            seconds = 0.0 if stamp.is_complete else stamp.seconds
        else:
            remove(self.path)
        Stamp(inputs, is_complete=False, seconds=seconds, made_at=_now()).write(self.stamp_path)

    def end(self, seconds: float, *, is_complete: bool = True) -> None:
        """Note that it is complete, or how long the unfinished attempt took; the inputs stay those of the beginning."""
        stamp = self.stamp
        assert stamp is not None, "end() follows begin()"
        Stamp(stamp.inputs, is_complete, stamp.seconds + seconds, _now()).write(self.stamp_path)


def describe_change(before: Inputs, now: Inputs) -> str | None:
    """The first difference of two sets of inputs in words ("depth was 20, is 40"), and how many more there are."""
    old, new = _flat(before), _flat(now)
    changed = [
        key
        for key in [*new, *(key for key in old if key not in new)]
        if old.get(key, _MISSING) != new.get(key, _MISSING)
    ]
    if not changed:
        return None
    more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    return _describe(changed[0], old, new) + more


def _describe(key: tuple[str, ...], old: Mapping[tuple[str, ...], Any], new: Mapping[tuple[str, ...], Any]) -> str:
    """One difference. The keys of files begin with 'files'; all others are settings, named by their dotted path."""
    if key[0] == "files":
        name = key[-1]
        if new.get(key, _MISSING) == _MISSING:
            return f"{name} is gone" if key in new else f"{name} is not read any more"
        return f"{name} is new" if old.get(key, _MISSING) == _MISSING else f"{name} changed"
    name = ".".join(key[1:] if key[0] == "settings" else key)
    if key not in old:
        return f"{name} is new: {_shown(new[key])}"
    return (
        f"{name} was {_shown(old[key])}, is {_shown(new[key])}"
        if key in new
        else f"{name} is not set any more (was {_shown(old[key])})"
    )


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHORT else text[:_SHORT] + "…"


def _flat(values: Inputs, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Nested mappings as one; lists stay values."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, (*prefix, str(key)))
        else:
            found[(*prefix, str(key))] = value
    return found


def hidden_beside(output: Path) -> Path:
    """Where a folder is made before it takes its name: on the same disk, so that the rename is one step."""
    output = output.absolute()
    return output.with_name(f".{output.name}.partial")


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to fill, renamed to ``path`` on success; on failure it goes and what had the name stays.

    The name of the unfinished folder is the same every time: what a killed process left is removed by the next one.
    """
    output = Path(path)
    # on the same disk, because only there is a rename one step; the fixed name lets the next process clean up after a
    # kill
    partial = hidden_beside(output)
    remove(partial)
    try:
        partial.mkdir(parents=True)
        yield partial
        put_in_place(partial, output)
    # BaseException: Ctrl-C must not leave half a folder either
    except BaseException:
        remove(partial)
        raise


def remove(path: Path) -> None:
    """Delete a file or a whole folder; what is not there is no error."""
    # rmtree refuses a link; and what it points to is not ours to remove
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
