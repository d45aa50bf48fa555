"""The commands of an installed package. A module of its own beside the package: importing that imports torch, which
takes seconds, and which the native syncer neither needs nor uses."""

import importlib.util
import os
import sys
from pathlib import Path


def diloco() -> None:
    try:
        from diloco.cli import main
    except KeyboardInterrupt:  # nothing has begun
        sys.exit(130)
    main()


def diloco_syncer() -> None:
    """Becomes the native program shipped inside the package."""
    package = importlib.util.find_spec("diloco")
    folder = Path(package.origin).parent if package is not None and package.origin else Path()
    program = folder / "bin" / "diloco-syncer"
    if not program.is_file():
        sys.exit(f"diloco-syncer: {program} is missing; expected a build of diloco there, reinstall the package")
    os.execv(program, ["diloco-syncer", *sys.argv[1:]])
