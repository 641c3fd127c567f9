#!/usr/bin/env bash
# Choose what the paper leaves open on a validation split of the training queries: one short run a row, then one table.
#
#   VALID_QUERIES=examples/collection/heldout.qids launch/tune.sh
#   COLLECTION="dl21 dl23" VALID_QUERIES=valid.qids OUTPUT=runs/seeds SETTINGS=launch/seeds.tsv launch/tune.sh   # the default with five seeds
#
# SETTINGS are lines of NAME<TAB>flags for pretrain_headrank.py; '#' begins a comment. A row is one process; its learning rate is 1e-4 unless
# it gives --lr. All rows share the pairs, the heads, the order of the samples (unless a row gives --seed) and the frozen model's scores.
# The test collections are not seen. Rows that are finished, on the same pairs and heads, are skipped, so rows can be added.
# `headrank report --training OUTPUT/rows` prints the table again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/common.sh

MODEL=${MODEL:-embedded}
COLLECTION=${COLLECTION:-examples/collection}  # folders to train on, separated by spaces
VALID_QUERIES=${VALID_QUERIES:-}               # file of query ids, one a line, to judge the rows by
TRAIN_QUERIES=${TRAIN_QUERIES:-}               # file of query ids to train on; empty: all others
OUTPUT=${OUTPUT:-runs/tune}
SETTINGS=${SETTINGS:-launch/tune.tsv}
HEADS=${HEADS:-}                               # heads.json; empty: selected here, on the training queries
ITERATIONS=${ITERATIONS:-50}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-1}      # few lists: many small steps move the weights further than few large ones
PAIRS_FLAGS=${PAIRS_FLAGS:---depth 100 --unjudged-as-zero --sublists 3 --sublist-size 12} # training lists
VALID_FLAGS=${VALID_FLAGS:---depth 100 --unjudged-as-zero --sublists 3 --sublist-size 12} # lists to judge the rows by
SELECT_ON=${SELECT_ON:-}                       # where heads are selected; empty: the training queries' top DEPTH; 'pairs': the training lists; else folders
SELECT_FLAGS=${SELECT_FLAGS:-}
DEPTH=${DEPTH:-20}                             # candidates in a list for head selection
PERMUTATIONS=${PERMUTATIONS:-1}
SEED=${SEED:-1}
JOBS=${JOBS:-1}                                # rows at a time, one process each
PYTHON=${PYTHON:-python}
DRY_RUN=${DRY_RUN:-0}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

for name in ITERATIONS GLOBAL_BATCH_SIZE DEPTH JOBS; do need_number "$name"; done
for name in PERMUTATIONS SEED; do need_number "$name" 0; done
need_switch DRY_RUN
[[ -n $VALID_QUERIES ]] || stop "VALID_QUERIES is missing: a file of query ids, one a line, to judge the rows by"
need_file VALID_QUERIES TRAIN_QUERIES HEADS
[[ -f $SETTINGS ]] || stop "SETTINGS '$SETTINGS' is no file (a relative path is taken from $PWD)"

