#!/usr/bin/env bash
# All that needs a GPU, in the order of its weight, in ten minutes on one H100 or H200. Only JAX for
# CUDA must be installed.
#
#     benchmarks/gpu/gpu.sh [FOLDER]             rows and a log go to FOLDER (benchmarks/results)
#     benchmarks/gpu/gpu.sh --second [FOLDER]    ten minutes more: polar keys, outliers, the tests
#     benchmarks/gpu/gpu.sh --dry-run [FOLDER]   the first run on a CPU: tiny, interpreted kernels
#
# A process in which CUDA does not start fails. It does not continue on the CPU. Files are whole
# after every row. A stage that fails or runs out of time does not stop the next. The last lines say
# what failed, and the exit status is then 1. Nothing is timed beside a compiler. Afterwards,
# on any machine: python -m benchmarks.results_page
# PYTHON picks the interpreter, NAME the ending of the files' names, TOTAL the seconds in all.
# KVQ_BARE=1 uses no package but JAX.
set -uo pipefail
cd "$(dirname "$0")/../.."

run=first
case ${1:-} in
--second) run=second && shift ;;
--dry-run) run=dry && shift ;;
-*) sed -n '2,7s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
if [ $run = dry ]; then
    folder=${1:-$(mktemp -d)}
    NAME=${NAME:-dry_run}
    TOTAL=${TOTAL:-3000} # of a CPU, which may have other things to do
    export JAX_PLATFORMS=cpu
    kernels=(--interpret --tiny --cache dense kivi:bits=4)
    parity=(--interpret --head-dim 64 --steps 12 --cache kivi:bits=4)
    steps=(--tiny --cache dense kivi:bits=4)
else
    folder=${1:-benchmarks/results}
    gpu=$( (nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || echo gpu) | head -n 1)
    NAME=${NAME:-$(tr '[:upper:]' '[:lower:]' <<<"$gpu" | sed 's/nvidia //; s/[^a-z0-9]\+/_/g')}
    TOTAL=${TOTAL:-580}
    export JAX_PLATFORMS=cuda,cpu # the self-test interprets its reference on the CPU
    export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
    kernels=() parity=() steps=()
fi
PYTHON=${PYTHON:-python3}
# With a second platform in its list, JAX goes on without CUDA if that cannot start.
[ $run = dry ] || "$PYTHON" -c 'import jax; assert jax.default_backend() == "gpu"' || {
    echo "gpu.sh: JAX finds no CUDA GPU with $PYTHON; --dry-run needs none" >&2
    exit 1
}
mkdir -p "$folder"
log=$folder/gpu_$NAME.log
[ $run = second ] || : >"$log" # the second run goes on with the log of the first
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD:$PWD/models${PYTHONPATH:+:$PYTHONPATH}
failures=()

# stage TITLE SECONDS COMMAND...: runs a command for at most so long, and tells it to stop 15 s
# earlier
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
    timeout -s INT -k 10 "$limit" "$PYTHON" -m "$@" ${told:+--seconds $((limit - 15))} 2>&1 |
        tee -a "$log"
    local status=${PIPESTATUS[0]}
    echo "== $title: exit status $status, $SECONDS s in all" | tee -a "$log"
    local late=
    [ "$status" -ne 124 ] || late=' (out of time)'
    [ "$status" -eq 0 ] || failures+=("$title: exit status $status$late")
    return "$status"
}

# again TITLE SECONDS MODULE ARGUMENTS...: a stage that times kernels; if the GPU or the process
# crashes, a new process goes on behind it
again() {
    local title=$1 until=$((SECONDS + $2)) resume=()
    shift 2
    for attempt in 1 2 3 4; do
        stage "$title" $((until - SECONDS)) benchmarks.gpu.bare "$@" "${kernels[@]}" "${resume[@]}"
        case $? in
        3 | 134 | 136 | 139)
            echo "== $title: trying again behind what failed (attempt $attempt)" | tee -a "$log"
            resume=(--resume)
            ;;
        *) break ;;
        esac
    done
}

bare=benchmarks.gpu.bare
ours=benchmarks.gpu.kernels
rows=$folder/kernels_$NAME.json
told=yes
if [ $run = second ]; then
    again "tables, polar keys, outliers" 230 $ours --plan second --json "$rows" --resume
    stage "steps by XLA too" 110 $bare benchmarks.gpu.decode_step \
        --json "$folder/step_${NAME}_xla.json" --points 4096:16 32768:16 --implementation asm xla
    stage "parity of more steps" 50 $bare benchmarks.gpu.step_parity \
        --json "$folder/parity_more_steps_$NAME.json" \
        --cache dense innerq:bits=1,mode=sym nf4 kivi:bits=4,pre_rope=true
    # Compilers take nearly all time of the tests, a core each. Several processes share the GPU, so
    # none may reserve its memory. -v says what passed if the time runs out.
    export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 XLA_FLAGS=--xla_gpu_autotune_level=0
    if "$PYTHON" -c 'import pytest, xdist' 2>/dev/null; then
        mapfile -t files < <(grep -rlE --include='test_*.py' 'mark\.gpu|harness import .*(anywhere|launches|on_a_gpu)|^    (anywhere|launches|on_a_gpu),' tests)
        told=
        XLA_PYTHON_CLIENT_PREALLOCATE=false stage "gpu tests" 180 pytest -m gpu -W default \
            -p no:cacheprovider -v -n 12 --dist worksteal "${files[@]}"
    else
        echo "== gpu tests: left out, pytest and pytest-xdist are not installed" | tee -a "$log"
    fi
else
    # On an H200 all that a stage times was compiled after 50 s with 12 threads.
    again "attention by both routes" 100 $ours --plan routes --json "$rows"
    again "parity of kernels" 80 $ours --plan parity --json "$folder/parity_kernels_$NAME.json"
    stage "parity of steps" 110 $bare benchmarks.gpu.step_parity \
        --json "$folder/parity_steps_$NAME.json" "${parity[@]}"
    stage "steps of 8 layers" 170 $bare benchmarks.gpu.decode_step \
        --json "$folder/step_$NAME.json" "${steps[@]}"
    again "more attention, quantizing" 100 $ours --plan next --json "$rows" --resume
fi

echo "== $SECONDS s in all; $(ls "$folder")" | tee -a "$log"
if [ ${#failures[@]} -gt 0 ]; then
    printf '== FAILED %s\n' "${failures[@]}" | tee -a "$log"
    exit 1
fi
echo "== all stages passed" | tee -a "$log"
