#!/usr/bin/env bash
# The five phases of HeadRank for one model and one collection: pairs, heads, training, heads again, export.
#
#   COLLECTION=examples/collection OUTPUT=runs/demo launch/pipeline.sh [flags for pretrain_headrank.py]
#   MODEL=Qwen/Qwen3-0.6B NPROC=8 TP=4 GLOBAL_BATCH_SIZE=32 LR=1e-5 launch/pipeline.sh --bf16
#
# Stop it, kill it, start it again: a phase whose output is there and was made by the same command from the same inputs is skipped,
# and training goes on from its last good checkpoint. What another command of ours made is replaced; what we did not make is left alone.
# DRY_RUN=1 prints the commands; --rounds N repeats phases 3-4. Relative paths are taken from the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/common.sh

MODEL=${MODEL:-embedded}                       # Hugging Face directory, hub name, or the built-in model
COLLECTION=${COLLECTION:-examples/collection}  # one or more folders, separated by spaces
OUTPUT=${OUTPUT:-runs/pipeline}
TRAIN_QUERIES=${TRAIN_QUERIES:-}               # file of query ids to train on; empty: all but the held-out ones
HELD_OUT=${HELD_OUT:-}                         # file of query ids for held-out NDCG@10; empty: none, the last checkpoint is taken
HEADS=${HEADS:-}                               # heads.json to train; empty: selected here, on the training queries
ROUNDS=${ROUNDS:-1}
DEPTH=${DEPTH:-20}                             # candidates in a training list (the paper: 100)
TOP_K=${TOP_K:-8}
PERMUTATIONS=${PERMUTATIONS:-2}                # fixed shuffles of every list, against position bias; 0 keeps the retriever's order
TP=${TP:-1}
NPROC=${NPROC:-$TP}
SEED=${SEED:-1234}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-4}
PAIRS_PER_CONTEXT=${PAIRS_PER_CONTEXT:-16}
EPOCHS=${EPOCHS:-1}
EPOCH_UNIT=${EPOCH_UNIT:-contexts}             # 'pairs' is the paper's epoch: every pair once
LR=${LR:-1e-4}
EVAL_INTERVAL=${EVAL_INTERVAL:-10}
SAVE_INTERVAL=${SAVE_INTERVAL:-10}
RESELECT=${RESELECT:-1}                        # 0 keeps the heads that were trained (the ablation with all heads)
TRUNCATE=${TRUNCATE:-0}                        # 1 exports only the layers that reranking reads
PAIRS_FLAGS=${PAIRS_FLAGS:-}
HELD_OUT_FLAGS=${HELD_OUT_FLAGS:-}             # as PAIRS_FLAGS, for the held-out lists
SELECT_ON=${SELECT_ON:-}                       # where heads are selected; empty: the training queries' top DEPTH; 'pairs': the training lists; else folders
SELECT_FLAGS=${SELECT_FLAGS:-}
RESELECT_FLAGS=${RESELECT_FLAGS:-}             # flags of the selection after training besides SELECT_FLAGS
STATISTICS=${STATISTICS:-$OUTPUT/head-statistics} # attention statistics of every list, reused by later selections
PYTHON=${PYTHON:-python}
DRY_RUN=${DRY_RUN:-0}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

