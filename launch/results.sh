#!/usr/bin/env bash
# The study behind docs/results.md: train with several seeds, then every method on every test collection, in two document orders.
#
#   TRAIN="dl21 dl23-llmjudge" EVAL="dl19=DIR nfcorpus=DIR ..." OUTPUT=runs/results launch/results.sh [flags for pretrain_headrank.py]
#   PHASES="heads train" ... launch/results.sh  # some of: heads train evaluate rankgpt report (the default: all, in this order)
#
# All heads are selected on the paper's prompt. HeadRank then reads documents side by side (LAYOUT): no order of a list changes its scores,
# and it is measured in one order only. The training-free methods are measured as their papers have them, in every one of ORDERS, and side
# by side too (rows '+parallel'). With LAYOUT=sequential HeadRank has the paper's prompt, in every order.
# Everything resumes: stop it at any time and start it again. Settings were chosen with launch/tune.sh on VALID_QUERIES, which are
# training queries; the test collections are read by 'evaluate' and 'rankgpt' only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/common.sh

MODEL=${MODEL:-embedded}
TRAIN=${TRAIN:-}                               # collection folders to train on, separated by spaces
TRAIN_QUERIES=${TRAIN_QUERIES:-}               # file of query ids to train on; empty: all judged ones
EVAL=${EVAL:-}                                 # NAME=FOLDER of every test collection, separated by spaces
SAMPLES=${SAMPLES:-results/queries}       # SAMPLES/NAME.qids restricts a test collection to these queries, where there is one
OUTPUT=${OUTPUT:-runs/results}
SEEDS=${SEEDS:-1 2 3}
DEPTHS=${DEPTHS:-20 40}
ORDERS=${ORDERS:-retriever shuffled}
MAX_WORDS=${MAX_WORDS:-64}                     # words of a document in a prompt
WORDS=${WORDS:-hotpotqa100=80 noveleval=128}   # NAME=N: another number for a test collection whose documents are longer
DTYPE=${DTYPE:-bfloat16}                       # of training and reranking; float32 where the processor has no bfloat16 products
QUERY_ROWS=${QUERY_ROWS:-query}
LAYOUT=${LAYOUT:-parallel}                     # of the documents in HeadRank's prompt: parallel or sequential
NEEDLES=${NEEDLES:-20}
RANKGPT=${RANKGPT:-}                           # test collection on which RankGPT writes its rankings, on SAMPLES/rankgpt.qids; empty: dl19, where EVAL has it
PHASES=${PHASES:-heads train evaluate rankgpt report}
JOBS=${JOBS:-1}                                # trainings, then measurements, at a time; with 2 or more their words are in OUTPUT/logs
# Heads come from the embedded collection: the judged lists of TREC DL are too noisy to rank heads by (docs/results.md).
export SELECT_ON=${SELECT_ON:-examples/collection} DEPTH=${DEPTH:-12} # candidates in a list for head selection
export SELECT_FLAGS=${SELECT_FLAGS:---only examples/collection/train.qids --no-retriever-order --prune 0.3}
if [[ $LAYOUT == parallel ]]; then
    SUBLISTS=2 LR=${LR:-3e-5}
    export RESELECT_FLAGS=${RESELECT_FLAGS:---temperature 0.01} # 0.001 would prefer heads of the first layers there
fi
export PAIRS_FLAGS=${PAIRS_FLAGS:---depth 100 --unjudged-as-zero --sublists ${SUBLISTS:-3} --sublist-size 8-16} # training lists, of the top 100
export PERMUTATIONS=${PERMUTATIONS:-1} LR=${LR:-1e-4} EPOCHS=${EPOCHS:-1} PAIRS_PER_CONTEXT=${PAIRS_PER_CONTEXT:-64}
export GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-1} NPROC=${NPROC:-1} TP=${TP:-1} SAVE_INTERVAL=${SAVE_INTERVAL:-50} PYTHON=${PYTHON:-python} DRY_RUN=${DRY_RUN:-0}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" STATISTICS=${STATISTICS:-$OUTPUT/head-statistics}
HEADRANK=("$PYTHON" -m headrank)
PROMPT=(--query-rows "$QUERY_ROWS" --max-words "$MAX_WORDS")

