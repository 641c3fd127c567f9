"""`python -m headrank` and `torchrun -m headrank` are the same as the console command."""

from __future__ import annotations

import sys

from headrank.commands import main

if __name__ == "__main__":
    sys.exit(main())
