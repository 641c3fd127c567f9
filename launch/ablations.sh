#!/usr/bin/env bash
# The paper's ablation table on your collection: every variant through launch/pipeline.sh, then one table.
#
#   COLLECTION="dl21 dl23" EVAL="dl19 noveleval" OUTPUT=runs/ablations launch/ablations.sh [flags for pretrain_headrank.py]
#   VARIANTS="full no-omega" ... runs some of them. All variables of pipeline.sh but HEADS apply; it resumes where it stopped.
#
# EVAL are folders, not NAME=FOLDER. HEADS is refused: every variant selects its own, on the paper's prompt. LAYOUT=parallel trains and measures
# them with documents side by side, where an empty SHUFFLE saves half of the measurements. For TREC DL with the embedded model first export
# the settings of launch/results.sh: TRAIN_QUERIES, SELECT_ON, DEPTH, SELECT_FLAGS (and in it --query-rows query --max-words 64), PAIRS_FLAGS,
# PERMUTATIONS, LR, EPOCHS, PAIRS_PER_CONTEXT, GLOBAL_BATCH_SIZE, RESELECT_FLAGS (some depend on LAYOUT); and give its --bf16 --lr-decay-style
# cosine --lr-warmup-iters 6, in a sequential layout --headrank-with-retriever-order too.
#
# Rows beside the paper's: 'untrained' reads the same heads in the model before training, 'control' reads the final heads in it: what
# re-selection finds without training (with RESELECT=0 there is none, and 'untrained' alone). Each is measured in the retriever's order
# and shuffled, because position is a trap.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/common.sh

MODEL=${MODEL:-embedded}
COLLECTION=${COLLECTION:-examples/collection}
EVAL=${EVAL:-$COLLECTION}                # collections to measure on, separated by spaces
EVAL_QUERIES=${EVAL_QUERIES:-${HELD_OUT:-}} # file of query ids, when EVAL is the training collection
OUTPUT=${OUTPUT:-runs/ablations}
EVAL_DEPTH=${EVAL_DEPTH:-20}
DTYPE=${DTYPE:-}                         # of reranking: float32, bfloat16, float16; empty: what 'headrank rerank' takes by itself
LAYOUT=${LAYOUT:-sequential}             # of the documents in training and measurement: sequential or parallel
SHUFFLE=${SHUFFLE-1}                     # seed of the shuffled measurement; empty: none
KEEP_CHECKPOINTS=${KEEP_CHECKPOINTS:-0}    # 1 keeps every variant's checkpoints after its export
VARIANTS=${VARIANTS:-full sft all-heads no-gate no-alps no-omega no-prox}
PYTHON=${PYTHON:-python}
DRY_RUN=${DRY_RUN:-0}
export MODEL COLLECTION PYTHON DRY_RUN STATISTICS="${STATISTICS:-$OUTPUT/head-statistics}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

need_switch DRY_RUN KEEP_CHECKPOINTS
need_number EVAL_DEPTH
[[ -z $SHUFFLE ]] || need_number SHUFFLE 0
[[ -z $DTYPE ]] || need_one_of DTYPE float32 bfloat16 float16
need_one_of LAYOUT sequential parallel
need_file EVAL_QUERIES
[[ -z ${HEADS:-} ]] || stop "HEADS is set, but every variant selects its own; unset it"
for name in $VARIANTS; do
    [[ " full sft all-heads no-gate no-alps no-omega no-prox " == *" $name "* ]] ||
        stop "unknown variant '$name'; known: full sft all-heads no-gate no-alps no-omega no-prox"
done

[[ " $* " != *" --headrank-document-layout "* ]] || stop "give LAYOUT=... instead of --headrank-document-layout; measurements need it too"
[[ $LAYOUT == sequential ]] || set -- --headrank-document-layout "$LAYOUT" "$@"

variant() { # NAME [flags]: the switches of one row
    local name=$1; shift
    case $name in
        full) launch/pipeline.sh "$@" ;;
        sft) launch/pipeline.sh "$@" --headrank-loss ranknet ;;
        all-heads) RESELECT=0 launch/pipeline.sh "$@" --headrank-all-heads ;;
        no-gate) SELECT_FLAGS="${SELECT_FLAGS:-} --entropy-weight 0" launch/pipeline.sh "$@" ;;
        no-alps) PAIRS_FLAGS="${PAIRS_FLAGS:-} --random-pairs" launch/pipeline.sh "$@" ;;
        no-omega) launch/pipeline.sh "$@" --headrank-gamma 0 --headrank-eta 0 ;;
        no-prox) launch/pipeline.sh "$@" --headrank-beta 0 ;;
    esac
}

measure() { # NAME COLLECTION SOURCE flags of 'headrank rerank': again only when SOURCE, the queries or the command changed
    local name=$1 folder=$2 source=$3 order; shift 3
    for order in retriever ${SHUFFLE:+shuffled}; do
        local output; output="$OUTPUT/runs/$(basename "$folder")/$order/$name.txt"
        local flags=(--collection "$folder" --depth "$EVAL_DEPTH" --output "$output" --tag "$name")
        [[ -z $DTYPE ]] || flags+=(--dtype "$DTYPE")
        [[ -z $EVAL_QUERIES ]] || flags+=(--only "$EVAL_QUERIES")
        [[ $order == retriever ]] || flags+=(--shuffle "$SHUFFLE")
        once "$output" "$(newest "$source" "$EVAL_QUERIES")" "$PYTHON" -m headrank rerank "$@" "${flags[@]}"
        RUNS+=("$name=$output")
    done
}

read -ra names <<<"$VARIANTS"
read -ra folders <<<"$EVAL"
folders=("${folders[@]%/}")
need_collections EVAL "${folders[@]}"
need_different "EVAL, by the names of its folders" "${folders[@]##*/}"
for name in "${names[@]}"; do
    echo "== $name"
    OUTPUT="$OUTPUT/$name" variant "$name" "$@"
    ((KEEP_CHECKPOINTS || DRY_RUN)) || rm -rf "$OUTPUT/$name"/round-*/train/iter_*
done
for folder in "${folders[@]}"; do
    RUNS=()
    if [[ " ${names[*]} " == *" full "* ]]; then
        untrained=("untrained=$OUTPUT/full/heads.json")
        ((!${RESELECT:-1})) || untrained+=("control=$OUTPUT/full/round-${ROUNDS:-1}/heads.json")
        for row in "${untrained[@]}"; do
            measure "${row%%=*}" "$folder" "${row#*=}" --model "$MODEL" --heads "${row#*=}" --document-layout "$LAYOUT"
        done
    fi
    for name in "${names[@]}"; do measure "$name" "$folder" "$OUTPUT/$name/model/headrank.json" --model "$OUTPUT/$name/model"; done
    for order in retriever ${SHUFFLE:+shuffled}; do
        echo "== $(basename "$folder"), lists in $order order"
        chosen=()
        for entry in "${RUNS[@]}"; do [[ $entry != */"$order"/* ]] || chosen+=("$entry"); done
        table=(--collection "$folder" --first-stage)
        [[ -z $EVAL_QUERIES ]] || table+=(--only "$EVAL_QUERIES")
        run "$PYTHON" -m headrank evaluate "${table[@]}" "${chosen[@]}"
    done
done
