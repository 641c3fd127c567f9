"""Ten steps of our loop, then ten of Megatron-LM's trainer, under the Megatron-Core on the path. A process of the
test.
"""

from __future__ import annotations

import json
import os
import sys
import typing
from pathlib import Path

import typing_extensions


def main(place: Path, flags: list[str]) -> None:
    """Our losses go to a file; Megatron's are in what it prints."""
    # Python 3.12's, which megatron.training imports from 0.18 on and uses as a mark only
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override
    import pretrain_headrank

    save = place / "ours"
    assert pretrain_headrank.main([*flags, "--save", str(save)]) == 0
    if os.environ["RANK"] == "0":
        events = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
        (place / "ours.json").write_text(json.dumps([event["total"] for event in events if event["event"] == "train"]))
        print("MEGATRON'S TRAINER", flush=True)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)  # the last group's may still be closing
    assert pretrain_headrank.main([*flags, "--save", str(place / "megatron"), "--headrank-trainer", "megatron"]) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
