#!/usr/bin/env bash
# Fit the two readouts that come with the package, or those of a trained model, and put them in their place.
#   launch/fit_embedded_readouts.sh DATA LABELS
# DATA holds the collections named below, LABELS a run of 'headrank label' for each (NAME.minilm.trec). Statistics are cached: a second
# call, with other settings or more lists, only reads the lists that are new.
set -euo pipefail

DATA=${1:?folder of the training collections}
LABELS=${2:?folder of NAME.minilm.trec}
MODEL=${MODEL:-embedded}                          # the model whose heads are weighed
OUTPUT=${OUTPUT:-headrank/reranking/embedded/readouts}     # untrained-full.json and untrained-fast.json are written here
PREFIX=${PREFIX-untrained-}                      # of the names: the untouched model's by default
LISTS=${LISTS:-24}                                # lists of each collection
CACHE=${CACHE:-runs/readout-statistics}
# Collections whose terms allow shipping what is fitted on them; of train-health only the questions of MeQSum.
COLLECTIONS=${COLLECTIONS:-train-wikifactoid train-biomed train-multihop train-squad train-feverdev train-code-cosqa train-health}

HELD_OUT=$(mktemp); trap 'rm -f "$HELD_OUT"' EXIT
cut -f1 "$DATA/train-health/queries.tsv" | grep -v '^mqs' > "$HELD_OUT"

INPUT_ARGS=()
for name in $COLLECTIONS; do
    INPUT_ARGS+=(--collection "$DATA/$name" --labels "$LABELS/$name.minilm.trec")
done
FIT_ARGS=(--method readout --model "$MODEL" --hold-out "$HELD_OUT" --lists "$LISTS" --list-words 64 300
    --branch-position 512 --cache "$CACHE" --no-picture)

mkdir -p "$OUTPUT"
set -x
headrank select-heads "${INPUT_ARGS[@]}" "${FIT_ARGS[@]}" --output "$OUTPUT/${PREFIX}full.json" "${@:3}"
headrank select-heads "${INPUT_ARGS[@]}" "${FIT_ARGS[@]}" --max-layer 20 --groups 16 --output "$OUTPUT/${PREFIX}fast.json" "${@:3}"
