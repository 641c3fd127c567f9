#!/usr/bin/env bash
# HeadRank on Qwen3-4B, the paper's run: 8 GPUs at TP 8, learning rate 2e-6; it saw convergence near step 2,800 of one
# epoch.
#
#   launch/train_qwen3_4b.sh [MODEL [HEADS [TRAIN_DATA [SAVE]]]] [flags of pretrain_headrank.py]
#   DRY_RUN=1 launch/train_qwen3_4b.sh          PAIRS_PER_CONTEXT=16 launch/train_qwen3_4b.sh
#
# All variables and their defaults are in launch/train_common.sh.
set -euo pipefail

NAME=qwen3_4b
MODEL=${MODEL:-models/Qwen3-4B}
TP=${TP:-8}
LR=${LR:-2e-6}

# shellcheck source=launch/train_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"
