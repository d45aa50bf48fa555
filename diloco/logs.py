"""One log line format for everything: HH:MM:SS diloco LEVEL [who] text."""

from __future__ import annotations

import logging
import sys


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage().replace("\n", " ")
        who = "" if text.startswith("[") else "[-] "
        return f"{self.formatTime(record, '%H:%M:%S')} diloco {record.levelname} {who}{text}"


def log_to_stderr(level: str | int = "INFO") -> None:
    """Sends the logger `diloco` to stderr in the project's format. For programs; a library leaves logging alone."""
    logger = logging.getLogger("diloco")
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    if not any(isinstance(handler.formatter, _Line) for handler in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Line())
        logger.addHandler(handler)
        logger.propagate = False
