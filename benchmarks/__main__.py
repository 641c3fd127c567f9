"""`make bench`: the benchmarks in order, each in a process of its own so that memory peaks do not mix."""

from __future__ import annotations

import subprocess
import sys

if __name__ == "__main__":
    for name in ("rerank_speed", "start_up", "late_speed", "store_speed", "training_cost"):
        print(f"== benchmarks.{name}", flush=True)
        code = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]], check=False).returncode
        if code:
            sys.exit(code)
