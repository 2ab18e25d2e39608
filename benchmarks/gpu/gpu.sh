#!/usr/bin/env bash
# All that needs a GPU, in the order of its weight, within ten minutes on one H100 or H200. JAX for CUDA is all that must be installed.
#
#     benchmarks/gpu/gpu.sh [FOLDER]             rows and a log go to FOLDER (default: benchmarks/results)
#     benchmarks/gpu/gpu.sh --second [FOLDER]    ten minutes more: tables, polar keys and outliers, the papers' other tables, the tests
#     benchmarks/gpu/gpu.sh --dry-run [FOLDER]   the stages of the first on a CPU: tiny shapes, interpreted kernels (default: a new folder)
#
# A process in which CUDA does not start fails: it does not go on on the CPU. A file is whole after every row. A stage that fails or runs out
# of time does not stop the next; the last lines say what failed, and the exit status is then 1. Nothing waits for a compilation that is not
# its own. Afterwards, anywhere: python -m benchmarks.results_page; python -m benchmarks.gpu.plots
# PYTHON picks the interpreter, NAME the ending of the files' names, TOTAL the seconds in all. KVQ_BARE=1 leaves packages beside JAX unused.
set -uo pipefail
cd "$(dirname "$0")/../.."

run=first
case ${1:-} in
--second) run=second && shift ;;
--dry-run) run=dry && shift ;;
-*) sed -n '2,6s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
if [ $run = dry ]; then
    folder=${1:-$(mktemp -d)}
    NAME=${NAME:-dry_run}
    TOTAL=${TOTAL:-3000} # of a CPU, which may have other things to do
    export JAX_PLATFORMS=cpu
    kernels=(--interpret --tiny --cache dense kivi:bits=4) parity=(--interpret --head-dim 64 --steps 12 --cache kivi:bits=4) steps=(--tiny --cache dense kivi:bits=4)
else
    folder=${1:-benchmarks/results}
    NAME=${NAME:-$( (nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || echo gpu) | head -n 1 | tr '[:upper:]' '[:lower:]' | sed 's/nvidia //; s/[^a-z0-9]\+/_/g')}
    TOTAL=${TOTAL:-580}
    export JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
    kernels=() parity=() steps=()
fi
PYTHON=${PYTHON:-python3}
mkdir -p "$folder"
log=$folder/gpu_$NAME.log
[ $run = second ] || : >"$log"
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD:$PWD/models${PYTHONPATH:+:$PYTHONPATH}
failures=()

# stage TITLE SECONDS COMMAND...: runs a command for at most so long, and tells it to stop 15 s before; its exit status
stage() {
    local title=$1 limit=$2
    shift 2
    [ $run = dry ] && limit=$TOTAL
    [ "$limit" -le $((TOTAL - SECONDS)) ] || limit=$((TOTAL - SECONDS))
    if [ "$limit" -lt 20 ]; then
        failures+=("$title: no time left")
        return 1
    fi
    echo "== $title, at most $limit s: $*" | tee -a "$log"
    timeout -s INT -k 10 "$limit" "$PYTHON" -m "$@" ${told:+--seconds $((limit - 15))} 2>&1 | tee -a "$log"
    local status=${PIPESTATUS[0]}
    echo "== $title: exit status $status, $SECONDS s in all" | tee -a "$log"
    [ "$status" -eq 0 ] || failures+=("$title: exit status $status$([ "$status" -eq 124 ] && echo ' (out of time)')")
    return "$status"
}

# again TITLE SECONDS ARGUMENTS...: a stage of benchmarks.gpu.kernels; where the GPU or the process crashed a new process goes on behind it
again() {
    local title=$1 until=$((SECONDS + $2)) resume=()
    shift 2
    for attempt in 1 2 3 4; do
        stage "$title" $((until - SECONDS)) benchmarks.gpu.bare benchmarks.gpu.kernels "$@" "${kernels[@]}" "${resume[@]}"
        case $? in
        3 | 134 | 136 | 139) echo "== $title: trying again behind what failed (attempt $attempt)" | tee -a "$log" && resume=(--resume) ;;
        *) break ;;
        esac
    done
}

rows=$folder/kernels_$NAME.json
told=yes
if [ $run = second ]; then
    again "tables, polar keys, outliers" 230 --plan second --json "$rows" --resume
    stage "steps by XLA too" 110 benchmarks.gpu.bare benchmarks.gpu.decode_step --json "$folder/step_${NAME}_xla.json" \
        --points 4096:16 32768:16 --implementation asm xla
    stage "parity of more steps" 50 benchmarks.gpu.bare benchmarks.gpu.step_parity --json "$folder/parity_more_steps_$NAME.json" \
        --cache dense innerq:bits=1,mode=sym nf4 kivi:bits=4,pre_rope=true
    # nearly all time of the tests is that of compilers, a core each; several processes share the GPU, so none may reserve its memory
    if "$PYTHON" -c 'import pytest, xdist' 2>/dev/null; then
        mapfile -t files < <(grep -rl --include='*.py' 'mark.gpu' tests)
        told=
        XLA_PYTHON_CLIENT_PREALLOCATE=false stage "gpu tests" 180 pytest -m gpu -W default -p no:cacheprovider -q -n 12 --dist worksteal "${files[@]}"
    else
        echo "== gpu tests: left out, pytest and pytest-xdist are not installed" | tee -a "$log"
    fi
else
    again "attention, 32K tokens x 16" 80 --plan first --json "$rows"
    again "parity of kernels" 90 --plan parity --json "$folder/parity_kernels_$NAME.json"
    stage "parity of steps" 40 benchmarks.gpu.bare benchmarks.gpu.step_parity --json "$folder/parity_steps_$NAME.json" "${parity[@]}"
    stage "steps of 8 layers" 150 benchmarks.gpu.bare benchmarks.gpu.decode_step --json "$folder/step_$NAME.json" "${steps[@]}"
    again "more attention, products" 160 --plan next --json "$rows" --resume
fi

echo "== $SECONDS s in all; $(ls "$folder")" | tee -a "$log"
if [ ${#failures[@]} -gt 0 ]; then
    printf '== FAILED %s\n' "${failures[@]}" | tee -a "$log"
    exit 1
fi
echo "== all stages passed" | tee -a "$log"
