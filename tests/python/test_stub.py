"""diloco/_C.pyi says what the built module has, and the package is typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import diloco


def test_stub_matches_the_module(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    # pybind11's metaclass and the constructor that only raises cannot be said in a stub.
    allowed.write_text("diloco\\._C\\.(Learner|Syncer|SettingInfo|SettingInfo\\.__init__)\n")
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy-torch.*]\nfollow_imports = skip\nfollow_imports_for_stubs = True\n")  # a minute of work
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "mypy.stubtest",
            "diloco._C",
            "--allowlist",
            allowed,
            "--mypy-config-file",
            config,
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_typed() -> None:
    assert (Path(diloco.__file__).parent / "py.typed").exists()