need_switch DRY_RUN
for name in JOBS MAX_WORDS NEEDLES NPROC TP; do need_number "$name"; done
need_number PERMUTATIONS 0
need_decimal LR EPOCHS
need_multiple NPROC "$TP" TP
for name in SEEDS DEPTHS; do need_numbers "$name"; done
need_one_of DTYPE bfloat16 float32
need_one_of QUERY_ROWS query query-suffix instruction
need_one_of LAYOUT parallel sequential
JOBS=$((10#$JOBS)) CORES=$(getconf _NPROCESSORS_ONLN) pids=()

FLAGS=()
[[ $DTYPE == float32 ]] || FLAGS+=(--bf16)
if [[ $LAYOUT == parallel ]]; then
    FLAGS+=(--headrank-document-layout parallel)
elif ((PERMUTATIONS)); then
    FLAGS+=(--headrank-with-retriever-order) # lists come in the retriever's order and shuffled, as in the tests
fi
FLAGS+=(--lr-decay-style cosine --lr-warmup-iters 6)

wants() { [[ " $PHASES " == *" $1 "* ]]; }

read -ra folders <<<"$TRAIN"
read -ra tests <<<"$EVAL"
read -ra seeds <<<"$SEEDS"
read -ra depths <<<"$DEPTHS"
read -ra orders <<<"$ORDERS"
for name in "${orders[@]}"; do [[ $name == retriever || $name == shuffled ]] || stop "ORDERS '$name' is neither retriever nor shuffled"; done
need_different ORDERS "${orders[@]}"
for entry in "${tests[@]}"; do [[ $entry == ?*=?* ]] || stop "EVAL '$entry' is not NAME=FOLDER"; done
need_different "EVAL, by name" "${tests[@]%%=*}"
for entry in $WORDS; do [[ $entry =~ ^[^=]+=[1-9][0-9]*$ ]] || stop "WORDS '$entry' is not NAME=N with a whole number N of at least 1"; done
[[ -z $RANKGPT || " ${tests[*]%%=*} " == *" $RANKGPT "* ]] || stop "RANKGPT '$RANKGPT' is none of EVAL's names: ${tests[*]%%=*}"
for name in $PHASES; do
    [[ " heads train evaluate rankgpt report " == *" $name "* ]] || stop "unknown phase '$name'; known: heads train evaluate rankgpt report"
done
need_file TRAIN_QUERIES
need_collections TRAIN "${folders[@]}"
need_collections EVAL "${tests[@]#*=}"
[[ $SELECT_ON != pairs ]] || stop "SELECT_ON=pairs is for pipeline.sh and tune.sh; here the other methods' heads come from a collection's lists"
made=$LAYOUT # what lies in OUTPUT; studies from before there was a layout to choose are sequential
[[ ! -d $OUTPUT/matrix && ! -f $OUTPUT/layout ]] || made=$(cat "$OUTPUT/layout" 2>/dev/null || echo sequential)
[[ $made == "$LAYOUT" ]] || stop "OUTPUT '$OUTPUT' holds a study with LAYOUT=$made; choose another OUTPUT or that LAYOUT"
((DRY_RUN)) || { mkdir -p "$OUTPUT" && echo "$LAYOUT" >"$OUTPUT/layout"; }
COLLECTIONS=()
for folder in "${folders[@]}"; do COLLECTIONS+=(--collection "$folder"); done
read -ra SELECT_EXTRA <<<"$SELECT_FLAGS"
selection_lists "${COLLECTIONS[@]}"

if wants heads; then # every method's as its own paper has it, off the same forwards; NIAH's from needles in the training passages
    once "$OUTPUT/heads.entropy.json" "$TRAIN_QUERIES" "${HEADRANK[@]}" select-heads --method entropy core qr --model "$MODEL" "${LISTS[@]}" \
        --permutations "$PERMUTATIONS" --cache "$STATISTICS" "${PROMPT[@]}" "${SELECT_EXTRA[@]}" --output "$OUTPUT/heads.json"
    once "$OUTPUT/heads.niah.json" "$TRAIN_QUERIES" "${HEADRANK[@]}" select-heads --method niah --model "$MODEL" "${COLLECTIONS[@]:0:2}" \
        --needles "$NEEDLES" "${PROMPT[@]}" --output "$OUTPUT/heads.niah.json"
fi

# start LOG COMMAND...: run it; with JOBS above 1 beside others, its words in LOG
start() {
    local log=$1 threads=$((CORES / (JOBS * NPROC))); shift
    if ((JOBS == 1 || DRY_RUN)); then "$@"; return; fi
    while (($(jobs -rp | wc -l) >= JOBS)); do sleep 1; done
    echo "[$log] $*"
    mkdir -p "$(dirname "$log")"
    set -m # a process group for each, so that they can be ended with what they started
    { OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads ? threads : 1))} "$@" >"$log" 2>&1 || { echo "failed; see $log" >&2; exit 1; }; } &
    pids+=($!)
    set +m
}

end_jobs() { for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done; }
trap end_jobs EXIT # trainings save and end; everything goes on where it stopped
trap 'exit 130' INT
trap 'exit 143' TERM

