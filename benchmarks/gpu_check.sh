#!/usr/bin/env bash
# What is to be known of a GPU, the most telling first. In one call where the machine is lent for a quarter of an hour,
# or in three, of BUDGET seconds (530) each. Each is useful alone, and none downloads anything or needs more than
# PyTorch's own environment, a compiler and the toolkit.
#
#   benchmarks/gpu_check.sh lease    builds; checks each dtype, direction and format; times the post's problem and a few
#                                    layers of every class beside cuDNN; some kernels and splits; the tests that need a
#                                    GPU; racecheck on a tenth of its calls where time is left
#   benchmarks/gpu_check.sh first    the build, the check and the times of lease, with more time
#   benchmarks/gpu_check.sh second   times every kernel and split on some twenty layers; Nsight Compute on six kernels;
#                                    test_cuda, test_bits, test_correctness
#   benchmarks/gpu_check.sh third    compute-sanitizer; the other layers beside cuDNN; all other tests
#
#   OUT=FOLDER                       for figures, logs and module (default: benchmarks/results/cuda, where
#                                    python -m benchmarks.figures reads them)
#   BUDGET=1200                      more time, in seconds, for the call (default: 530); all limits grow with it
#   MODULE=FILE                      a module.tar.gz of an earlier call (also found in $OUT and in build/): not built again
#   PYTHON=python3.12, BUILD=0       another Python; without building
#   WHEELS=FOLDER                    wheels of what is missing, such as pytest and hypothesis (default: build/wheels)
#   REVISION=COMMIT                  what the files say where the tree has come without its history
#   DEVICE=cpu                       tries the programs where there is no GPU; their figures mean nothing
#
# A call runs each of its steps to the end or to its limit, and goes on. Results are on disk case by case. Exit status:
# 0, or 1 where a step failed, 2 for a wrong argument. What this machine lacks is skipped, and said. In $OUT are then
# benchmark.json, smoke.jsonl, sweep.jsonl, checks.json (what tests and sanitizer found), and what git ignores:
# module.tar.gz, logs.tar.gz (of all calls for this commit).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

CALL=${1:-}
case $CALL in
  lease | first | second | third) ;;
  *)
    sed -n '2,/^set /p' "${BASH_SOURCE[0]}" | grep '^#' | sed 's/^# \{0,1\}//'
    exit 2
    ;;
esac
OUT=${OUT:-benchmarks/results/cuda}
BUDGET=${BUDGET:-530}
PYTHON=${PYTHON:-python3}
BUILD=${BUILD:-1}
WHEELS=${WHEELS:-build/wheels}
export DEVICE=${DEVICE:-cuda}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

declare -a summary=()
failed=0
kept=10 # seconds that no step may take: for the summary, or for a last step

# Limits are written as of a call of 530 seconds.
of_530() { echo $((BUDGET * $1 / 530)); }
left() { echo $((BUDGET - SECONDS - kept)); }
percent_left() { echo $(($(left) * $1 / 100)); }

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
    return 124
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
  pack_logs
  return "$status"
}

# program NAME LIMIT FOLDER MODULE ARGUMENT...: one of benchmarks.cuda, which ends by itself a little before its limit.
program() {
  local name=$1 limit=$2 folder=$3 module=$4
  shift 4
  if [[ -n $why_no_program ]]; then
    skip "$name" "$why_no_program"
    return
  fi
  ((limit <= $(left))) || limit=$(left)
  step "$name" "$limit" "$PYTHON" -m "$module" --budget "$((limit > 25 ? limit - 15 : 10))" --output "$folder" "$@"
}

# Of the modules named, those that are not there.
missing_of() {
  "$PYTHON" -c 'import sys; from importlib.util import find_spec; print(*(m for m in sys.argv[1:] if not find_spec(m)))' "$@"
}

# ---- logs: after each step in one archive, with those of the calls before for this commit

pack_logs() { tar -czf "$OUT/logs.tar.gz" -C "$LOGS" . 2>/dev/null; }

