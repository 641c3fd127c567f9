"""Files as such: lines in with their numbers, whole files out or nothing.

Readers accept plain or gzip files (by content, not by name), a byte-order mark and Windows line ends. Every writer goes
through ``atomic_write``: a reader never sees half a file.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from headrank.errors import InputError

_DEVICE_FOLDERS = (Path("/dev"), Path("/dev/fd"))
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO]:
    """Open a temporary file beside ``path`` and rename it into place on success; on failure leave nothing.

    What is no file of a disk (/dev/stdout, a pipe) is written to directly: renaming would replace the device.
    """
    path = Path(path)
    # os.replace would say "Is a directory" only after all the work
    if path.is_dir():
        raise InputError(f"{path}: cannot be written, it is a folder; give the name of a file")
    is_text = "b" not in mode
    spelling = {"encoding": "utf-8" if is_text else None, "newline": "\n" if is_text else None}
    try:
        if _is_device(path):
            with open(path, mode, **spelling) as stream:  # type: ignore[call-overload]
                yield stream
            return
        # beside the target: a rename from /tmp to another disk is a copy, and a reader could see half of it
        handle, temporary, made = _temporary_beside(path)
        try:
            with os.fdopen(handle, mode, **spelling) as stream:  # type: ignore[call-overload]
                yield stream
            # mkstemp makes files that only their owner can read
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            _remove(temporary, made)
            raise
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise InputError(f"{path}: cannot be written ({error.strerror}); make room or choose another place") from error


def put_in_place(partial: Path, output: Path) -> None:
    """Give a finished directory its name; what had the name goes only then."""
    # two renames instead of a removal first: a kill in between leaves the old folder under a hidden name, not nothing
    replaced = output.absolute().with_name(f".{output.absolute().name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if output.exists():
        output.rename(replaced)
    partial.rename(output)
    shutil.rmtree(replaced, ignore_errors=True)


def require_writable(path: str | os.PathLike[str], reads: Iterable[str | os.PathLike[str] | None] = ()) -> None:
    """Fail now, not after hours of work, when a file or folder called ``path`` could not be made, or is one that the
    command ``reads``.
    """
    path = Path(path)
    # by inode and not by name: links and relative paths name the same file
    if any(
        source is not None and path.is_file() and Path(source).is_file() and path.samefile(source) for source in reads
    ):
        raise InputError(
            f"{path}: is read by this very command and would be replaced; give another name for the output"
        )
    if not _is_device(path):
        handle, temporary, made = _temporary_beside(path)
        os.close(handle)
        _remove(temporary, made)


def _is_device(path: Path) -> bool:
    """Whether the path names a device or a pipe; /dev/stdout is one even when it leads to a file."""
    return path.absolute().parent in _DEVICE_FOLDERS or (path.exists() and not path.is_file() and not path.is_dir())


def _temporary_beside(path: Path) -> tuple[int, str, list[Path]]:
    """An open temporary file in the folder of ``path``, its name, and the folders that had to be made for it,
    innermost first.
    """
    made = [folder for folder in path.absolute().parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return *tempfile.mkstemp(prefix=f".{path.name[:50]}.", suffix=".tmp", dir=path.parent), made
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}); check the folder and its permissions"
        ) from error


def _remove(temporary: str, folders: list[Path]) -> None:
    """Take back what ``_temporary_beside`` made; folders in which something else lies stay."""
    with contextlib.suppress(OSError):
        os.unlink(temporary)
        for folder in folders:
            folder.rmdir()


def _umask() -> int:
    """The process's umask; mkstemp ignores it and would leave every file private."""
    # there is no way to read it but to set it; not safe with threads that make files at this moment
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end) of a plain or gzip text file, skipping blank lines."""
    path = Path(path)
    _require_file(path)
    number = 0
    try:
        # bytes, split at \n alone: text mode would make a line end of a lone \r within a text
        with gzip.open(path, "rb") if _is_gzip(path) else open(path, "rb") as stream:
            for number, raw in enumerate(stream, start=1):
                # only the first line may begin with a byte-order mark; further on it is a character of the text
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number}: not UTF-8 ({error.reason}); convert the file to UTF-8") from error
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"{path}:{number + 1}: cannot be read ({error}); is the file complete?") from error


def plain_or_gzipped(folder: str | os.PathLike[str], name: str) -> Path:
    """The file ``name`` of a folder, or its gzipped twin where only that is there."""
    path = Path(folder) / name
    twin = path.with_name(f"{name}.gz")
    return twin if twin.is_file() and not path.is_file() else path


def _require_file(path: Path) -> None:
    try:
        if path.is_file():
            return
        state = "a folder, not a file; check the path" if path.is_dir() else "no such file; check the path"
        if path.exists() and not path.is_dir():
            state = "a device or pipe, and files are read more than once; save it to a file first"
    except OSError as error:  # a folder that may not be entered, a name that is too long
        state = f"cannot be read ({error.strerror}); check the path"
    raise InputError(f"{path}: {state}")


def _is_gzip(path: Path) -> bool:
    with open(path, "rb") as stream:
        return stream.read(2) == b"\x1f\x8b"


def parse_object(path: str | os.PathLike[str], number: int, line: str) -> dict:
    """One line of a JSONL file as an object; everything else is an InputError that names the line."""
    try:
        row = json.loads(line)
    # a line of 100,000 brackets is a legal attack on any JSON parser
    except RecursionError:
        raise InputError(f"{path}:{number}: JSON nested too deeply: {quote(line)}") from None
    except ValueError as error:  # also integers of thousands of digits, which are no JSONDecodeError
        raise InputError(f"{path}:{number}: not JSON ({error}): {quote(line)}") from error
    if not isinstance(row, dict):
        raise InputError(f"{path}:{number}: expected a JSON object, found {quote(line)}")
    # a cheap look first: encoding every row again would double the time of reading a corpus
    if "\\ud" in line or "\\uD" in line:
        _refuse_surrogates(path, number, row)
    return row


def _refuse_surrogates(path: str | os.PathLike[str], number: int, row: dict) -> None:
    """JSON can spell half of a surrogate pair, which no UTF-8 file could store again."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{path}:{number}: half a surrogate pair (\\ud800 to \\udfff) is not a character; repair the text"
        ) from None


def quote(line: str, limit: int = 80) -> str:
    """The beginning of a line as it may stand in a message."""
    return repr(line if len(line) <= limit else line[:limit] + "…")


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[Mapping]) -> None:
    """Write one JSON object per line, keys in the given order."""
    with atomic_write(path) as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Write one indented JSON document that ends with a newline."""
    with atomic_write(path) as stream:
        stream.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def read_json(path: str | os.PathLike[str]) -> object:
    """Read one JSON document, plain or gzipped; a missing or broken file is an InputError."""
    path = Path(path)
    _require_file(path)
    try:
        raw = path.read_bytes()
        return json.loads((gzip.decompress(raw) if _is_gzip(path) else raw).decode("utf-8-sig"))
    except (ValueError, RecursionError, EOFError, OSError, zlib.error) as error:
        raise InputError(f"{path}: not a JSON file ({error})") from error
