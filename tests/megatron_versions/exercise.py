"""One life of a model under the Megatron-Core on the path: trained, saved, resumed at another size, exported. A process
of the test.

Rank 0 writes what it found as JSON: the release, the losses, and a digest of the exported weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch


def main(place: Path, toy_flags: list[str], others: list[Path]) -> None:
    """``others`` are checkpoints of other releases, to be exported too."""
    import megatron.core
    from safetensors.torch import load_file

    import pretrain_headrank
    from headrank.commands import main as headrank

    is_first = os.environ["RANK"] == "0"
    model = toy_flags[toy_flags.index("--headrank-model") + 1]
    save = place / "run"
    split = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    shared = [*toy_flags, "--save", str(save), "--use-distributed-optimizer", "--train-iters", "4"]
    _next_port()
    assert pretrain_headrank.main([*shared, *split, "--exit-interval", "2"]) == 0
    _next_port()
    assert pretrain_headrank.main(shared) == 0  # two data-parallel ranks
    codes, digests = {}, {}
    for name, checkpoint in {"own": save, **{other.parent.name: other for other in others}}.items():
        _next_port()
        output = place / f"hf-{name}"
        codes[name] = headrank(["export-hf", "--checkpoint", str(checkpoint), "--base", model, "--output", str(output)])
        if codes[name] == 0 and is_first:
            tensors = load_file(output / "model.safetensors")
            digest = hashlib.sha256()
            for key in sorted(tensors):
                digest.update(key.encode() + tensors[key].contiguous().view(torch.uint8).numpy().tobytes())
            digests[name] = digest.hexdigest()
    if is_first:
        events = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
        losses = [event["total"] for event in events if event["event"] == "train"]
        found = {"release": megatron.core.__version__, "losses": losses, "codes": codes, "digests": digests}
        (place / "found.json").write_text(json.dumps(found))


def _next_port() -> None:
    """The last group's may still be closing."""
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), [Path(name) for name in json.loads(sys.argv[3])])
