#!/usr/bin/env bash
# Does training help, or was it the seed? The same training with several seeds, held-out quality before and after, one table.
#
#   PREPARED=runs/pipeline launch/seeds.sh [flags for pretrain_headrank.py]
#   PREPARED=runs/pipeline OUTPUT=runs/margin-0.5 SEEDS="1 2 3" launch/seeds.sh --headrank-margin 0.5
#
# PREPARED is the output of launch/pipeline.sh with HELD_OUT set (pairs, held-out, heads.json). Seeds share the reference scores;
# a seed that was finished is not run again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PREPARED=${PREPARED:-runs/pipeline}
OUTPUT=${OUTPUT:-$PREPARED/seeds}
MODEL=${MODEL:-embedded}
HEADS=${HEADS:-$PREPARED/heads.json}
SEEDS=${SEEDS:-1 2 3 4 5}
NPROC=${NPROC:-1}
LR=${LR:-1e-4}
EPOCHS=${EPOCHS:-1}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-4}
PERMUTATIONS=${PERMUTATIONS:-2}
PYTHON=${PYTHON:-python}
DRY_RUN=${DRY_RUN:-0}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-0} TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

for seed in $SEEDS; do
    command=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" pretrain_headrank.py
        --headrank-model "$MODEL" --headrank-heads "$HEADS" --train-data-path "$PREPARED/pairs" --valid-data-path "$PREPARED/held-out"
        --lr "$LR" --clip-grad 5.0 --global-batch-size "$GLOBAL_BATCH_SIZE" --log-interval 5 --seed "$seed"
        --headrank-epochs "$EPOCHS" --headrank-epoch-unit contexts --headrank-permutations "$PERMUTATIONS"
        --headrank-reference-cache "$OUTPUT/reference_scores.jsonl" --save "$OUTPUT/seed-$seed" "$@")
    if ((DRY_RUN)); then printf '%q ' "${command[@]}"; printf '\n'; continue; fi
    [[ -f $OUTPUT/seed-$seed/training_complete.json ]] || "${command[@]}"
    rm -rf "$OUTPUT/seed-$seed"/iter_*
done
((DRY_RUN)) || "$PYTHON" - "$OUTPUT" <<'TABLE'
import json, pathlib, sys

rows = []
for run in sorted(pathlib.Path(sys.argv[1]).glob("seed-*")):
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    valid = [event for event in events if event["event"] == "valid"]
    rows.append((run.name, valid[0], valid[-1]))
print(f"{'':10}{'NDCG@10':>20}{'preference accuracy':>24}")
for name, before, after in rows:
    cells = [f"{100 * before[key]:9.2f} ->{100 * after[key]:7.2f}" for key in ("ndcg@10", "preference_accuracy")]
    print(f"{name:10}{cells[0]:>20}{cells[1]:>24}")
better = sum(after["ndcg@10"] > before["ndcg@10"] and after["preference_accuracy"] > before["preference_accuracy"] for _, before, after in rows)
print(f"both better on {better} of {len(rows)} seeds")
TABLE
