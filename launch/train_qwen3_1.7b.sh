#!/usr/bin/env bash
# HeadRank on Qwen3-1.7B, the paper's run: 8 GPUs at TP 4, learning rate 5e-6; it saw convergence near step 2,200 of one
# epoch.
#
#   launch/train_qwen3_1.7b.sh [MODEL [HEADS [TRAIN_DATA [SAVE]]]] [flags of pretrain_headrank.py]
#   DRY_RUN=1 launch/train_qwen3_1.7b.sh          PAIRS_PER_CONTEXT=16 launch/train_qwen3_1.7b.sh
#
# All variables and their defaults are in launch/train_common.sh.
set -euo pipefail

NAME=qwen3_1.7b
MODEL=${MODEL:-models/Qwen3-1.7B}
TP=${TP:-4}
LR=${LR:-5e-6}

# shellcheck source=launch/train_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"