finish() { # wait for all that was started; one that failed ends the study
    local pid failed=0
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    pids=()
    ((!failed)) || exit 1
}

train_seed() { # SEED [flags]: one training of the heads that all seeds share
    local seed=$1 heads=$OUTPUT/heads.entropy.json; shift
    MODEL=$MODEL COLLECTION=$TRAIN TRAIN_QUERIES=$TRAIN_QUERIES OUTPUT=$OUTPUT/seed-$seed SEED=$seed SELECT_FLAGS="${PROMPT[*]} $SELECT_FLAGS" \
        HEADS=$heads launch/pipeline.sh "${FLAGS[@]}" "$@"
}

if wants train; then
    for seed in "${seeds[@]}"; do start "$OUTPUT/logs/seed-$seed.txt" train_seed "$seed" "$@"; done
    finish
fi

useful_depths() { # FOLDER: those of DEPTHS that give other lists than the one before; a collection with 20 candidates a query has no depth 40
    local depth before=0 longest=
    [[ ! -f $1/run.bm25.txt ]] || longest=$(awk '{ if (++count[$1] > most) most = count[$1] } END { print most + 0 }' "$1/run.bm25.txt")
    useful=()
    for depth in $(printf '%s\n' "${depths[@]}" | sort -n); do
        [[ -n $longest && ${#useful[@]} -gt 0 && $longest -le $before ]] || useful+=("$depth")
        before=$depth
    done
}

# cells LAYOUT MODEL METHODS... -- HEADS...: what is not done of one model, all its attention methods read off one forward
cells() {
    local layout=$1 model=$2 methods=() entry name only words how=(--orders "${orders[@]}"); shift 2
    [[ $layout == sequential ]] || how=(--orders retriever --document-layout "$layout")
    while [[ $1 != -- ]]; do methods+=("$1"); shift; done; shift
    for entry in "${tests[@]}"; do
        name=${entry%%=*} only=() words=$MAX_WORDS
        useful_depths "${entry#*=}"
        [[ " $WORDS " != *" $name="* ]] || { words=" $WORDS" && words=${words#*" $name="} && words=${words%% *}; }
        [[ ! -f $SAMPLES/$name.qids ]] || only=(--only "$SAMPLES/$name.qids")
        local measures=()
        [[ $name != hotpotqa* ]] || measures=(--measures R@2 R@5 nDCG@10)
        start "$OUTPUT/logs/${model%%=*}.$layout.$name.txt" run "${HEADRANK[@]}" benchmark run --models "$model" --methods "${methods[@]}" \
            --benchmarks "$entry" --heads "$@" --depths "${useful[@]}" "${how[@]}" "${PROMPT[@]:0:2}" --max-words "$words" --dtype "$DTYPE" \
            "${only[@]}" "${measures[@]}" --share-forward --output "$OUTPUT/matrix"
    done
}

if wants evaluate; then
    methods=(bm25 icr core qr niah)
    heads=("core=$OUTPUT/heads.core.json" "qr=$OUTPUT/heads.qr.json" "niah=$OUTPUT/heads.niah.json")
    if [[ $LAYOUT == parallel ]]; then
        cells sequential "base=$MODEL" "${methods[@]}" -- "${heads[@]}"
        methods=(icr+parallel core+parallel qr+parallel)
        heads=("core+parallel=$OUTPUT/heads.core.json" "qr+parallel=$OUTPUT/heads.qr.json")
    fi
    methods+=(headrank+untrained) heads+=("headrank+untrained=$OUTPUT/heads.entropy.json")
    for seed in "${seeds[@]}"; do
        methods+=("headrank+control-$seed") heads+=("headrank+control-$seed=$OUTPUT/seed-$seed/round-1/heads.json")
    done
    cells "$LAYOUT" "base=$MODEL" "${methods[@]}" -- "${heads[@]}"
    for seed in "${seeds[@]}"; do
        here=$OUTPUT/seed-$seed
        cells "$LAYOUT" "trained@$seed=$here/round-1/hf" headrank+trained headrank -- "headrank+trained=$OUTPUT/heads.entropy.json" "headrank=$here/round-1/heads.json"
    done
    finish
fi

if wants rankgpt; then
    for entry in "${tests[@]}"; do
        [[ ${entry%%=*} == "${RANKGPT:-dl19}" ]] || continue
        run "${HEADRANK[@]}" benchmark run --models "base=$MODEL" --methods rankgpt --benchmarks "$entry" --depths 20 --max-words "$MAX_WORDS" \
            --only "$SAMPLES/rankgpt.qids" --output "$OUTPUT/rankgpt"
    done
fi

if wants report; then
    run "${HEADRANK[@]}" report --matrix "$OUTPUT/matrix" --output "$OUTPUT/report"
fi
