"""What HeadRank adds to Megatron-Core, by substitution and never by surgery."""

from __future__ import annotations

import warnings

# Megatron says so in every module it imports; that Transformer Engine and apex are optional is in the README.
warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*(not installed|Falling back)")
