"""The first answer of a new process: `python -m benchmarks.start_up`.

One query over five passages with the embedded model, in processes of their own, interleaved round by round, files warm:

  rerank    `headrank rerank --model embedded` on files, as a user types it
  library   from_pretrained("embedded") and one call of rank
  floor     the imports that any such program needs (torch, tokenizers, safetensors) and one forward of the same tokens:
            weights mapped from the model's file, products, attention and gated units in the same number format,
            written out bare; no adapter
  imports   the floor's imports alone
  help      `headrank --help`

Times are CPU seconds of the process and its children, on one thread. Goals: rerank in at most 7 s, and within 1.3 times
the floor. `--profile` prints instead where the time of importing and running goes, module by module.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headrank.reranking.model_sources import resolve_model
from headrank.reranking.shipped_readouts import DEFAULT, shipped_path

QUERY = "why is the sea salty"
SENTENCE = "rivers carry salt from the rocks into the sea, where it stays when water leaves "
PASSAGES = [f"passage {number}: {SENTENCE * 3}" for number in range(5)]
GOAL_SECONDS, GOAL_RATIO = 7.0, 1.3
LIBRARY = """
import json, sys
from headrank import HeadRankReranker
query, passages = json.load(open(sys.argv[1]))
HeadRankReranker.from_pretrained("embedded").rank(query, passages)
"""
IMPORTS = "import torch, tokenizers, safetensors"
FLOOR = """
import json, sys
import torch
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import Tokenizer

query, passages = json.load(open(sys.argv[1]))
folder, num_layers, dtype = sys.argv[2], int(sys.argv[3]), getattr(torch, sys.argv[4])
config = json.load(open(folder + "/config.json"))
heads, groups, hidden = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
tokenizer = Tokenizer.from_file(folder + "/tokenizer.json")
rows = [row.ids for row in tokenizer.encode_batch([query, *passages])]


def norm(x, weight):
    return F.rms_norm(x, (hidden,), weight, config["rms_norm_eps"])


with torch.inference_mode(), safe_open(folder + "/model.safetensors", "pt") as file:
    layers = []
    for layer in range(num_layers):
        names = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
        names += ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        layers.append([file.get_tensor(f"model.layers.{layer}.{name}.weight").to(dtype) for name in names])
    table = file.get_tensor("model.embed_tokens.weight")
    longest = max(map(len, rows[1:]))
    for ids in (rows[:1], [row + [0] * (longest - len(row)) for row in rows[1:]]):
        x = F.embedding(torch.tensor(ids), table).to(dtype)
        for before, q, k, v, o, after, gate, up, down in layers:
            y = norm(x, before)
            shape = (*y.shape[:2], -1, hidden // heads)
            query, key, value = (F.linear(y, weight).view(shape).transpose(1, 2) for weight in (q, k, v))
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != groups)
            x = x + F.linear(y.transpose(1, 2).flatten(2), o)
            y = norm(x, after)
            x = x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
"""


def write_collection(folder: Path) -> None:
    """The query and its passages as a collection, and as JSON for programs."""
    (folder / "queries.tsv").write_text(f"q\t{QUERY}\n")
    lines = [json.dumps({"docid": f"d{number}", "title": "", "text": text}) for number, text in enumerate(PASSAGES)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "run.bm25.txt").write_text(
        "".join(f"q Q0 d{number} {number + 1} {9 - number} bm25\n" for number in range(len(PASSAGES)))
    )
    (folder / "input.json").write_text(json.dumps([QUERY, PASSAGES]))


def commands(folder: Path, dtype: str) -> dict[str, list[str]]:
    """The contenders' command lines."""
    last_layer = json.loads(shipped_path(DEFAULT).read_text(encoding="utf-8"))["l_max"]
    rerank = [
        sys.executable,
        "-m",
        "headrank",
        "rerank",
        "--model",
        "embedded",
        "--collection",
        str(folder),
        "--dtype",
        dtype,
    ]
    floor_dtype = "float32" if dtype == "int8" else dtype
    return {
        "rerank": [*rerank, "--output", str(folder / "out.txt"), "--restart"],
        "library": [sys.executable, "-c", LIBRARY, str(folder / "input.json")],
        "floor": [
            sys.executable,
            "-c",
            FLOOR,
            str(folder / "input.json"),
            resolve_model("embedded"),
            str(last_layer + 1),
            floor_dtype,
        ],
        "imports": [sys.executable, "-c", IMPORTS],
        "help": [sys.executable, "-m", "headrank", "--help"],
    }


def seconds(command: list[str]) -> list[float]:
    """CPU and wall seconds of one process and what it started."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return [after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.perf_counter() - started]


def profile(command: list[str], rows: int = 25) -> None:
    """Modules by what importing each took on its own, then functions of the whole run."""
    done = subprocess.run([*command[:1], "-X", "importtime", *command[1:]], check=True, capture_output=True, text=True)
    found = [
        line.removeprefix("import time:").split("|")
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    ]
    own = sorted(((int(self), name.strip()) for self, _, name in found if self.strip().isdecimal()), reverse=True)
    print(f"{len(own)} modules imported; ms of each on its own:")
    print("\n".join(f"{microseconds / 1e3:8.1f}  {name}" for microseconds, name in own[:rows]))
    flags = ["-m", "cProfile", "-s", "tottime"]
    text = subprocess.run([*command[:1], *flags, *command[1:]], check=True, capture_output=True, text=True).stdout
    print("\n".join(text.splitlines()[: rows + 12]))


def main(argv: list[str] | None = None) -> int:
    """Print seconds and ratios; --json FILE keeps them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", help="of rerank and floor (default: what auto is here)")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="start-up-") as name:
        folder = Path(name)
        write_collection(folder)
        ways = commands(folder, args.dtype or automatic())
        if args.profile:
            profile(ways["rerank"])
            return 0
        times: dict[str, list[list[float]]] = {way: [] for way in ways}
        for command in ways.values():
            seconds(command)
        for _ in range(args.rounds):
            for way, command in ways.items():
                times[way].append(seconds(command))
    medians = {way: statistics.median(cpu for cpu, _ in found) for way, found in times.items()}
    ratio = statistics.median(a[0] / b[0] for a, b in zip(times["rerank"], times["floor"], strict=True))
    print("one query of five passages, CPU s: " + ", ".join(f"{way} {value:.2f}" for way, value in medians.items()))
    print(
        f"     rerank {medians['rerank']:.2f} s (goal {GOAL_SECONDS:.0f}), rerank / floor {ratio:.2f} (goal "
        f"{GOAL_RATIO})"
    )
    if args.json:
        args.json.write_text(json.dumps({"times": times, "rerank / floor": ratio}, indent=2) + "\n")
    return 0


def automatic() -> str:
    """The number format that auto takes here, asked in a process of its own."""
    code = "from headrank.placement import fast_bfloat16; print('bfloat16' if fast_bfloat16() else 'float32')"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()[-1]


if __name__ == "__main__":
    sys.exit(main())
