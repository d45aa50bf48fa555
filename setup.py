"""Bridge from pip to CMake: configure, build, install the component `python`. How to compile is CMake's matter."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

# Asked before anything else, so that a build without torch ends with this sentence and not with CMake's.
COMMANDS_THAT_BUILD = {"dist_info", "bdist_wheel", "editable_wheel", "build_ext"}
if COMMANDS_THAT_BUILD & set(sys.argv) and importlib.util.find_spec("torch") is None:
    sys.exit(
        "diloco is compiled against the torch you already have: install torch 2.11 or newer, setuptools and wheel "
        "in this environment, then add --no-build-isolation to the pip command."
    )

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    def run(self) -> None:
        # Not self.build_temp: an editable install gets a fresh one each time and would compile everything again.
        default = ROOT / "build" / str(sys.implementation.cache_tag)
        build = Path(os.environ.get("DILOCO_BUILD_DIR", default)).resolve()
        prefix = ROOT if self.inplace or self.editable_mode else Path(self.build_lib).resolve()
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), f"-DPython3_EXECUTABLE={sys.executable}"]
        if shutil.which("ninja") and not (build / "CMakeCache.txt").exists():
            configure += ["-G", "Ninja"]
        configure += ["-DDILOCO_BUILD_PYTHON=ON", *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
        self._call(configure)
        self._call(["cmake", "--build", str(build), "--target", "diloco_python", "--parallel", jobs])
        self._call(["cmake", "--install", str(build), "--component", "python", "--prefix", str(prefix)])

    @staticmethod
    def _call(command: list[str]) -> None:
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            sys.exit("diloco needs cmake 3.25 or newer and a C++20 compiler; `make setup` names the system packages.")
        except subprocess.CalledProcessError as error:
            sys.exit(f"diloco was not built: `{shlex.join(command)}` ended with status {error.returncode}.")


setup(ext_modules=[Extension("diloco._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
