#!/usr/bin/env bash
# What is to be known of a GPU, the most telling first, in three calls of BUDGET seconds (530) each. Each is useful
# alone, and none downloads anything or needs more than PyTorch's own environment, a compiler and the toolkit.
#
#   benchmarks/gpu_check.sh first    builds; checks each dtype, direction and format; times the post's problem and a few
#                                    layers of every class beside cuDNN
#   benchmarks/gpu_check.sh second   times every kernel and split on some twenty layers; Nsight Compute on six kernels;
#                                    test_cuda, test_bits, test_correctness
#   benchmarks/gpu_check.sh third    compute-sanitizer; the other layers beside cuDNN; all other tests
#
#   OUT=FOLDER                       for log, figures and module (default: benchmarks/results)
#   BUDGET=1200                      more time, in seconds, for the call (default: 530)
#   MODULE=FILE                      a module.tar.gz of an earlier call (also found in $OUT and in build/): not built again
#   PYTHON=python3.12, BUILD=0       another Python; without building
#   WHEELS=FOLDER                    wheels of what is missing, such as pytest and hypothesis (default: build/wheels)
#   REVISION=COMMIT                  what the files say where the tree has come without its history
#   DEVICE=cpu                       tries the programs where there is no GPU; their figures mean nothing
#
# A call runs each of its steps to the end or to its limit, and goes on. Results are on disk case by case. Exit status:
# 0, or 1 where a step failed, 2 for a wrong argument. What this machine lacks is skipped, and said.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CALL=${1:-}
case $CALL in
  first | second | third) ;;
  *)
    sed -n '2,/^set /p' "${BASH_SOURCE[0]}" | grep '^#' | sed 's/^# \{0,1\}//'
    exit 2
    ;;
esac
OUT=${OUT:-benchmarks/results}
BUDGET=${BUDGET:-530}
PYTHON=${PYTHON:-python3}
BUILD=${BUILD:-1}
WHEELS=${WHEELS:-build/wheels}
export DEVICE=${DEVICE:-cuda}
mkdir -p "$OUT"
exec > >(tee "$OUT/gpu-check-$CALL.log") 2>&1
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

declare -a summary=()
failed=0
kept=10 # seconds that no step may take: for the summary, or for a last step

left() { echo $((BUDGET - SECONDS - kept)); }

note() { # result, step, what to say
  summary+=("$(printf '%-8s %-34s %s' "$1" "$2" "$3")")
  printf -- '--- %s: %s %s\n' "$2" "$1" "$3"
  [[ $1 != FAILED ]] || failed=1
}

skip() { note skipped "$1" "$2"; }

# step NAME LIMIT COMMAND...: at most LIMIT seconds, and no more than are left.
step() {
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
  ((limit <= $(left))) || limit=$(left)
  if ((limit < 5)); then
    note FAILED "$name" "no time left for it"
    return 1
  fi
  printf '\n=== %s (at most %d s): %s\n' "$name" "$limit" "$*"
  # SIGINT first: programs then still sum up what they found.
  timeout --signal=INT --kill-after=15 "$limit" "$@" || status=$?
  local took="in $((SECONDS - start)) s"
  case $status in
    0) note passed "$name" "$took" ;;
    124 | 137) note FAILED "$name" "not finished $took" ;;
    *) note FAILED "$name" "$took, exit status $status" ;;
  esac
  return "$status"
}

# program NAME LIMIT MODULE ARGUMENT...: one of benchmarks.cuda, which ends by itself a little before its limit.
program() {
  local name=$1 limit=$2 module=$3
  shift 3
  ((limit <= $(left))) || limit=$(left)
  step "$name" "$limit" "$PYTHON" -m "$module" --budget "$((limit > 25 ? limit - 15 : 10))" --output "$OUT" "$@"
}

# Of the modules named, those that are not there.
missing_of() {
  "$PYTHON" -c 'import sys; from importlib.util import find_spec; print(*(m for m in sys.argv[1:] if not find_spec(m)))' "$@"
}

finish() {
  printf '\n=== summary, %d s\n' "$SECONDS"
  printf '%s\n' "${summary[@]}"
  exit "$failed"
}

# ---- the machine

printf 'gpu_check.sh %s, revision: %s\n' "$CALL" "$(git describe --always --dirty 2>/dev/null || echo "${REVISION:-unknown}")"
date -u '+started: %Y-%m-%d %H:%M UTC'
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo 'nvidia-smi: none'
nvcc --version 2>/dev/null | tail -n 1 || true
"$PYTHON" - <<'PY'
import sys, torch
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
      f"cuDNN {torch.backends.cudnn.version()}, {torch.cuda.device_count()} GPUs")
sys.exit(0 if torch.cuda.is_available() else 3)
PY
found=$?
if ((found != 0 && found != 3)); then
  note FAILED environment "$PYTHON can't import torch"
  finish
fi
gpu=$((found == 0))

