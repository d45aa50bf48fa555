#!/usr/bin/env bash
# `make test`: C++ tests by ctest, then Python tests by pytest; both totals; fails on zero tests. Arguments go to pytest.
set -uo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh test || exit 1
python=.venv/bin/python
build=${DILOCO_BUILD_DIR:-build/$($python -c 'import sys; print(sys.implementation.cache_tag)')}

cmake -S . -B "$build" -DDILOCO_BUILD_TESTS=ON >/dev/null && cmake --build "$build" --parallel "$(nproc)" || exit 1
rm -f "$build/ctest.xml" "$build/pytest.xml"
tools/ctest.sh "$build" --output-junit "$PWD/$build/ctest.xml"
cpp=$?
# A file at a time on every core, in the order of conftest.py: most tests wait for processes. A test whose threads hang
# outlives its own limit: then pytest prints the stack of each and ends.
timeout --signal=ABRT --kill-after=30 1200 $python -m pytest -q -n "$(nproc)" --dist loadfile --no-loadscope-reorder \
  --junitxml "$build/pytest.xml" "$@"
py=$?
$python tools/test_totals.py "C++=$build/ctest.xml" "Python=$build/pytest.xml" || exit 1
exit $((cpp != 0 || py != 0))