unpack_logs() {
  mkdir -p "$OUT"
  LOGS=$(mktemp -d)
  trap 'rm -rf "$LOGS"' EXIT
  [[ ! -f $OUT/logs.tar.gz ]] || tar -xzf "$OUT/logs.tar.gz" -C "$LOGS"
  if [[ $(cat "$LOGS/commit" 2>/dev/null) != "$commit" ]]; then
    rm -rf "${LOGS:?}"/*
    echo "$commit" > "$LOGS/commit"
  fi
}

# into_log NAME COMMAND...: what it prints into a log of its own, whose end is shown.
into_log() {
  local log=$LOGS/$1.log status=0
  shift
  "$@" > "$log" 2>&1 || status=$?
  tail -n 20 "$log"
  return "$status"
}

# ---- tests

# sanitizer TOOL LIMIT ARGUMENT...
sanitizer() {
  local tool=$1 limit=$2 found
  local name="compute-sanitizer $tool"
  shift 2
  found=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
  if [[ -n $no_gpu ]]; then
    skip "$name" "$no_gpu"
  elif [[ -z $found ]]; then
    skip "$name" "the tool is not on this machine"
  else
    # Only our kernels are instrumented; every tensor is an allocation of its own, so that its end is seen.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    into_log "sanitizer-$tool" step "$name" "$limit" "$found" --tool "$tool" --error-exitcode 9 \
      --kernel-name kns=conv2d_ext "$PYTHON" tests/cuda_small_set.py "$@"
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
  fi
}

# tests NAME LIMIT ARGUMENT...
tests() {
  local name=$1 limit=$2 status=0
  shift 2
  if [[ -n $no_gpu ]]; then
    skip "$name" "$no_gpu; make test runs what needs none"
  elif [[ $missing == *" pytest "* || $missing == *" hypothesis "* ]]; then
    skip "$name" "pytest or hypothesis is missing: put their wheels into $WHEELS"
  else
    local report=$LOGS/${report_as:-tests}-${name// /-}
    # -p no:cacheprovider: nothing is left in the tree.
    local pytest=("$PYTHON" -m pytest -q -p no:cacheprovider --continue-on-collection-errors --maxfail=200
      --junitxml "$report.xml" -o "junit_suite_name=pytest $*" --tb=short)
    if [[ $missing != *" xdist "* ]]; then
      pytest+=(-n "$(($(nproc) < 12 ? $(nproc) : 12))" --dist loadgroup)
    fi
    rm -f "$report.xml" "$report.unfinished"
    # One thread each: the workers are processes.
    OMP_NUM_THREADS=1 step "$name" "$limit" "${pytest[@]}" "$@" || status=$?
    # pytest may also end before its first test, and write no report.
    [[ $status -lt 124 && -s $report.xml ]] || echo "pytest $*" > "$report.unfinished"
  fi
}

# ---- the calls

on_gpu="needs_cuda or needs_two_gpus"
telling='^(the post|every class)' # of the benchmark's cases

benchmark() { # NAME LIMIT ARGUMENT...
  local name=$1 limit=$2
  shift 2
  program "$name" "$limit" "$OUT" benchmarks.cuda --no-pictures "$@"
}

other_tests() { # LIMIT
  tests "other tests with CUDA" "$1" tests -m "$on_gpu" --deselect tests/test_cuda.py --deselect tests/test_bits.py \
    --deselect tests/test_correctness.py
}

lease() {
  program smoke "$(of_530 60)" "$OUT" benchmarks.cuda.smoke
  benchmark benchmark "$(of_530 130)" --tiers "$telling"
  program "sweep of kernels" "$(of_530 40)" "$OUT" benchmarks.cuda.sweep
  tests test_cuda "$(percent_left 35)" tests/test_cuda.py -m "$on_gpu"
  tests "test_bits and test_correctness" "$(percent_left 50)" tests/test_bits.py tests/test_correctness.py -m "$on_gpu"
  other_tests "$(percent_left 60)"
  if (($(left) < $(of_530 25))); then
    skip "compute-sanitizer racecheck" "no time left for it"
  else
    sanitizer racecheck "$(left)" --every 10
  fi
}

first() {
  program smoke "$(of_530 100)" "$OUT" benchmarks.cuda.smoke
  benchmark benchmark "$BUDGET" --tiers "$telling"
}

second() {
  program "sweep of kernels" "$(of_530 190)" "$OUT" benchmarks.cuda.sweep
  program ncu "$(of_530 120)" "$LOGS" benchmarks.cuda.ncu
  tests test_cuda "$(of_530 130)" tests/test_cuda.py -m "$on_gpu"
  tests test_bits "$(of_530 90)" tests/test_bits.py -m "$on_gpu"
  tests test_correctness "$BUDGET" tests/test_correctness.py -m "$on_gpu"
}

third() {
  sanitizer memcheck "$(of_530 120)"
  sanitizer racecheck "$(of_530 120)"
  kept=$((BUDGET / 4)) # for the tests
  benchmark "benchmark, the rest" "$BUDGET" --continue
  kept=10
  other_tests "$(of_530 70)"
  report_as="not-of-cuda" tests "tests without CUDA" "$BUDGET" tests -m "not needs_cuda and not needs_two_gpus"
}

# ---- around them

finish() {
  if compgen -G "$LOGS/tests-*" > /dev/null || compgen -G "$LOGS/sanitizer-*" > /dev/null; then
    into_log checks "$PYTHON" -m benchmarks.cuda.checks --output "$OUT" "$LOGS" ||
      note FAILED checks "not written: see logs.tar.gz"
  fi
  printf '\n=== summary, %d s\n' "$SECONDS"
  printf '%s\n' "${summary[@]}"
  exit "$failed"
}

describe_machine() {
  printf 'gpu_check.sh %s, revision: %s\n' "$CALL" "$(git describe --always --dirty 2>/dev/null || echo "$commit")"
  date -u '+started: %Y-%m-%d %H:%M UTC'
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo 'nvidia-smi: none'
  nvcc --version 2>/dev/null | tail -n 1 || true
  "$PYTHON" - <<'PY'
import sys, torch
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
      f"cuDNN {torch.backends.cudnn.version()}, {torch.cuda.device_count()} GPUs")
sys.exit(0 if torch.cuda.is_available() else 3)
PY
  local found=$?
  if ((found != 0 && found != 3)); then
    note FAILED environment "$PYTHON can't import torch"
    finish
  fi
  gpu=$((found == 0))
}

install_wheels() {
  shopt -s nullglob
  local wheels=("$WHEELS"/*.whl)
  if ((${#wheels[@]})); then
    if step wheels 60 "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target build/site "${wheels[@]}"; then
      export PYTHONPATH="$PYTHONPATH:$PWD/build/site"
    fi
  fi
  missing=" $(missing_of ninja pytest hypothesis numpy PIL sklearn torchvision matplotlib scipy xdist rich) "
  printf 'Python modules that some tests use and this machine lacks:%s\n' "$missing"
}

build_module() {
  # Where a GPU is visible, for it alone.
  if ((gpu)); then
    export CONV2D_EXT_CUDA="${CONV2D_EXT_CUDA-1}"
    unset TORCH_CUDA_ARCH_LIST
  fi
  local module=(${MODULE:+--module "$MODULE"})
  if ! into_log "build-$CALL" step build "$(of_530 280)" "$PYTHON" -m benchmarks.cuda.build --output "$OUT" \
    ${module[@]+"${module[@]}"}; then
    # Another module may be in place: its figures would pass for this one's.
    note FAILED everything "nothing was built"
    finish
  fi
}

# Sets why what needs a GPU is skipped, and why the programs of benchmarks.cuda are.
look_at_module() {
  "$PYTHON" - <<'PY'
import sys, conv2d_ext
print(conv2d_ext.build_config())
sys.exit(0 if conv2d_ext.build_config()["cuda_architectures"] else 3)
PY
  local found=$?
  if ((found != 0 && found != 3)); then
    note FAILED import "conv2d_ext can't be imported"
    finish
  fi
  no_gpu=""
  ((found == 0)) || no_gpu="this build has no CUDA code"
  ((gpu)) || no_gpu="no GPU on this machine"
  if [[ -n $no_gpu ]] && ((gpu)); then
    note FAILED CUDA "$no_gpu"
  fi
  why_no_program=$no_gpu
  [[ $DEVICE != cpu ]] || why_no_program=""
}

main() {
  describe_machine
  install_wheels
  ((!BUILD)) || build_module
  look_at_module
  "$CALL"
  finish
}

commit=$(git rev-parse HEAD 2>/dev/null || echo "${REVISION:-unknown}")
unpack_logs
main 2>&1 | tee "$LOGS/$CALL.log"
status=${PIPESTATUS[0]}
pack_logs
exit "$status"
