#!/usr/bin/env bash
# HeadRank on Qwen3-0.6B, the paper's run: 8 GPUs at TP 4, learning rate 1e-5; it saw convergence near step 1,800 of one
# epoch.
#
#   launch/train_qwen3_0.6b.sh [MODEL [HEADS [TRAIN_DATA [SAVE]]]] [flags of pretrain_headrank.py]
#   DRY_RUN=1 launch/train_qwen3_0.6b.sh          PAIRS_PER_CONTEXT=16 launch/train_qwen3_0.6b.sh
#
# All variables and their defaults are in launch/train_common.sh.
set -euo pipefail

NAME=qwen3_0.6b
MODEL=${MODEL:-models/Qwen3-0.6B}
TP=${TP:-4}
LR=${LR:-1e-5}

# shellcheck source=launch/train_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"
