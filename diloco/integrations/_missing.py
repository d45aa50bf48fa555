"""What to say when the library of an integration is not installed."""

from __future__ import annotations


def missing(library: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error to raise instead of `error`; `error` itself if it was another module that is missing."""
    if (error.name or "").split(".")[0] != library:
        return error
    return ModuleNotFoundError(
        f"diloco.integrations.{library} needs {library}, which is not installed; run: pip install {library}",
        name=library,
    )
