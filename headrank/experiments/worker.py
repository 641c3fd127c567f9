"""The process of one phase that is a Python call: the call comes pickled on standard input.

A process of its own keeps its peak memory, its crash and its open files to itself.
"""

from __future__ import annotations

import logging
import pickle
import signal
import sys
from types import FrameType

from headrank.errors import InputError
from headrank.experiments.phases import Call


def main() -> int:
    """Do the call; a user's error is one line and exit code 2."""
    call = pickle.load(sys.stdin.buffer)
    assert isinstance(call, Call)
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, _unwind)
    try:
        call.function(*call.arguments)
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _unwind(number: int, frame: FrameType | None) -> None:
    """A signal leaves as an exception does, so that temporary files go."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
