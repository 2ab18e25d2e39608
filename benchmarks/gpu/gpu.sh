#!/usr/bin/env bash
# All that needs a GPU, within ten minutes: the tests marked gpu, then kernel times, then whole decode steps.
#
#     pip install -e '.[cuda12,test]'     or cuda13, as the driver is; `test` has pytest and pytest-xdist, without which time runs out
#     benchmarks/gpu/gpu.sh [FOLDER]          rows and a log go to FOLDER (default: benchmarks/results)
#
# A process in which CUDA does not start fails: it does not run, or skip, on the CPU. A stage that fails or runs out of time does not stop the
# next; the last lines say what failed, and the exit status is then 1. The limits are for one H200 and 16 cores.
# Afterwards, anywhere: python -m benchmarks.results_page; python -m benchmarks.gpu.plots
# PYTHON picks the interpreter, NAME the ending of the files' names, TOTAL the seconds in all.
set -uo pipefail
cd "$(dirname "$0")/../.."

folder=${1:-benchmarks/results}
PYTHON=${PYTHON:-python3}
TOTAL=${TOTAL:-580}
NAME=${NAME:-$( (nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || echo gpu) | head -n 1 | tr '[:upper:]' '[:lower:]' | sed 's/nvidia //; s/[^a-z0-9]\+/_/g')}
mkdir -p "$folder"
log=$folder/gpu_$NAME.log
: >"$log"
export JAX_PLATFORMS=cuda PYTHONUNBUFFERED=1 PYTHONPATH=$PWD:$PWD/models${PYTHONPATH:+:$PYTHONPATH}
failures=()

# stage TITLE SECONDS COMMAND...: runs a command for at most so long; its exit status
stage() {
    local title=$1 limit=$2
    shift 2
    if [ "$limit" -lt 10 ]; then
        failures+=("$title: no time left")
        return 1
    fi
    echo "== $title, at most $limit s: $*" | tee -a "$log"
    timeout -s INT -k 15 "$limit" "$@" 2>&1 | tee -a "$log"
    local status=${PIPESTATUS[0]}
    echo "== $title: exit status $status, $SECONDS s in all" | tee -a "$log"
    [ "$status" -eq 0 ] || failures+=("$title: exit status $status$([ "$status" -eq 124 ] && echo ' (out of time)')")
    return "$status"
}

at_most() { # at_most A B: the smaller
    echo $(($1 < $2 ? $1 : $2))
}

# Tests. Nearly all of their time is that of compilers, a core each. Several processes share the GPU, so none may reserve most of its
# memory. Warnings of newer versions are no failures here.
mapfile -t files < <(grep -rl --include='*.py' 'mark.gpu' tests)
parallel=()
"$PYTHON" -c 'import xdist' 2>/dev/null && parallel=(-n 12 --dist worksteal)
XLA_PYTHON_CLIENT_PREALLOCATE=false stage "gpu tests" "$(at_most 210 "$TOTAL")" \
    "$PYTHON" -m pytest -m gpu -W default -p no:cacheprovider -q "${parallel[@]}" "${files[@]}"

# Kernels. A crash of the GPU or of the process ends one candidate; a new process goes on behind it. A shape that was begun, with all of its
# compilations, takes up to 45 s.
rows=$folder/kernels_$NAME.json
until_step=$((TOTAL - 130))
resume=()
for attempt in 1 2 3 4; do
    limit=$(at_most 330 $((until_step - SECONDS)))
    stage "kernels" "$limit" "$PYTHON" -m benchmarks.gpu.kernels --json "$rows" --seconds $((limit - 45)) "${resume[@]}"
    status=$?
    resume=(--resume)
    case $status in
    3 | 134 | 136 | 139) echo "== kernels: trying again behind what failed (attempt $attempt)" | tee -a "$log" ;;
    *) break ;;
    esac
done

# Decode steps: at the first shape in both arithmetics, of which decode_step takes one by default. Kernels come first, XLA last, once where it
# takes long. A row is written as soon as it is measured; a shape takes up to 40 s, but the first, which has the most programs.
limit=$((TOTAL - SECONDS))
stage "decode steps" "$limit" "$PYTHON" -m benchmarks.gpu.decode_step --json "$folder/step_$NAME.json" --seconds $((limit - 40))

echo "== $SECONDS s in all; $(ls "$folder")" | tee -a "$log"
if [ ${#failures[@]} -gt 0 ]; then
    printf '== FAILED %s\n' "${failures[@]}" | tee -a "$log"
    exit 1
fi
echo "== all stages passed" | tee -a "$log"
