"""What a first answer imports, maps and loads: names of modules and counts, never seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from headrank import HeadRankReranker
from headrank.commands import VERBS
from headrank.reranking import joined, plain_tokenizer
from headrank.reranking.joined import PackedProjections, pack
from tests.tiny_models import make_tiny_model
from tests.unit.test_late_reranker import HEADS, QUERIES, texts

ROOT = Path(__file__).resolve().parents[2]
# what a rerank may bring: the packages it works with, and nothing of training, evaluation, plots or transformers'
# modelling code
WANTED = {
    "headrank",
    "jinja2",
    "markupsafe",
    "numpy",
    "safetensors",
    "tokenizers",
    "torch",
    "torchgen",
    "tqdm",
    "typing_extensions",
}
AT_ONCE = {"headrank"}
ENDS = "\nimport json; print('\\n' + json.dumps(sorted(sys.modules)))"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a late readout, and a collection of one query and five passages."""
    folder = tmp_path_factory.mktemp("start")
    make_tiny_model(folder / "model", "llama")
    HEADS.save(folder / "heads.json")
    lines = [json.dumps({"docid": f"d{number}", "title": "", "text": text}) for number, text in enumerate(texts(5))]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "queries.tsv").write_text(f"q\t{QUERIES[0]}\n")
    (folder / "run.bm25.txt").write_text(
        "".join(f"q Q0 d{number} {number + 1} {9 - number} bm25\n" for number in range(5))
    )
    return folder


def modules_after(code: str) -> set[str]:
    """The modules of a new interpreter after some code."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}{ENDS}"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def packages_beyond_python(modules: set[str]) -> set[str]:
    """Top-level packages that came from site-packages or from here."""
    # what the interpreter itself brings at start: .pth files of editable installs and the like
    brought = {name.partition(".")[0] for name in modules_after("")}
    found = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - brought
    return {name for name in found if not name.startswith("__")}  # __mp_main__ is the program itself


def test_help_version_and_the_package_itself_bring_no_other_package() -> None:
    quiet = (
        "import contextlib, io\nwith contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n    "
    )
    assert packages_beyond_python(modules_after("import headrank")) == AT_ONCE
    for flag in ("--help", "--version"):
        assert (
            packages_beyond_python(modules_after(f"from headrank.commands import main\n{quiet}main(['{flag}'])"))
            == AT_ONCE
        )


def test_no_verb_needs_torch_to_explain_itself() -> None:
    code = (
        f"from headrank.commands import build_verb_parser\nfor verb in {list(VERBS)}: "
        "build_verb_parser(verb).format_help()"
    )
    heavy = {"torch", "transformers", "scipy", "matplotlib", "pandas", "sklearn", "megatron"} & packages_beyond_python(
        modules_after(code)
    )
    assert not heavy


def test_a_rerank_imports_the_packages_that_it_works_with_and_no_others(place: Path) -> None:
    arguments = [
        "rerank",
        "--model",
        str(place / "model"),
        "--heads",
        str(place / "heads.json"),
        "--collection",
        str(place),
    ]
    arguments += ["--device", "cpu", "--output", str(place / "out.txt")]
    modules = modules_after(f"from headrank.commands import main\nassert main({arguments!r}) == 0")
    assert packages_beyond_python(modules) <= WANTED
    ours = {name for name in modules if name.startswith("headrank.")}
    assert not {
        name
        for name in ours
        if name.split(".")[1] in ("experiments", "reports", "serving", "selection", "evaluation", "generation")
    }
    assert not {"torch._dynamo", "torch._inductor", "torch.onnx"} & modules


def test_the_tokenizer_is_loaded_once_and_the_weights_stay_in_their_file(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setattr(
        plain_tokenizer, "_json", lambda path, read=plain_tokenizer._json: loaded.append(path.name) or read(path)
    )
    reranker = HeadRankReranker.from_pretrained(place / "model", place / "heads.json", device="cpu", dtype="float32")
    reranker.rank(QUERIES[0], texts(5))
    assert loaded.count("tokenizer_config.json") == 1
    assert isinstance(reranker.reader.tokenizer._tokenizer, Tokenizer)
    maps = Path("/proc/self/maps")
    if maps.is_file():
        lines = [
            line.split()[0]
            for line in maps.read_text().splitlines()
            if line.endswith(os.path.realpath(place / "model" / "model.safetensors"))
        ]
        spans = [tuple(int(end, 16) for end in line.split("-")) for line in lines]
        addresses = [weight.data_ptr() for weight in reranker.reader.model.parameters()]
        assert all(any(low <= address < high for low, high in spans) for address in addresses)


def test_a_packed_decoder_gives_the_scores_of_the_plain_one(place: Path) -> None:
    plain, packed = (
        HeadRankReranker.from_pretrained(place / "model", place / "heads.json", device="cpu", dtype="float32")
        for _ in "ab"
    )
    pack(packed.reader.model)
    pack(packed.reader.model)  # twice is once
    kinds = {type(module) for module in packed.reader.model.modules()}
    assert PackedProjections in kinds
    one, other = (ranker.score(QUERIES[0], texts(5)) for ranker in (plain, packed))
    assert abs(one - other).max() < 1e-4 * one.std()


def test_weights_that_may_be_mapped_and_are_large_are_not_copied(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "_MOST_COPIED", 1000)
    large = HeadRankReranker.from_pretrained(place / "model", place / "heads.json", device="cpu", dtype="float32")
    half = HeadRankReranker.from_pretrained(place / "model", place / "heads.json", device="cpu", dtype="bfloat16")
    for reranker in (large, half):
        pack(reranker.reader.model)
    assert not large.reader.model.is_joined
    # bfloat16 weights were converted, not mapped: packing replaces them
    assert half.reader.model.is_joined == torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_queries_of_one_length_share_a_forward_and_keep_their_vectors(
    place: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    reranker = HeadRankReranker.from_pretrained(place / "model", place / "heads.json", device="cpu", dtype=dtype)
    pack(reranker.reader.model)
    late, rows = reranker.late, []
    queries = [late.encoder.encode_query(query) for query in (*QUERIES, "salt", "sea " * 30, *QUERIES)]
    late.opening()
    run = late._run
    monkeypatch.setattr(late, "_run", lambda ids, *rest: rows.append(len(ids)) or run(ids, *rest))
    together = late.vectors_of(queries)
    assert sum(rows) == len(queries) and len(rows) < len(queries)
    for query, found in zip(queries, together, strict=True):
        alone = late.query_vectors(query)
        assert found.vectors_UKRD.shape == alone.vectors_UKRD.shape
        for name in ("vectors_UKRD", "opening_UKR", "weights_UR"):
            one, other = getattr(found, name), getattr(alone, name)
            assert (one - other).abs().max() <= 1e-6 * other.abs().max()
