#!/usr/bin/env bash
# Everything that needs a GPU, in one command and under nine minutes: builds in place, runs the tests with CUDA,
# compute-sanitizer on a small set, all other tests, and the benchmark in the time that is left. Downloads nothing.
#
#   benchmarks/gpu_check.sh              log, figures and pictures into $OUT (default: benchmarks/results)
#   BUDGET=1200 benchmarks/gpu_check.sh  more time, in seconds (default: 530)
#   PYTHON=python3.12, BUILD=0           another Python; without building
#
# It runs every step to the end. Exit status: 0, or 1 where one failed. What this machine lacks is skipped, and said.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

OUT=${OUT:-benchmarks/results}
BUDGET=${BUDGET:-530}
PYTHON=${PYTHON:-python3}
BUILD=${BUILD:-1}
BENCHMARK_SECONDS=150 # kept for the benchmark whatever the steps before it take
mkdir -p "$OUT"
exec > >(tee "$OUT/gpu-check.log") 2>&1
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

declare -a summary=()
failed=0

left() { echo $((BUDGET - SECONDS)); }

note() { # result, step, what to say
  summary+=("$(printf '%-8s %-34s %s' "$1" "$2" "$3")")
  printf -- '--- %s: %s %s\n' "$2" "$1" "$3"
  [[ $1 != FAILED ]] || failed=1
}

skip() { note skipped "$1" "$2"; }

# step NAME LIMIT COMMAND...: at most LIMIT seconds, and no more than leaves the benchmark its own.
step() {
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
  local most=$(($(left) - BENCHMARK_SECONDS))
  ((limit <= most)) || limit=$most
  if ((limit < 5)); then
    note FAILED "$name" "no time left for it"
    return 1
  fi
  printf '\n=== %s (at most %d s): %s\n' "$name" "$limit" "$*"
  # SIGINT first: pytest then still sums up what it found.
  timeout --signal=INT --kill-after=15 "$limit" "$@" || status=$?
  local took="in $((SECONDS - start)) s"
  case $status in
    0) note passed "$name" "$took" ;;
    124 | 137) note FAILED "$name" "not finished $took" ;;
    *) note FAILED "$name" "$took, exit status $status" ;;
  esac
  return "$status"
}

has_module() { "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

# ---- the machine

printf 'revision: %s\n' "$(git describe --always --dirty 2>/dev/null || echo "${REVISION:-unknown}")"
date -u '+started: %Y-%m-%d %H:%M UTC'
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo 'nvidia-smi: none'
nvcc --version 2>/dev/null | tail -n 1 || true
if ! has_module torch; then
  note FAILED environment "$PYTHON has no torch"
  exit 1
fi
"$PYTHON" - <<'PY'
import sys, torch
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
      f"cuDNN {torch.backends.cudnn.version()}, {torch.cuda.device_count()} GPUs")
PY
gpu=0
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && gpu=1

# ---- build

if ((BUILD)); then
  # Where a GPU is visible, for it alone.
  if ! step build 260 "$PYTHON" setup.py --quiet build_ext --inplace > "$OUT/build.log" 2>&1; then
    tail -n 40 "$OUT/build.log"
  fi
  tail -n 1 "$OUT/build.log"
  rm -f "$OUT/build.log"
fi
if ! "$PYTHON" -c 'import conv2d_ext; print(conv2d_ext.build_config())'; then
  note FAILED import "conv2d_ext can't be imported"
  printf '\n%s\n' "${summary[@]}"
  exit 1
fi
cuda_build=0
"$PYTHON" -c 'import sys, conv2d_ext; sys.exit(not conv2d_ext.build_config()["cuda_architectures"])' && cuda_build=1

why=""
((cuda_build)) || why="this build has no CUDA code"
((gpu)) || why="no GPU on this machine"
if [[ -n $why ]] && ((gpu)); then
  note FAILED CUDA "$why"
fi

# ---- tests

missing=()
for module in pytest hypothesis PIL sklearn torchvision matplotlib scipy rich; do
  has_module "$module" || missing+=("$module")
done
((${#missing[@]} == 0)) || printf '\nPython modules that the tests or the demo use and this machine lacks: %s\n' "${missing[*]}"

declare -a pytest=()
if [[ -n $why ]]; then
  skip "tests with CUDA" "$why"
  skip "all other tests" "$why; make test runs them"
elif ! has_module pytest || ! has_module hypothesis; then
  note FAILED tests "pytest or hypothesis is missing: python -m pip install '.[test]'"
else
  # -p no:cacheprovider: nothing is left in the tree.
  pytest=("$PYTHON" -m pytest -q -p no:cacheprovider --continue-on-collection-errors --maxfail=200 --tb=short)
  if has_module xdist; then
    workers=$(($(nproc) < 12 ? $(nproc) : 12))
    pytest+=(-n "$workers" --dist loadgroup)
  fi
  # One thread each: the workers are processes.
  OMP_NUM_THREADS=1 step "tests with CUDA" 200 "${pytest[@]}" -m "needs_cuda or needs_two_gpus"
fi

# ---- compute-sanitizer

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if [[ -n $why ]]; then
  skip compute-sanitizer "$why"
elif [[ -z $sanitizer ]]; then
  skip compute-sanitizer "the tool is not on this machine"
else
  # Only our kernels are instrumented; every tensor is an allocation of its own, so that its end is seen.
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  for tool in memcheck racecheck; do
    step "compute-sanitizer $tool" 60 "$sanitizer" --tool "$tool" --error-exitcode 9 --kernel-name kns=conv2d_ext \
      "$PYTHON" tests/cuda_small_set.py
  done
  unset PYTORCH_NO_CUDA_MEMORY_CACHING
fi

if [[ -z $why ]] && ((${#pytest[@]})); then
  OMP_NUM_THREADS=1 step "all other tests" 120 "${pytest[@]}" -m "not needs_cuda and not needs_two_gpus"
fi

# ---- benchmark: what is left, less what it takes to write and to end

if [[ -n $why ]]; then
  skip benchmark "$why"
  "$PYTHON" -m benchmarks.cuda --output "$OUT" > /dev/null # writes why
else
  seconds=$(($(left) - 15))
  ((seconds >= 30)) || seconds=30
  BENCHMARK_SECONDS=0
  step benchmark $((seconds + 10)) "$PYTHON" -m benchmarks.cuda --budget "$seconds" --output "$OUT"
fi

printf '\n=== summary, %d s\n' "$SECONDS"
printf '%s\n' "${summary[@]}"
exit "$failed"
