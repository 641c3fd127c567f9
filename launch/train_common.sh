# shellcheck shell=bash
# The shared part of launch/train_qwen3_*.sh, sourced after their model block (NAME, MODEL, TP, LR): argument arrays and
# one torchrun.
#
# Paths: the first arguments that are not flags are MODEL, HEADS, TRAIN_DATA and SAVE, in this order; or set the
# variables. All other arguments go to pretrain_headrank.py, which checks every value and whose last word on a flag
# wins. Started again with the same SAVE it goes on from the last good checkpoint. DRY_RUN=1 prints the command. What
# the paper gives is marked (docs/reproduction.md).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${NAME:?}" "${MODEL:?}" "${TP:?}" "${LR:?}"

SAVE=${SAVE:-runs/$NAME}
HEADS=${HEADS:-$SAVE/heads.json}               # 'headrank select-heads' makes it; see below
# 'headrank experiment run configs/paper_$NAME.yaml --only retrieve pairs' makes it
TRAIN_DATA=${TRAIN_DATA:-runs/paper_$NAME/pairs}
for path in MODEL HEADS TRAIN_DATA SAVE; do
    if (($#)) && [[ $1 != -* ]]; then printf -v "$path" '%s' "$1"; shift; fi
done
if (($#)) && [[ $1 != -* ]]; then
    echo "${0##*/}: '$1' is one word too many; MODEL, HEADS, TRAIN_DATA and SAVE come first," \
        "then flags of pretrain_headrank.py" >&2
    exit 2
fi

NPROC=${NPROC:-8}                              # GPUs per node (the paper: 8 x H20)
NNODES=${NNODES:-1}
# 1: the paper's 32 pairs per step; 16: 512 pairs per step from as many forward passes
PAIRS_PER_CONTEXT=${PAIRS_PER_CONTEXT:-1}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-32}     # the paper's

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True} # contexts differ in length
# Waiting threads that spin make every process on a small machine several times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-0}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

TORCHRUN=("${PYTHON:-python}" -m torch.distributed.run --nproc-per-node "$NPROC")
if ((NNODES > 1)); then
    TORCHRUN+=(--nnodes "$NNODES" --node-rank "${NODE_RANK:-${SLURM_NODEID:-0}}"
        --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}")
else
    TORCHRUN+=(--standalone)
fi
# EXIT_MINUTES: save and exit after so many
DISTRIBUTED_ARGS=(--tensor-model-parallel-size "$TP" --sequence-parallel --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
    --exit-signal-handler ${EXIT_MINUTES:+--exit-duration-in-mins "$EXIT_MINUTES"})
# micro-batch, global batch, learning rate and clipping are the paper's; TRAIN_ITERS are steps instead of an epoch
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size "$GLOBAL_BATCH_SIZE" --lr "$LR" --clip-grad 5.0
    --lr-decay-style linear --weight-decay 0.01 --seed 1234 ${TRAIN_ITERS:+--train-iters "$TRAIN_ITERS"} # steps instead of an epoch
    ${STOP_AFTER:+--headrank-stop-after "$STOP_AFTER"}) # steps after which it ends, with the schedule of the whole
if [[ ${PRECISION:-bf16} != fp32 ]]; then TRAINING_ARGS+=(--bf16 --accumulate-allreduce-grads-in-fp32); fi
# SEQ_LENGTH is the longest prompt (empty: the model's context), VALID_DATA are held-out lists (empty: the last
# checkpoint is taken)
DATA_ARGS=(--train-data-path "$TRAIN_DATA" ${SEQ_LENGTH:+--seq-length "$SEQ_LENGTH"}
    ${VALID_DATA:+--valid-data-path "$VALID_DATA" --eval-interval 100})
CHECKPOINT_AND_LOGGING_ARGS=(--save "$SAVE" --save-interval 200 --ckpt-format torch_dist --log-interval 10 --log-throughput
    --headrank-keep-iters 1800 2200 2800 # where the paper saw convergence; these checkpoints stay
    --tensorboard-dir "$SAVE/tensorboard")
HEADRANK_ARGS=(--headrank-model "$MODEL" --headrank-heads "$HEADS" --headrank-pairs-per-context "$PAIRS_PER_CONTEXT"
    --headrank-epochs 1 --headrank-epoch-unit pairs --headrank-alpha 0.05 --headrank-beta 0.05) # all the paper's
COMMAND=("${TORCHRUN[@]}" "$root/pretrain_headrank.py" "${DISTRIBUTED_ARGS[@]}" "${TRAINING_ARGS[@]}"
    "${DATA_ARGS[@]}" "${CHECKPOINT_AND_LOGGING_ARGS[@]}" "${HEADRANK_ARGS[@]}" "$@")

printf '%q ' "${COMMAND[@]}"
printf '\n'
[[ ${DRY_RUN:-0} == 0 ]] || exit 0
if [[ ! -f $HEADS ]]; then
    echo "$0: no core heads in $HEADS; select them first, on the training collections:" >&2
    # the paper's K, lambda and tau
    echo "  headrank select-heads --model $MODEL --collection DIR ... --depth 100 --top-k 8" \
        "--entropy-weight 0.1 --temperature 0.001 --output $HEADS" >&2
    exit 2
fi
# SLURM's warning reaches every process of a step: the ranks save and exit on it, torchrun itself must not die of it
trap '' USR1
exec "${COMMAND[@]}"