TRAIN_FLAGS=()
while (($#)); do
    case $1 in
        --rounds) (($# > 1)) || stop "--rounds needs a number"; ROUNDS=$2; shift 2 ;;
        --rounds=*) ROUNDS=${1#*=}; shift ;;
        *) TRAIN_FLAGS+=("$1"); shift ;;
    esac
done
for name in ROUNDS DEPTH TOP_K TP NPROC GLOBAL_BATCH_SIZE PAIRS_PER_CONTEXT EVAL_INTERVAL SAVE_INTERVAL; do need_number "$name"; done
for name in PERMUTATIONS SEED; do need_number "$name" 0; done
need_decimal LR EPOCHS
need_one_of EPOCH_UNIT contexts pairs
need_multiple NPROC "$TP" TP
[[ -z ${TRAIN_FLAGS[0]:-} || ${TRAIN_FLAGS[0]} == -* ]] || stop "'${TRAIN_FLAGS[0]}' is no flag of pretrain_headrank.py; paths are variables, see the head of this file"
need_switch RESELECT TRUNCATE DRY_RUN
need_file HELD_OUT TRAIN_QUERIES HEADS

read -ra folders <<<"$COLLECTION"
need_collections COLLECTION "${folders[@]}"
# What is read must not lie in what is written: an artefact of another command is removed before it is made again.
read -ra selection <<<"${SELECT_ON#pairs}"
for source in "$MODEL" "$HEADS" "$HELD_OUT" "$TRAIN_QUERIES" "${folders[@]}" "${selection[@]}"; do
    [[ -e $source ]] || continue
    [[ ! $(realpath -m --relative-to="$OUTPUT" "$source")/ =~ ^(pairs|held-out|heads.json|model|round-[0-9]+)/ ]] ||
        stop "'$source' is read, but lies where the pipeline writes; choose another OUTPUT than '$OUTPUT'"
done
read -ra PAIRS_EXTRA <<<"$PAIRS_FLAGS"
read -ra HELD_OUT_EXTRA <<<"$HELD_OUT_FLAGS"
read -ra SELECT_EXTRA <<<"$SELECT_FLAGS"
read -ra RESELECT_EXTRA <<<"$RESELECT_FLAGS"
COLLECTIONS=()
for folder in "${folders[@]}"; do COLLECTIONS+=(--collection "$folder"); done
QUERIES=()
[[ -z $HELD_OUT ]] || QUERIES=(--hold-out "$HELD_OUT")
[[ -z $TRAIN_QUERIES ]] || QUERIES=(--only "$TRAIN_QUERIES")
selection_lists "${COLLECTIONS[@]}" "${QUERIES[@]}"
HEADRANK=("$PYTHON" -m headrank)

# Everything the first phases read: small files by content, corpora and weights by name, size and time.
inputs() {
    local folder file
    for folder in "${folders[@]}" "${selection[@]}"; do
        cat "$folder"/{queries.tsv,qrels.txt,run.bm25.txt}
        find -L "$folder" -maxdepth 1 -name 'corpus.jsonl*' -printf '%f %s %T@\n' | sort
    done
    cat ${HELD_OUT:+"$HELD_OUT"} ${TRAIN_QUERIES:+"$TRAIN_QUERIES"} ${HEADS:+"$HEADS"} /dev/null
    for file in "${PAIRS_EXTRA[@]}" "${HELD_OUT_EXTRA[@]}" "${SELECT_EXTRA[@]}"; do [[ ! -f $file ]] || cat "$file"; done # '--only FILE'
    [[ ! -d $MODEL ]] || find -L "$MODEL" -maxdepth 1 \( -name '*.safetensors' -o -name 'config.json' -o -name 'tokenizer*' \) -printf '%f %s %T@\n' | sort
}

# phase NAME ARTEFACT MARKER COMMAND...: run COMMAND unless ARTEFACT/MARKER exists and the stamp says that this very command made it
# from these very inputs. What another command began is removed first; what this one began is continued.
CHAIN=
((DRY_RUN)) || CHAIN=$(inputs | cksum)
phase() {
    local name=$1 artefact=$2 marker=$2/$3 stamp="$OUTPUT/.phases/$1"; shift 3
    CHAIN=$(printf '%s\n' "$CHAIN" "$name" "$@" | cksum)
    if ((DRY_RUN)); then printf '[%s]' "$name"; printf ' %q' "$@"; printf '\n'; return; fi
    marker=${marker%/}
    if [[ -e $marker && -f $stamp && $(<"$stamp") == "$CHAIN done" ]]; then echo "[$name] done before: $artefact"; return; fi
    [[ -f $stamp || ! -e $artefact ]] || stop "$artefact is there and was not made by this pipeline; move it away or choose another OUTPUT"
    [[ -f $stamp && $(<"$stamp") == "$CHAIN"* ]] || rm -rf "$artefact"
    mkdir -p "$OUTPUT/.phases" && echo "$CHAIN" >"$stamp"
    echo "[$name] $*"
    "$@"
    [[ -e $marker ]] || { echo "[$name] stopped before its end; start the pipeline again to go on" >&2; exit 3; }
    echo "$CHAIN done" >"$stamp"
}

SELECT=("${HEADRANK[@]}" select-heads "${LISTS[@]}" --top-k "$TOP_K" --permutations "$PERMUTATIONS"
    --cache "$STATISTICS" "${SELECT_EXTRA[@]}")
EXPORT=("${HEADRANK[@]}" export-hf --overwrite)
CORES=$(getconf _NPROCESSORS_ONLN)
THREADS=${OMP_NUM_THREADS:-$((CORES > NPROC ? CORES / NPROC : 1))} # of a training process; no part of its command: any machine goes on with it
TRAIN=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" pretrain_headrank.py)
DISTRIBUTED_ARGS=(--tensor-model-parallel-size "$TP" --exit-signal-handler)
TRAINING_ARGS=(--global-batch-size "$GLOBAL_BATCH_SIZE" --seed "$SEED" --lr "$LR" --clip-grad 5.0 --log-interval 1 --save-interval "$SAVE_INTERVAL")
HEADRANK_ARGS=(--headrank-pairs-per-context "$PAIRS_PER_CONTEXT" --headrank-permutations "$PERMUTATIONS"
    --headrank-epochs "$EPOCHS" --headrank-epoch-unit "$EPOCH_UNIT")
DATA_ARGS=(--train-data-path "$OUTPUT/pairs")
best=
if [[ -n $HELD_OUT ]]; then
    DATA_ARGS+=(--valid-data-path "$OUTPUT/held-out" --eval-interval "$EVAL_INTERVAL")
    best=/best
fi

phase 1-pairs "$OUTPUT/pairs" pairs.summary.json \
    "${HEADRANK[@]}" pairs "${COLLECTIONS[@]}" "${QUERIES[@]}" --depth "$DEPTH" --output "$OUTPUT/pairs" "${PAIRS_EXTRA[@]}"
if [[ -n $HELD_OUT ]]; then
    phase 1-held-out "$OUTPUT/held-out" pairs.summary.json \
        "${HEADRANK[@]}" pairs "${COLLECTIONS[@]}" --only "$HELD_OUT" --depth "$DEPTH" --output "$OUTPUT/held-out" "${HELD_OUT_EXTRA[@]}"
fi
heads=${HEADS:-$OUTPUT/heads.json}
[[ -n $HEADS ]] || phase 2-heads "$heads" "" "${SELECT[@]}" --model "$MODEL" --output "$heads"

base=$MODEL
for ((round = 1; round <= ROUNDS; round++)); do
    here="$OUTPUT/round-$round" origin=$base
    OMP_NUM_THREADS=$THREADS phase "3-train.$round" "$here/train" training_complete.json "${TRAIN[@]}" "${DISTRIBUTED_ARGS[@]}" "${TRAINING_ARGS[@]}" \
        "${DATA_ARGS[@]}" "${HEADRANK_ARGS[@]}" --headrank-model "$base" --headrank-heads "$heads" --save "$here/train" "${TRAIN_FLAGS[@]}"
    phase "4-trained.$round" "$here/hf" config.json "${EXPORT[@]}" --checkpoint "$here/train$best" --base "$base" --output "$here/hf"
    if ((RESELECT)); then
        phase "4-reselect.$round" "$here/heads.json" "" "${SELECT[@]}" "${RESELECT_EXTRA[@]}" --model "$here/hf" --prompt-of "$here/hf" --output "$here/heads.json"
        heads=$here/heads.json
    fi
    base=$here/hf
done

FINAL=(--exported "$base") # its weights are the final ones already
((!TRUNCATE)) || FINAL=(--checkpoint "$OUTPUT/round-$ROUNDS/train$best" --truncate)
((!RESELECT)) || FINAL+=(--heads "$heads")
phase 5-export "$OUTPUT/model" config.json "${EXPORT[@]}" "${FINAL[@]}" --base "$origin" --output "$OUTPUT/model"
((DRY_RUN)) || echo "[done] $OUTPUT/model: rerank with 'headrank rerank --model $OUTPUT/model --collection ...'"
