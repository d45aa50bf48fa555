#!/usr/bin/env bash
# Configures, builds and tests the torch-free part in an environment that has no Python to be found. Arguments: the
# build folder, then further arguments to the configure step.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
shift
tools=$PWD/$build-path  # kept: CMake remembers where it found its compiler
mkdir -p "$tools"
for file in /usr/bin/* /bin/*; do
  case $(basename "$file") in python* | pip* | pydoc* | 2to3*) ;; *) ln -sf "$file" "$tools/" ;; esac
done
bare() { env -i HOME="$HOME" PATH="$tools" LC_ALL=C TSAN_OPTIONS="${TSAN_OPTIONS:-}" "$@"; }
if bare sh -c 'command -v python3 || command -v python'; then echo "a Python is still on the PATH"; exit 1; fi
bare cmake -S . -B "$build" -G Ninja -DDILOCO_BUILD_PYTHON=OFF -DDILOCO_BUILD_TESTS=ON "$@" >/dev/null
bare cmake --build "$build" --parallel "$(nproc)"
if grep -i -E 'torch|python' "$build/CMakeCache.txt" | grep -v -E '^//|DILOCO_BUILD_PYTHON|HOMEPAGE'; then
  echo "the configure step looked for Python or torch"
  exit 1
fi
bare "$build/csrc/diloco/syncer/diloco-syncer" --version
bare tools/ctest.sh "$build"
