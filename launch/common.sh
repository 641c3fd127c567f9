# shellcheck shell=bash
# Sourced by the launchers: checks that end with one line and exit code 2, and steps that are not done twice.
# A dry run may come before the files are there.

# Waiting threads that spin make every process on a small machine several times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-0} TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}

stop() { echo "${0##*/}: $*" >&2; exit 2; }

need_number() { # NAME [LEAST]: the variable of this name is a whole number of at least LEAST (1)
    if [[ ! ${!1} =~ ^[0-9]+$ ]] || ((10#${!1} < ${2:-1})); then stop "$1 '${!1}' is not a whole number of at least ${2:-1}"; fi
}

need_decimal() { # NAME...: each of these variables is a number above 0, such as 0.5 or 1e-4
    local name
    for name in "$@"; do
        [[ ${!name} =~ ^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$ && ${!name%%[eE]*} == *[1-9]* ]] || stop "$name '${!name}' is not a number above 0"
    done
}

need_multiple() { # NAME UNIT WORDS: the number is a multiple of the unit; WORDS say what the unit is
    ((10#$2 > 0 && 10#${!1} % 10#$2 == 0)) || stop "$1 '${!1}' is not a multiple of $3 ($((10#$2)))"
}

need_different() { # NAME WORD...: none of the words of this variable is there twice
    local name=$1 word seen=' '; shift
    for word in "$@"; do
        [[ $seen != *" $word "* ]] || stop "$name: $word is there twice"
        seen+="$word "
    done
}

need_numbers() { # NAME: the words of this variable are whole numbers of at least 1, one or more, none twice
    local words word
    read -ra words <<<"${!1}"
    ((${#words[@]})) || stop "$1 is empty; give whole numbers, separated by spaces"
    for word in "${words[@]}"; do [[ $word =~ ^[1-9][0-9]*$ ]] || stop "$1: '$word' is not a whole number of at least 1"; done
    need_different "$1" "${words[@]}"
}

need_one_of() { # NAME WORD...: the variable of this name is one of the words
    local name=$1; shift
    [[ " $* " == *" ${!name} "* && ${!name} != *' '* ]] || stop "$name '${!name}' is not one of: $*"
}

need_switch() { # NAME...: each of these variables is 0 or 1
    local name
    for name in "$@"; do [[ ${!name} == [01] ]] || stop "$name '${!name}' is neither 0 nor 1"; done
}

need_collections() { # NAME FOLDER...: every folder of the variable NAME has what a collection has
    local name=$1 folder file; shift
    (($#)) || stop "$name is empty; give collection folders"
    ((!DRY_RUN)) || return 0
    for folder in "$@"; do
        for file in queries.tsv qrels.txt run.bm25.txt; do
            [[ -f $folder/$file ]] || stop "$name '$folder': no $file there (a relative path is taken from $PWD)"
        done
    done
}

need_file() { # NAME...: each of these variables is empty or names a file
    local name
    ((!DRY_RUN)) || return 0
    for name in "$@"; do [[ -z ${!name} || -f ${!name} ]] || stop "$name '${!name}' is no file (a relative path is taken from $PWD)"; done
}

selection_lists() { # FLAGS...: LISTS, the lists that 'select-heads' reads: those of FLAGS, or what SELECT_ON says
    LISTS=("$@" --depth "$DEPTH")
    [[ -n $SELECT_ON ]] || return 0
    if [[ $SELECT_ON == pairs ]]; then LISTS=(--contexts "$OUTPUT/pairs"); return; fi
    local folders folder
    read -ra folders <<<"$SELECT_ON"
    need_collections SELECT_ON "${folders[@]}"
    LISTS=(--depth "$DEPTH")
    for folder in "${folders[@]}"; do LISTS+=(--collection "$folder"); done
}

run() { if ((DRY_RUN)); then printf ' %q' "$@"; printf '\n'; else "$@"; fi; }

newest() { # FILE...: the one that changed last; a file that is not there never did
    local file found=$1
    for file in "$@"; do [[ ! $file -nt $found ]] || found=$file; done
    echo "$found"
}

# once OUTPUT INPUT COMMAND...: run COMMAND unless this very command made OUTPUT after INPUT was made
once() {
    local output=$1 input=$2 stamp=$1.command; shift 2
    if [[ -f $output && ! $input -nt $output && -f $stamp && $(<"$stamp") == "$*" ]]; then echo "done before: $output"; return; fi
    if ((DRY_RUN)); then run "$@"; return; fi
    mkdir -p "$(dirname "$output")" && rm -f "$stamp"
    "$@"
    echo "$*" >"$stamp"
}
