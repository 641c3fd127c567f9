#!/usr/bin/env bash
# The paper's training data: 211 judged queries of TREC DL 2021, 2022 and 2023 (MS MARCO V2), BM25 top-100, adjacent-level pairs.
#
#   launch/build_training_data.sh                                  with Pyserini: Java 21, a network, room for a 138M-passage index
#   COLLECTIONS="data/dl21 data/dl23" launch/build_training_data.sh     from local collection folders
#
# Collections that an earlier run retrieved are kept. Extra arguments go to 'headrank pairs' (--hold-out FILE, --sublists N, ...).
# The last line says how far the counts are from the paper's. Relative paths start at the root of the project. DRY_RUN=1 prints the commands.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/common.sh

OUTPUT=${OUTPUT:-runs/training-data}  # contexts.jsonl, pairs.jsonl, and the retrieved collections below it
COLLECTIONS=${COLLECTIONS:-}          # local collection folders, separated by spaces; empty: retrieve with Pyserini
YEARS=${YEARS:-dl21 dl22 dl23}        # 53 + 76 + 82 judged queries
INDEX=${INDEX:-msmarco-v2-passage}    # a prebuilt index of Pyserini, or the folder of a Lucene index
DEPTH=${DEPTH:-100}
PYTHON=${PYTHON:-python}
DRY_RUN=${DRY_RUN:-0}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

need_switch DRY_RUN
read -ra folders <<<"$COLLECTIONS"
if ((${#folders[@]} == 0)); then
    read -ra years <<<"$YEARS"
    for year in "${years[@]}"; do
        folder=$OUTPUT/collections/$year
        folders+=("$folder")
        if [[ -e $folder/run.bm25.txt ]]; then
            echo "# $folder is there already"
            continue
        fi
        run "$PYTHON" -m headrank retrieve --engine pyserini --index "$INDEX" --topics "$year" --qrels-name "$year-passage" \
            --top-k "$DEPTH" --collection-output "$folder"
    done
fi

SOURCES=()
for folder in "${folders[@]}"; do SOURCES+=(--collection "$folder"); done
run "$PYTHON" -m headrank pairs "${SOURCES[@]}" --depth "$DEPTH" --output "$OUTPUT" --compare-paper "$@"
