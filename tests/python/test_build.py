"""What the build promises: layers that know only the layers below them, a core without Python and torch, what ships."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diloco import config

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc" / "diloco"
BUILD = Path(os.environ.get("DILOCO_BUILD_DIR", ROOT / "build" / str(sys.implementation.cache_tag)))


def torch_free_layers() -> list[str]:
    listed = re.search(r"set\(DILOCO_TORCH_FREE_LAYERS\s+([\w\s]+)\)", (CSRC / "CMakeLists.txt").read_text())
    assert listed
    return listed.group(1).split()


def depends(layer: str) -> set[str]:
    """The layers `layer` may use: itself and what its diloco_layer() call names, followed to the end."""
    call = re.search(r"\bDEPENDS\s+([a-z_\s]+)", (CSRC / layer / "CMakeLists.txt").read_text())
    direct = call.group(1).split() if call else []
    return {layer}.union(*(depends(below) for below in direct))


def includes(layer: str) -> list[tuple[Path, str]]:
    files = sorted(file for file in (CSRC / layer).rglob("*") if file.suffix in (".h", ".cpp"))
    assert files, f"{layer} has no sources"
    pattern = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
    return [(file, name) for file in files for name in pattern.findall(file.read_text())]


LAYERS = torch_free_layers()


@pytest.mark.parametrize("layer", LAYERS)
def test_includes_point_down(layer: str) -> None:
    allowed = depends(layer)
    assert allowed <= set(LAYERS[: LAYERS.index(layer) + 1]), "DEPENDS names a layer further right in the list"
    wrong = [
        f"{file.relative_to(ROOT)} includes {name}"
        for file, name in includes(layer)
        if name.startswith("diloco/") and name.split("/")[1] not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("layer", LAYERS)
def test_no_torch_and_no_python_included(layer: str) -> None:
    foreign = re.compile(r"^(torch|ATen|c10|caffe2|pybind11)/|^Python\.h$")
    assert not [f"{file.relative_to(ROOT)}: {name}" for file, name in includes(layer) if foreign.match(name)]


def test_heavy_libraries_stay_out_of_headers_that_other_layers_see() -> None:
    # fmt above all: torch brings another version, and one inline function compiled against both is two functions.
    included = {layer: includes(layer) for layer in [*LAYERS, "torch", "../bindings"]}
    seen = {
        name
        for layer, pairs in included.items()
        for _, name in pairs
        if name.startswith("diloco/") and f"/{layer}/" not in name
    }
    while True:
        below = {
            name for pairs in included.values() for file, name in pairs if str(file.relative_to(ROOT / "csrc")) in seen
        }
        if below <= seen:
            break
        seen |= below
    heavy = re.compile(r"^(fmt|nlohmann|CLI|toml\+\+)/|^zmq")
    assert "diloco/base/types.h" in seen
    assert not sorted(name for name in seen if heavy.match(name))


@pytest.mark.parametrize("layer", ["fragment", "codec", "outer", "wire", "merge", "quorum", "core"])
def test_pure_layers_have_no_clock_thread_socket_file(layer: str) -> None:
    impure = re.compile(
        r"^(thread|mutex|condition_variable|future|chrono|random|fstream|filesystem|zmq.*|sys/.*|unistd\.h)$"
    )
    assert not [(file.name, name) for file, name in includes(layer) if impure.match(name)]


@pytest.mark.parametrize("folder", ["torch", "../bindings"])
def test_no_fmt_beside_torch(folder: str) -> None:
    # torch carries an fmt of its own; a file that sees both would not link.
    assert not [(file.name, name) for file, name in includes(folder) if name.startswith("fmt/")]


@pytest.mark.parametrize("layer", LAYERS)
def test_archive_has_no_torch_and_no_python_symbols(layer: str) -> None:
    archive = BUILD / "csrc" / "diloco" / layer / f"libdiloco_{layer}.a"
    assert archive.exists(), f"{archive} is not there; run `make test`"
    listing = subprocess.run(["nm", "-u", "-C", str(archive)], capture_output=True, text=True, check=True).stdout
    undefined = re.findall(r"^\s+U (.+)$", listing, re.MULTILINE)
    assert undefined, "nm lists nothing at all"
    foreign = [symbol for symbol in undefined if re.match(r"_?Py[A-Z_]|.*\b(at|c10|torch|caffe2|pybind11)::", symbol)]
    assert len(foreign) == 0, foreign[:10]


def test_virtual_cluster_links_the_production_classes() -> None:
    """The simulator calls the cores of libdiloco_core.a and defines nothing of theirs itself."""

    def symbols(layer: str, *kinds: str) -> set[str]:
        archive = BUILD / "csrc" / "diloco" / layer / f"libdiloco_{layer}.a"
        listing = subprocess.run(["nm", "-C", str(archive)], capture_output=True, text=True, check=True).stdout
        found = re.findall(rf"^[0-9a-f ]{{16}} ([{''.join(kinds)}]) (diloco::(?!sim::).+)$", listing, re.MULTILINE)
        return {name for _, name in found}

    linked = symbols("sim", "U") & symbols("core", "T")
    for core in ("SyncerCore", "LearnerCore"):
        assert any(name.startswith(f"diloco::{core}::handle(") for name in linked), sorted(linked)
        assert any(name.startswith(f"diloco::{core}::next_deadline(") for name in linked), sorted(linked)
    assert not symbols("sim", "T")


def test_native_program_needs_no_python_and_no_torch() -> None:
    program = ROOT / "diloco" / "bin" / "diloco-syncer"
    listing = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    listing = re.sub(r"\(0x[0-9a-f]+\)", "", listing)  # an address may spell "c10"
    assert "libzmq" in listing
    assert not re.findall(r"\S*(?:python|torch|c10)\S*|.*not found.*", listing)
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, env={}, timeout=20)
    assert (ROOT / "version.txt").read_text().strip() in version.stdout


def test_headers_are_compiled_against_the_abi_of_the_torch_in_use() -> None:
    assert torch.compiled_with_cxx11_abi()


def test_no_setting_is_dead() -> None:
    """Each is read by a layer above the table that defines it."""
    files = [file for file in CSRC.rglob("*") if file.suffix in (".h", ".cpp") and "settings" not in file.stem]
    text = "\n".join(file.read_text() for file in files)
    reads = {
        "max_carry_steps": "carry_limit_steps",
        "max_staleness": "staleness_limit",
    }  # through functions of Settings
    names = config.setting_names()
    names = [name for name in names if name != "preset"]  # gives the others their values
    dead = [name for name in names if not re.search(rf"\.{reads.get(name, name)}\b(?!\s*=[^=])", text)]
    assert len(names) > 20
    assert not dead


def test_types_are_shipped() -> None:
    spec = importlib.util.find_spec("diloco")
    assert spec and spec.origin
    package = Path(spec.origin).parent
    assert (package / "py.typed").exists()
    assert (package / "_C.pyi").exists()


def test_build_without_torch_stops_with_one_sentence(tmp_path: Path) -> None:
    # As under build isolation: setuptools can be imported, torch cannot.
    for name in ("setuptools", "_distutils_hack"):
        spec = importlib.util.find_spec(name)
        assert spec and spec.origin
        (tmp_path / name).symlink_to(Path(spec.origin).parent)
    result = subprocess.run(
        [sys.executable, "-S", "setup.py", "dist_info", "--output-dir", str(tmp_path)],
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert "install torch 2.11 or newer" in lines[0] and "--no-build-isolation" in lines[0]


def test_setup_py_stays_thin() -> None:
    assert len((ROOT / "setup.py").read_text().splitlines()) <= 60


def test_version_is_written_once() -> None:
    from importlib.metadata import version

    text = (ROOT / "version.txt").read_text().strip()
    assert version("diloco") == text
    for file in ("pyproject.toml", "setup.py", "CMakeLists.txt"):
        assert text not in (ROOT / file).read_text()
