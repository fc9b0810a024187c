#!/usr/bin/env bash
# Builds the core with its own checks under the address and undefined sanitizers, and runs them (about 15 s).
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
"${CXX:-g++}" -std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
  -fno-exceptions -fno-rtti -ffp-contract=off -fno-trapping-math -DNONET_WITHOUT_PYTHON -Wall -Wextra -Werror \
  "$here/core.cpp" "$here/table.cpp" "$here/evict.cpp" "$here/exchange.cpp" "$here/packed.cpp" "$here/prefault.cpp" "$here/pieces.cpp" "$here/python_call.cpp" "$here/checks/checks.cpp" -lstdc++ -o "$out/checks"
for isa in baseline avx2 avx512; do
  "$out/checks" "$isa"
done
