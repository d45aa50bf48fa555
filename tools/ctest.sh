#!/usr/bin/env bash
# ctest that prints what failed and the totals. Arguments: the build folder, then further ones for ctest.
set -uo pipefail
ctest --test-dir "$1" --no-tests=error --output-on-failure --parallel "$(nproc)" "${@:2}" |
  grep -v -E '^ *Start +[0-9]+:|^ *[0-9]+/[0-9]+ Test .* Passed '
exit "${PIPESTATUS[0]}"
