"""How good are the heads of other models, each with a readout of its own: `python -m benchmarks.readout_models
NAME=MODEL ...`

For each model the lists of one judged collection are read in the late layout (short prompt, top 20, 64 words,
bfloat16), and the cross-validation of a readout of all heads is kept as OUTPUT/model-NAME.json; `make results-page`
makes the table of docs/readouts.md of it, and `--figure FILE` the figure. MODEL is 'embedded', a Hugging Face folder,
or a GGUF file, which is converted beside it.

The branch stands at position 256: Gemma's sliding window of 512 must hold it.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes

from headrank.commands import main as headrank
from headrank.evaluation.significance import bootstrap_interval
from headrank.reports.figures.style import GAIN, INK, MUTED, new_figure, save_figure, styled, subtitle

_log = logging.getLogger(__name__)
BRANCH_POSITION = 256
# millions, without embeddings
SIZES = {"smollm2-135m": 106, "gemma3-270m": 100, "qwen2.5-coder-0.5b": 358, "qwen2.5-coder-1.5b": 1311}
TITLES = {"smollm2-135m": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M", "qwen2.5-coder-0.5b": "Qwen2.5-Coder 0.5B"}
TITLES |= {"qwen2.5-coder-1.5b": "Qwen2.5-Coder 1.5B"}
SENTENCE = (
    "The flea is a small insect that cannot fly. It lives on the blood of other animals, and jumps from one to the "
    "next."
)


def converted(source: Path) -> Path:
    """The Hugging Face folder of a GGUF file, made on first use; says the perplexity of a plain sentence, which a
    wrong loading ruins.
    """
    folder = source.parent / f"{source.stem}-hf"
    if (folder / "config.json").is_file():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer(SENTENCE)["input_ids"]])
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss
    _log.warning(
        "%s: perplexity %.1f on a plain sentence, first tokens %s", source.name, float(loss.exp()), ids[0, :3].tolist()
    )
    from safetensors.torch import save_file

    # transformers refuses to save what it loaded from GGUF, because it still counts as quantised
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {
        key: value.to(torch.bfloat16).contiguous() for key, value in model.state_dict().items() if key not in tied
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)  # last: it marks the folder as complete
    return folder


def fit(name: str, model: str, args: argparse.Namespace) -> None:
    """Cross-validate one model's readout and keep the table."""
    source = str(converted(Path(model))) if model.endswith(".gguf") else model
    work, lists = Path(args.work), ["--lists", str(args.lists)] if args.lists else []
    words = ["select-heads", "--method", "readout", "--model", source, "--collection", args.collection, "--depth", "20"]
    words += ["--list-words", "64", "--branch-position", str(BRANCH_POSITION), "--dtype", "bfloat16", *lists]
    words += ["--l2", "0.01", "0.1", "0.3", "1", "--cache", str(work / "statistics"), "--no-picture"]
    words += ["--report", str(Path(args.output) / f"model-{name}.json"), "--output", str(work / f"{name}.json")]
    code = headrank(words)
    if code:
        raise SystemExit(code)


def draw(folder: Path, path: str) -> None:
    """NDCG@10 of every model there is a table of against its size, with 95% intervals, and the first stage as a
    line.
    """
    reports = {
        name: json.loads(file.read_text()) for name in SIZES if (file := folder / f"model-{name}.json").is_file()
    }
    with styled():
        figure = new_figure(5.2, 3.2)
        axes: Axes = figure.subplots()
        for name, report in reports.items():
            row: dict[str, Any] = max(report["rows"], key=lambda one: one["layers"])
            low, high = bootstrap_interval(list(row["per_query"].values()))
            quality = row["quality"]
            axes.errorbar([SIZES[name]], [quality], [[quality - low], [high - quality]], fmt="o", color=GAIN, capsize=3)
            label = f"{TITLES[name]} ({len(row['per_query'])})"
            axes.annotate(label, (SIZES[name], quality), (6, 6), textcoords="offset points", fontsize=8, color=INK)
            first = report["first_stage"]["quality"]
            axes.plot([SIZES[name]], [first], marker="_", markersize=16, color=MUTED)
        axes.set_xscale("log")
        axes.set_xlim(60, 4000)
        axes.grid(axis="y")
        axes.set_xlabel("parameters without embeddings, millions")
        axes.set_ylabel("nDCG@10 × 100")
        subtitle(
            axes,
            "Untouched models, late layout, own readout",
            "lists in brackets; bars: 95% over queries; dashes: BM25 on the same lists",
        )
        save_figure(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Fit every model given, then draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME=MODEL", help=f"names: {', '.join(SIZES)}")
    parser.add_argument("--collection", default="data/dl21", metavar="DIR")
    parser.add_argument("--lists", type=int, metavar="N", help="at most N lists (default: all)")
    parser.add_argument(
        "--work", default="runs/readout-models", metavar="DIR", help="statistics and heads.json of each model"
    )
    parser.add_argument("--output", default="results/readouts", metavar="DIR")
    parser.add_argument("--figure", metavar="FILE", help="draw what OUTPUT holds, such as docs/figures/readout_models")
    args = parser.parse_args(argv)
    for text in args.models:
        name, _, model = text.partition("=")
        if name not in SIZES or not model:
            parser.error(f"{text!r} is not NAME=MODEL with one of {', '.join(SIZES)}")
        fit(name, model, args)
    if args.figure:
        draw(Path(args.output), args.figure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
