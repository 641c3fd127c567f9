"""The sample viewer shows the prompt from its tokens, grades as colours, and who is preferred over whom."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from data_tools.show_sample import render_context
from headrank.commands import main
from headrank.errors import InputError
from headrank.method.prompt import PromptTemplate
from headrank.method.spans import PromptEncoder
from tests.tiny_models import tiny_tokenizer
from tests.toy_collections import write_training_files


def shown(folder: Path, number: int, template: PromptTemplate | None = None, words: int = 40, **options: object) -> str:
    encoder = PromptEncoder(tiny_tokenizer(), template or PromptTemplate())
    console = Console(file=io.StringIO(), width=200, **options)
    for part in render_context(folder, number, encoder, words):
        console.print(part)
    return console.file.getvalue()


def test_the_prompt_is_shown_from_its_real_tokens(tmp_path: Path) -> None:
    text = shown(write_training_files(tmp_path), 0)
    assert "context a/q1" in text
    assert "<|im_start|>user" in text
    assert "passage number 3 of q1 about fleas" in text
    assert "Query: what is q1<|im_end|>" in text
    assert "Query: N/A<|im_end|>" in text


def test_the_table_says_where_a_document_stands_and_what_it_beats(tmp_path: Path) -> None:
    folder = write_training_files(tmp_path)
    rows = {
        line.split()[2]: line.split()
        for line in shown(folder, 0).splitlines()
        if line.strip().startswith("[") and "q1d" in line
    }
    assert rows["q1d0"][:4] == ["[1]", "1", "q1d0", "2"]
    assert rows["q1d0"][5:] == ["[2]", "[5]"]
    assert rows["q1d3"][3] == "-"
    reversed_rows = shown(folder, 0, PromptTemplate(order="reversed")).splitlines()
    assert next(line for line in reversed_rows if "q1d4" in line and "[1]" in line)


def test_colours_follow_the_grades_and_long_documents_are_cut(tmp_path: Path) -> None:
    folder = write_training_files(tmp_path)
    assert "\x1b[31mpassage number 2" in shown(folder, 0, force_terminal=True, color_system="standard").replace(
        "\x1b[31m ", "\x1b[31m"
    )
    assert "passage number … (5 more words)" in shown(folder, 0, words=2)


def test_a_number_that_is_not_there_is_an_error_with_the_range(tmp_path: Path) -> None:
    folder = write_training_files(tmp_path)
    for number in (-1, 3):
        with pytest.raises(InputError, match="from 0 to 2"):
            shown(folder, number)


def test_pairs_of_other_documents_and_empty_files_are_named(tmp_path: Path) -> None:
    folder = write_training_files(tmp_path)
    pairs = folder / "pairs.jsonl"
    pairs.write_text(pairs.read_text().replace('"chosen": "q1d0"', '"chosen": "elsewhere"'))
    with pytest.raises(InputError, match=r"pairs\.jsonl: document 'elsewhere' is not in context 'a/q1'"):
        shown(folder, 0)
    (folder / "contexts.jsonl").write_text("")
    with pytest.raises(InputError, match=r"contexts\.jsonl: no contexts; the file is empty"):
        shown(folder, 0)


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pairs", "--output", str(tmp_path), "--show", "0"]) == 2
    assert "has no contexts.jsonl to show; build it first" in capsys.readouterr().err
    write_training_files(tmp_path)
    (tmp_path / "model").mkdir()
    assert main(["pairs", "--output", str(tmp_path), "--show", "0", "--model", str(tmp_path / "model")]) == 2
    error = capsys.readouterr().err
    assert "no tokenizer that can be loaded" in error
    assert error.count("\n") == 1
