#!/usr/bin/env bash
# Formats every Python and C++ file in place. With --check: changes nothing, names what is not formatted
# or breaks a rule, and fails. People and CI run it alike, through `make format` and `make lint`, which
# put the versions of requirements-lint.txt on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=${1:-}
if [[ -n $mode && $mode != --check ]]; then
  echo "usage: tools/format.sh [--check]" >&2
  exit 2
fi

cxx_files=()
while IFS= read -r -d '' file; do
  cxx_files+=("$file")
done < <(find csrc tests conv2d_ext/include examples -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu*' \) -print0 | sort -z)

if [[ $mode != --check ]]; then
  ruff format .
  ruff check --fix .
  clang-format -i "${cxx_files[@]}"
  exit
fi

failed=0
run() {
  echo "== $1"
  shift
  "$@" || failed=1
}

run "ruff format" ruff format --diff .
run "ruff check" ruff check .
run "clang-format" clang-format --dry-run --Werror "${cxx_files[@]}"

# clang-tidy takes half a minute for a file that includes torch. The engines and the geometry don't,
# and they are where a subtle bug would hide: the files that preprocess without torch's headers. Of the instruction
# sets' files, which are the same templates, those are left out whose every header another one includes.
included_by_others='/(engine_avx2|tables_avx512|tables_portable)\.cpp$'
torch_free=()
for file in csrc/*.cpp csrc/cpu/*.cpp csrc/cpu/*/*.cpp; do
  [[ $file =~ $included_by_others ]] && continue
  if "${CXX:-c++}" -std=c++17 -E "$file" -o /dev/null 2>/dev/null; then
    torch_free+=("$file")
  fi
done
# The filter of .clang-tidy does not reach headers that are named relative to a file of another folder.
headers='--header-filter=(csrc|tests)/.*\.(h|cuh)$'
run "clang-tidy (${#torch_free[@]} torch-free files)" \
  clang-tidy --quiet "$headers" "${torch_free[@]}" -- -std=c++17 -O1 -Wall -Wextra -Icsrc

engine=()
for file in "${torch_free[@]}"; do
  [[ $file == csrc/cpu/* ]] && engine+=("$file")
done
# A function of the CPU engine is read in one go, and its arguments at a glance. (Micro-kernels may be longer.)
function_size='{CheckOptions: {readability-function-size.LineThreshold: 80,
  readability-function-size.ParameterThreshold: 7, readability-function-size.StatementThreshold: none}}'
run "clang-tidy, functions of csrc/cpu of at most 80 lines and seven parameters" \
  clang-tidy --quiet --checks='-*,readability-function-size' --warnings-as-errors='*' --config="$function_size" \
  --header-filter='csrc/cpu/.*(base|plan|isa|drivers|pack|pointwise)/[^/]*$' \
  "${engine[@]}" -- -std=c++17 -Icsrc

# The CUDA engine as the tests compile it for the host.
# Kernels keep addresses as integers, and the host's stand-ins for CUDA's words have their names.
but_cuda='-performance-no-int-to-ptr,-bugprone-reserved-identifier,-bugprone-sizeof-expression'
cuda=(csrc/cuda/{calls,conv2d_cuda,plan}.cpp csrc/cuda/{direct,gemm_bf16,gemm_f32}.cu tests/cuda_host/*.cpp)
run "clang-tidy (${#cuda[@]} files of CUDA, compiled for the host)" \
  clang-tidy --quiet "$headers" --checks="$but_cuda" "${cuda[@]}" -- -x c++ -std=c++17 -O1 -Wno-unknown-pragmas -DCONV2D_CUDA_ON_HOST -Itests/cuda_host

exit "$failed"