shopt -s nullglob
wheels=("$WHEELS"/*.whl)
if ((${#wheels[@]})); then
  if step wheels 60 "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target build/site "${wheels[@]}"; then
    export PYTHONPATH="$PYTHONPATH:$PWD/build/site"
  fi
fi
missing=" $(missing_of ninja pytest hypothesis numpy PIL sklearn torchvision matplotlib scipy xdist rich) "
printf 'Python modules that some tests use and this machine lacks:%s\n' "$missing"

# ---- the module

if ((BUILD)); then
  # Where a GPU is visible, for it alone.
  if ((gpu)); then
    export CONV2D_EXT_CUDA="${CONV2D_EXT_CUDA-1}"
    unset TORCH_CUDA_ARCH_LIST
  fi
  module=(${MODULE:+--module "$MODULE"})
  if ! step build 280 "$PYTHON" -m benchmarks.cuda.build --output "$OUT" ${module[@]+"${module[@]}"} \
    > "$OUT/build-$CALL.log" 2>&1; then
    # Another module may be in place: its figures would pass for this one's.
    tail -n 40 "$OUT/build-$CALL.log"
    note FAILED everything "nothing was built"
    finish
  fi
  tail -n 3 "$OUT/build-$CALL.log"
fi
"$PYTHON" - <<'PY'
import sys, conv2d_ext
print(conv2d_ext.build_config())
sys.exit(0 if conv2d_ext.build_config()["cuda_architectures"] else 3)
PY
found=$?
if ((found != 0 && found != 3)); then
  note FAILED import "conv2d_ext can't be imported"
  finish
fi
cuda_build=$((found == 0))

no_gpu="" # why what needs a GPU is skipped
((cuda_build)) || no_gpu="this build has no CUDA code"
((gpu)) || no_gpu="no GPU on this machine"
if [[ -n $no_gpu ]] && ((gpu)); then
  note FAILED CUDA "$no_gpu"
fi
why=$no_gpu # why the programs of benchmarks.cuda are
[[ $DEVICE != cpu ]] || why=""

# ---- the tests

# tests NAME LIMIT ARGUMENT...
tests() {
  local name=$1 limit=$2
  shift 2
  if [[ -n $no_gpu ]]; then
    skip "$name" "$no_gpu; make test runs what needs none"
  elif [[ $missing == *" pytest "* || $missing == *" hypothesis "* ]]; then
    skip "$name" "pytest or hypothesis is missing: put their wheels into $WHEELS"
  else
    # -p no:cacheprovider: nothing is left in the tree.
    local pytest=("$PYTHON" -m pytest -q -p no:cacheprovider --continue-on-collection-errors --maxfail=200 --tb=short)
    if [[ $missing != *" xdist "* ]]; then
      pytest+=(-n "$(($(nproc) < 12 ? $(nproc) : 12))" --dist loadgroup)
    fi
    # One thread each: the workers are processes.
    OMP_NUM_THREADS=1 step "$name" "$limit" "${pytest[@]}" "$@"
  fi
}

on_gpu="needs_cuda or needs_two_gpus"

first() {
  if [[ -n $why ]]; then
    skip smoke "$why"
    skip benchmark "$why"
    return
  fi
  program smoke 100 benchmarks.cuda.smoke
  program benchmark "$BUDGET" benchmarks.cuda --tiers '^(the post|every class)'
}

second() {
  if [[ -n $why ]]; then
    skip "sweep of kernels" "$why"
    skip ncu "$why"
  else
    program "sweep of kernels" 190 benchmarks.cuda.sweep
    program ncu 120 benchmarks.cuda.ncu
  fi
  tests test_cuda 130 tests/test_cuda.py -m "$on_gpu"
  tests test_bits 90 tests/test_bits.py -m "$on_gpu"
  tests test_correctness "$BUDGET" tests/test_correctness.py -m "$on_gpu"
}

third() {
  local sanitizer
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
  if [[ -n $no_gpu ]]; then
    skip compute-sanitizer "$no_gpu"
  elif [[ -z $sanitizer ]]; then
    skip compute-sanitizer "the tool is not on this machine"
  else
    # Only our kernels are instrumented; every tensor is an allocation of its own, so that its end is seen.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in memcheck racecheck; do
      step "compute-sanitizer $tool" 120 "$sanitizer" --tool "$tool" --error-exitcode 9 --kernel-name kns=conv2d_ext \
        "$PYTHON" tests/cuda_small_set.py
    done
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
  fi
  if [[ -n $why ]]; then
    skip "benchmark, the rest" "$why"
  else
    kept=$((BUDGET / 4)) # for the tests
    program "benchmark, the rest" "$BUDGET" benchmarks.cuda --name cuda-benchmark-rest --tiers '^(?!the post|every class)'
    kept=10
  fi
  tests "other tests with CUDA" 70 tests -m "$on_gpu" --deselect tests/test_cuda.py --deselect tests/test_bits.py \
    --deselect tests/test_correctness.py
  tests "tests without CUDA" "$BUDGET" tests -m "not needs_cuda and not needs_two_gpus"
}

"$CALL"
finish
