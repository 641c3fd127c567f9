# shellcheck shell=bash
# The shared part of launch/train_qwen3_*.sh, sourced after their model block (NAME, MODEL, TP, LR).
#
# Paths: the first arguments that are not flags are MODEL, HEADS, TRAIN_DATA and SAVE, in this order; or set the variables. All other
# arguments go to pretrain_headrank.py. Started again with the same SAVE it goes on from the last good checkpoint.
# DRY_RUN=1 prints the command and exits. What the paper gives is marked; the rest is ours (docs/reproduction.md).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
. "$root/launch/common.sh"
: "${NAME:?}" "${MODEL:?}" "${TP:?}" "${LR:?}"

SAVE=${SAVE:-runs/$NAME}
HEADS=${HEADS:-$SAVE/heads.json}               # 'headrank select-heads' makes it; see below
TRAIN_DATA=${TRAIN_DATA:-runs/training-data}   # 'launch/build_training_data.sh' makes it
VALID_DATA=${VALID_DATA:-}                     # held-out queries; empty: none, the last checkpoint is taken
for path in MODEL HEADS TRAIN_DATA SAVE; do
    if (($#)) && [[ $1 != -* ]]; then printf -v "$path" '%s' "$1"; shift; fi
done

NPROC=${NPROC:-8}                              # GPUs a node (the paper: 8 x H20)
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}
BACKEND=${BACKEND:-nccl}
PRECISION=${PRECISION:-bf16}                   # or fp32
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1}        # the paper's
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-32}     # the paper's
PAIRS_PER_CONTEXT=${PAIRS_PER_CONTEXT:-1}      # 1: the paper's 32 pairs a step; 16: 512 pairs a step from as many forward passes
EPOCHS=${EPOCHS:-1}                            # the paper's
TRAIN_ITERS=${TRAIN_ITERS:-}                   # stop after so many steps instead
CLIP_GRAD=${CLIP_GRAD:-5.0}                    # the paper's
ALPHA=${ALPHA:-0.05}                           # the paper's
BETA=${BETA:-0.05}                             # the paper's
SEQ_LENGTH=${SEQ_LENGTH:-}                     # longest prompt; empty: the model's context
SEED=${SEED:-1234}
SAVE_INTERVAL=${SAVE_INTERVAL:-200}
EVAL_INTERVAL=${EVAL_INTERVAL:-100}
EXIT_MINUTES=${EXIT_MINUTES:-}                 # save and exit after so many minutes
PYTHON=${PYTHON:-python}
DRY_RUN=${DRY_RUN:-0}

[[ $# == 0 || $1 == -* ]] || stop "'$1' is one word too many; MODEL, HEADS, TRAIN_DATA and SAVE come first, then flags of pretrain_headrank.py"
need_switch DRY_RUN
for name in TP NPROC NNODES MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE PAIRS_PER_CONTEXT SAVE_INTERVAL EVAL_INTERVAL; do need_number "$name"; done
for name in TRAIN_ITERS SEQ_LENGTH EXIT_MINUTES; do [[ -z ${!name} ]] || need_number "$name"; done
for name in SEED NODE_RANK MASTER_PORT; do need_number "$name" 0; done
need_decimal LR EPOCHS CLIP_GRAD
need_one_of PRECISION bf16 fp32
need_one_of BACKEND nccl gloo
((10#$NNODES == 1 || 10#$NODE_RANK < 10#$NNODES)) || stop "NODE_RANK '$NODE_RANK' is not below NNODES ($NNODES); nodes are numbered from 0"
((10#$MASTER_PORT < 65536)) || stop "MASTER_PORT '$MASTER_PORT' is no port; give a number below 65536"
processes=$((10#$NPROC * 10#$NNODES))
((processes % 10#$TP == 0)) || stop "NPROC x NNODES ($processes processes) is not a multiple of TP ($TP)"
need_multiple GLOBAL_BATCH_SIZE $((10#$MICRO_BATCH_SIZE * processes / 10#$TP)) "MICRO_BATCH_SIZE x NPROC x NNODES / TP"

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True} # contexts differ in length
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

TORCHRUN=("$PYTHON" -m torch.distributed.run --nproc-per-node "$NPROC")
if ((NNODES > 1)); then
    TORCHRUN+=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
else
    TORCHRUN+=(--standalone)
fi
DISTRIBUTED_ARGS=(--tensor-model-parallel-size "$TP" --distributed-backend "$BACKEND" --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --exit-signal-handler ${EXIT_MINUTES:+--exit-duration-in-mins "$EXIT_MINUTES"})
TRAINING_ARGS=(--micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE" --lr "$LR" --lr-decay-style linear
    --weight-decay 0.01 --clip-grad "$CLIP_GRAD" --seed "$SEED" ${TRAIN_ITERS:+--train-iters "$TRAIN_ITERS"})
if [[ $PRECISION == bf16 ]]; then TRAINING_ARGS+=(--bf16 --accumulate-allreduce-grads-in-fp32); fi
DATA_ARGS=(--train-data-path "$TRAIN_DATA" ${SEQ_LENGTH:+--seq-length "$SEQ_LENGTH"})
if [[ -n $VALID_DATA ]]; then DATA_ARGS+=(--valid-data-path "$VALID_DATA" --eval-interval "$EVAL_INTERVAL"); fi
CHECKPOINT_AND_LOGGING_ARGS=(--save "$SAVE" --save-interval "$SAVE_INTERVAL" --ckpt-format torch_dist --log-interval 10 --log-throughput
    --tensorboard-dir "$SAVE/tensorboard")
HEADRANK_ARGS=(--headrank-model "$MODEL" --headrank-heads "$HEADS" --headrank-pairs-per-context "$PAIRS_PER_CONTEXT"
    --headrank-epochs "$EPOCHS" --headrank-epoch-unit pairs --headrank-alpha "$ALPHA" --headrank-beta "$BETA")
COMMAND=("${TORCHRUN[@]}" "$root/pretrain_headrank.py" "${DISTRIBUTED_ARGS[@]}" "${TRAINING_ARGS[@]}"
    "${DATA_ARGS[@]}" "${CHECKPOINT_AND_LOGGING_ARGS[@]}" "${HEADRANK_ARGS[@]}" "$@")

printf '%q ' "${COMMAND[@]}"
printf '\n'
((!DRY_RUN)) || exit 0
if [[ ! -f $HEADS ]]; then
    echo "$0: no core heads in $HEADS; select them first, on the training collections:" >&2
    echo "  headrank select-heads --model $MODEL --collection DIR ... --depth 100 --top-k 8 --entropy-weight 0.1 --temperature 0.001" \
        "--output $HEADS" >&2 # the paper's K, lambda and tau
    exit 2
fi
trap '' USR1 # SLURM's warning reaches every process of a step: the ranks save and exit on it, torchrun itself must not die of it
exec "${COMMAND[@]}"
