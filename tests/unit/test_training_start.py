"""Starting pretrain_headrank.py: a mistake in the environment, the tokenizer or a place to write is one line before
any work.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import pretrain_headrank
from headrank.errors import InputError
from headrank.method.heads import HeadSet
from megatron_patches import device
from megatron_patches.shape import ModelShape
from megatron_patches.training import data_setup
from megatron_patches.training.arguments import parse_arguments
from megatron_patches.training.config import config_from
from tests.toy_training import ToyJob, make_toy_job

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HEADRANK_LOG")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyJob:
    return make_toy_job(tmp_path_factory.mktemp("toy"))


@pytest.fixture(autouse=True)
def nothing_begins(monkeypatch):
    """The environment of plain python; a start that is not refused is a failure, not a training run."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    monkeypatch.setattr(device, "initialize", lambda *_, **__: pytest.fail("work has begun"))


def refused(capsys, argv: list[str]) -> str:
    """The one line with which the program ends."""
    assert pretrain_headrank.main(argv) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("pretrain_headrank.py: ") and said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HEADRANK_LOG": "verbose"}, "HEADRANK_LOG 'verbose'"),
        ({"HEADRANK_LOG": ""}, "HEADRANK_LOG ''"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE 'x'"),
        ({"RANK": "-1"}, "RANK '-1'"),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": ""}, "LOCAL_RANK ''"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT 'http'"),
        ({"WORLD_SIZE": "0"}, "does not fit into WORLD_SIZE 0"),
        ({"RANK": "1"}, "RANK 1 in the environment does not fit into WORLD_SIZE 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE 2 in the environment without MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, "without RANK"),
    ],
)
def test_a_broken_environment_is_one_line(capsys, monkeypatch, toy, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert words in refused(capsys, toy.flags())


def test_only_rank_0_speaks(capsys, monkeypatch, toy):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert device.world_from_environment() == (1, 2, 0)
    assert pretrain_headrank.main(toy.flags("--fp16")) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir", "--wandb-save-dir", "--headrank-reference-cache"])
def test_a_place_that_cannot_be_written_is_refused_at_once(capsys, tmp_path, toy, flag):
    (tmp_path / "file").write_text("")
    assert f"{flag} {tmp_path}/file/below: cannot be written (" in refused(
        capsys, toy.flags(flag, str(tmp_path / "file" / "below"))
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_no_reference_cache(capsys, tmp_path, toy):
    assert f"--headrank-reference-cache {tmp_path} is a folder" in refused(
        capsys, toy.flags("--headrank-reference-cache", str(tmp_path))
    )


@pytest.mark.parametrize(("flag", "package"), [("--tensorboard-dir", "tensorboard"), ("--wandb-project", "wandb")])
def test_a_missing_package_is_refused_at_once(capsys, monkeypatch, tmp_path, toy, flag, package):
    monkeypatch.setitem(sys.modules, package, None)
    place = tmp_path / "board"
    assert f"{flag} needs the {package} package" in refused(capsys, toy.flags(flag, str(place)))
    assert not place.exists()


def test_a_folder_called_wandb_is_not_the_package(capsys, monkeypatch, tmp_path, toy):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(
        sys, "path", [str(tmp_path), *(place for place in sys.path if not (Path(place) / "wandb").exists())]
    )
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert "--wandb-project needs the wandb package" in refused(capsys, toy.flags("--wandb-project", "mine"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda file: file.unlink(), "no tokenizer that can be loaded"),
        (lambda file: file.write_text("{"), "no tokenizer that can be loaded"),
        (lambda file: file.write_text("{}"), "no tokenizer that can be loaded"),
        (lambda file: [each.unlink() for each in file.parent.glob("tokenizer*")], "the tokenizer knows no words"),
    ],
    ids=["missing", "half", "empty", "all missing"],
)
def test_a_model_without_its_tokenizer_is_one_line(tmp_path, change, words):
    job = make_toy_job(tmp_path)
    change(job.model / "tokenizer.json")
    with pytest.raises(InputError, match=f"--headrank-model {job.model}: {words}") as error:
        open_training_set(job)
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_is_not_there_is_named(tmp_path, toy):
    missing = str(tmp_path / "nope")
    with pytest.raises(InputError, match=f"--tokenizer-model {missing}: no tokenizer"):
        open_training_set(toy, tokenizer=missing)


def test_tokens_are_kept_below_save_where_the_data_cannot_be_written(tmp_path, caplog):
    job = make_toy_job(tmp_path)
    (job.train / "cache").touch()
    with pytest.raises(
        InputError, match=f"{job.train}/cache: .*File exists.* make the folder writable, or give --save"
    ):
        open_training_set(job)
    with caplog.at_level(logging.INFO):
        data = open_training_set(job, save=str(tmp_path / "run"))
    assert data.cache.folder.parent == tmp_path / "run" / "token_cache" and len(data) > 0
    assert [
        line
        for line in caplog.messages
        if str(job.train / "cache") in line and str(tmp_path / "run" / "token_cache") in line
    ]


def test_one_rank_that_cannot_write_sends_all_below_save(tmp_path, monkeypatch, caplog):
    job, refusals = make_toy_job(tmp_path), [[None, "elsewhere: cannot be written"], [None, None]]
    monkeypatch.setattr(data_setup, "gather_from_all", lambda _: refusals.pop(0))
    with caplog.at_level(logging.INFO):
        data = open_training_set(job, save=str(tmp_path / "run"))
    assert (
        data.cache.folder.parent == tmp_path / "run" / "token_cache" and "elsewhere: cannot be written" in caplog.text
    )


def open_training_set(job: ToyJob, **changes: str) -> object:
    config = replace(config_from(parse_arguments(job.flags()), 1), **changes)
    return data_setup.open_training_set(
        config, ModelShape.from_hf(str(job.model)), HeadSet.load(str(job.heads)), str(job.train)
    )