declare -A FLAGS=()
NAMES=()
number=0
while IFS=$'\t' read -r name flags || [[ -n $name ]]; do
    number=$((number + 1))
    [[ -n $name && $name != \#* ]] || continue
    [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || stop "$SETTINGS:$number: '$name' is no name of letters, digits, '.', '-' and '_'; a tab parts it from its flags"
    [[ -z ${FLAGS[$name]+given} ]] || stop "$SETTINGS:$number: '$name' is there twice"
    NAMES+=("$name") FLAGS[$name]=$flags
done <"$SETTINGS"
((${#NAMES[@]})) || stop "$SETTINGS: no rows; a row is NAME<TAB>flags"

read -ra folders <<<"$COLLECTION"
read -ra PAIRS_EXTRA <<<"$PAIRS_FLAGS"
read -ra VALID_EXTRA <<<"$VALID_FLAGS"
read -ra SELECT_EXTRA <<<"$SELECT_FLAGS"
need_collections COLLECTION "${folders[@]}"
COLLECTIONS=()
for folder in "${folders[@]}"; do COLLECTIONS+=(--collection "$folder"); done
QUERIES=(--hold-out "$VALID_QUERIES")
[[ -z $TRAIN_QUERIES ]] || QUERIES=(--only "$TRAIN_QUERIES")
selection_lists "${COLLECTIONS[@]}" "${QUERIES[@]}"

once "$OUTPUT/pairs/pairs.summary.json" "$(newest "$VALID_QUERIES" "$TRAIN_QUERIES")" "$PYTHON" -m headrank pairs "${COLLECTIONS[@]}" \
    "${QUERIES[@]}" "${PAIRS_EXTRA[@]}" --output "$OUTPUT/pairs"
once "$OUTPUT/valid/pairs.summary.json" "$VALID_QUERIES" "$PYTHON" -m headrank pairs "${COLLECTIONS[@]}" --only "$VALID_QUERIES" "${VALID_EXTRA[@]}" \
    --output "$OUTPUT/valid"
if [[ -z $HEADS ]]; then
    HEADS=$OUTPUT/heads.json
    once "$HEADS" "$OUTPUT/pairs/pairs.summary.json" "$PYTHON" -m headrank select-heads --model "$MODEL" "${LISTS[@]}" \
        --permutations "$PERMUTATIONS" --cache "$OUTPUT/head-statistics" "${SELECT_EXTRA[@]}" --output "$HEADS"
fi

# The cache of the frozen model's scores is named by a checksum of what the rows read: other pairs or heads are another command and another cache.
DATA=$( (echo "$MODEL" && cat "$OUTPUT"/{pairs,valid}/*.jsonl "$HEADS") 2>/dev/null | cksum) || ((DRY_RUN)) ||
    stop "$OUTPUT/pairs or $OUTPUT/valid holds no lists; remove both and start again"
COMMON=(--headrank-model "$MODEL" --headrank-heads "$HEADS" --train-data-path "$OUTPUT/pairs" --valid-data-path "$OUTPUT/valid"
    --headrank-reference-cache "$OUTPUT/reference_scores.${DATA%% *}.jsonl" --headrank-epoch-unit contexts --headrank-permutations "$PERMUTATIONS"
    --train-iters "$ITERATIONS" --eval-interval "$ITERATIONS" --global-batch-size "$GLOBAL_BATCH_SIZE" --seed "$SEED" --clip-grad 5.0
    --lr 1e-4 --lr-decay-style cosine --lr-warmup-iters $((ITERATIONS / 10 + 1)) --log-interval 1 --save-interval 100000 --no-save-optim)

row() { # FOLDER COMMAND...: one run; its log beside it; checkpoints are not kept
    local here=$1; shift
    "$@" >"$here/log.txt" 2>&1 || { echo "[${here##*/}] failed; see $here/log.txt" >&2; return 1; }
    rm -rf "$here"/iter_* "$here/best"
}

# The first row is alone until it has completed the reference scores that all share.
failed=0 pids=()
for name in "${NAMES[@]}"; do
    here=$OUTPUT/rows/$name
    read -ra flags <<<"${FLAGS[$name]}"
    command=("$PYTHON" pretrain_headrank.py "${COMMON[@]}" --save "$here" "${flags[@]}")
    if [[ -f $here/training_complete.json && -f $here/command && $(<"$here/command") == "${command[*]}" ]]; then echo "[$name] done before"; continue; fi
    while (($(jobs -rp | wc -l) >= JOBS)); do sleep 1; done
    echo "[$name] ${FLAGS[$name]}"
    if ((DRY_RUN)); then run "${command[@]}"; continue; fi
    rm -rf "$here" && mkdir -p "$here" && echo "${command[*]}" >"$here/command"
    row "$here" "${command[@]}" &
    pids+=($!)
    while ((${#pids[@]} == 1)) && [[ ! -s $here/metrics.jsonl ]] && kill -0 "${pids[0]}" 2>/dev/null; do sleep 1; done
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
((DRY_RUN)) || "$PYTHON" -m headrank report --training "$OUTPUT/rows" --output "$OUTPUT"
exit $failed
