"""Writing: whole files or nothing, no empty folders left, devices written to and never replaced, full disks in one
line.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from data_tools import build_pairs
from data_tools.collection_files import write_collection
from headrank import files
from headrank.commands import main, retrieve
from headrank.commands.options import progress
from headrank.errors import InputError
from headrank.files import atomic_write, read_lines, require_writable
from headrank.formats import Document
from headrank.reranking.partial_results import PartialResults
from tests.result_cells import make_heads
from tests.toy_collections import make_collection

GRADES = {"q1": [2, 1, 0]}


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    require_writable(pipe)
    with atomic_write(pipe) as stream:
        stream.write("one line\n")
    reader.join(timeout=30)
    assert received == ["one line\n"]
    assert pipe.is_fifo()
    with pytest.raises(InputError, match="a device or pipe"):
        next(read_lines(pipe))


def test_a_name_in_the_folder_of_devices_is_never_renamed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_DEVICE_FOLDERS", (tmp_path,))
    target = tmp_path.parent / f"{tmp_path.name}-target.txt"
    target.write_text("")
    (tmp_path / "stdout").symlink_to(target)  # as /dev/stdout is when it was redirected to a file
    with atomic_write(tmp_path / "stdout") as stream:
        stream.write("text")
    assert (tmp_path / "stdout").is_symlink()
    assert target.read_text() == "text"


def test_shared_memory_is_an_ordinary_folder() -> None:
    assert not files._is_device(Path("/dev/shm/run.txt"))
    assert files._is_device(Path("/dev/stdout"))
    assert files._is_device(Path("/dev/fd/63"))


def test_folders_made_for_a_file_go_with_it_when_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="half way"), atomic_write(tmp_path / "new" / "deeper" / "run.txt"):
        raise InputError("half way")
    assert list(tmp_path.iterdir()) == []
    require_writable(tmp_path / "new" / "deeper" / "run.txt")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    with pytest.raises(InputError, match="half way"), atomic_write(tmp_path / "kept" / "run.txt"):
        raise InputError("half way")
    assert (tmp_path / "kept").is_dir()


def refused_on_a_full_disk(*words: str) -> str:
    """What a command says that may write no file of more than 2,000 bytes."""
    code = (
        "import resource, sys\nfrom headrank.commands import main\nimport headrank.reports.figures\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\nsys.exit(main({list(words)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "cannot be written (File too large); make room" in done.stderr
    return done.stderr


def test_a_full_disk_is_one_line_and_leaves_the_old_files(tmp_path: Path) -> None:
    make_collection(tmp_path / "toy", {f"q{n}": [1, 0] for n in range(200)})
    target = tmp_path / "out" / "contexts.jsonl"
    target.parent.mkdir()
    target.write_text("old")
    said = refused_on_a_full_disk("pairs", "--collection", str(tmp_path / "toy"), "--output", str(target.parent))
    assert said.count("\n") == 1
    assert target.read_text() == "old"
    assert [entry.name for entry in target.parent.iterdir()] == ["contexts.jsonl"]


def test_a_full_disk_leaves_no_half_picture(tmp_path: Path) -> None:
    heads = tmp_path / "heads.json"
    make_heads((1, 2)).save(heads)
    assert "Traceback" not in refused_on_a_full_disk("report", "--heads", str(heads), "--output", str(tmp_path / "out"))
    assert not list(tmp_path.rglob("*.p[nd][gf]"))


def test_partial_results_on_a_full_disk_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    make_collection(tmp_path / "toy", {"q": [1, 0]})
    monkeypatch.setattr(PartialResults, "add", full)
    assert (
        main(
            ["rerank", "--method", "bm25", "--collection", str(tmp_path / "toy"), "--output", str(tmp_path / "run.txt")]
        )
        == 2
    )
    assert capsys.readouterr().err.endswith(
        "headrank rerank: a file: No space left on device; make room and run it again\n"
    )


def test_an_unwritable_output_is_said_before_the_corpus_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    collection = make_collection(tmp_path / "toy", GRADES)
    monkeypatch.setattr(retrieve, "iterate_corpus", lambda path: pytest.fail("the corpus was read"))
    folder = str(collection.queries_path.parent)
    assert main(["retrieve", "--collection", folder, "--output", str(collection.queries_path / "run.txt")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_any_other_error_of_a_path_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(args: object) -> int:
        raise PermissionError(13, "Permission denied", "/secret/run.txt")

    monkeypatch.setattr(retrieve, "run", refuse)
    assert main(["retrieve", "--output", "x"]) == 2
    assert (
        capsys.readouterr().err
        == "headrank retrieve: /secret/run.txt: Permission denied; check the path and its permissions\n"
    )


def test_an_interrupted_verb_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_collection(tmp_path / "toy", GRADES)

    def interrupt(*args: object, **options: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(build_pairs, "_records", interrupt)
    assert main(["pairs", "--collection", str(tmp_path / "toy"), "--output", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "headrank pairs: interrupted\n"
    assert not (tmp_path / "out").exists()


def test_a_terminated_verb_leaves_nothing(tmp_path: Path) -> None:
    make_collection(tmp_path / "toy", GRADES)
    code = (
        "import os, signal, sys\nfrom data_tools import build_pairs\nfrom headrank.commands import main\n"
        "build_pairs._records = lambda *args: os.kill(os.getpid(), signal.SIGTERM)\n"
        f"sys.exit(main(['pairs', '--collection', {str(tmp_path / 'toy')!r}, '--output', {str(tmp_path / 'out')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 143, done.stderr
    assert done.stderr == ""
    assert not (tmp_path / "out").exists()


def test_a_summary_never_vouches_for_files_of_which_some_are_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_collection(tmp_path / "toy", GRADES)
    command = ["pairs", "--collection", str(tmp_path / "toy"), "--output", str(tmp_path / "out")]
    assert main(command) == 0
    replace = os.replace

    def die_at_contexts(source: str, target: Path) -> None:
        if Path(target).name == "contexts.jsonl":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", die_at_contexts)
    assert main([*command, "--depth", "2"]) == 130
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["contexts.jsonl", "pairs.jsonl"]


def test_a_collection_is_replaced_whole(tmp_path: Path) -> None:
    def write(text: str, **options: bool) -> None:
        write_collection(
            tmp_path / "home" / "made",
            {"q": text},
            {"d": Document("d", "", text)},
            {"q": {"d": 1}},
            {"q": [("d", 1.0)]},
            facts={},
            **options,
        )

    write("first")
    (tmp_path / "home" / "made" / "stray.txt").write_text("of the first")
    write("second", overwrite=True)
    assert (tmp_path / "home" / "made" / "queries.tsv").read_text() == "q\tsecond\n"
    assert [entry.name for entry in (tmp_path / "home").iterdir()] == ["made"]
    assert not (tmp_path / "home" / "made" / "stray.txt").exists()


def test_a_home_that_is_a_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_collection(tmp_path / "toy", GRADES)
    home = tmp_path / "toy" / "qrels.txt"
    assert main(["benchmark", "prepare", "dl19", "--from", str(tmp_path / "toy"), "--home", str(home)]) == 2
    assert f"{home / 'dl19'}: cannot be written" in capsys.readouterr().err


def test_a_progress_bar_starts_with_the_first_item(capsys: pytest.CaptureFixture[str]) -> None:
    items = progress([1, 2], description="counting")
    assert capsys.readouterr().err == ""
    assert list(items) == [1, 2]
    assert "counting" in capsys.readouterr().err
