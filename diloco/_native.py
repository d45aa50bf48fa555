"""Loads diloco._C, loudly. torch comes first: the module's libraries then resolve to the ones torch has loaded."""

from __future__ import annotations

import torch

try:
    from diloco import _C as _C
except ImportError as error:
    raise ImportError(
        f"the native part of diloco (diloco._C) could not be loaded: {error}. It has to be built for this Python and "
        f"this torch ({torch.__version__}): run `pip install --no-build-isolation .` in the checkout, and start Python "
        "from another folder unless the installation is editable."
    ) from error

from diloco import ops as ops


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


if _minor(_C.TORCH_VERSION) != _minor(torch.__version__):
    raise ImportError(
        f"diloco was built for torch {_C.TORCH_VERSION} and this is torch {torch.__version__}; "
        "rebuild it with `pip install --no-build-isolation --force-reinstall .`"
    )

__version__: str = _C.__version__
