"""How the log is written: lines for people, or one JSON object a line; no secrets in either.

Knows: what secrets look like in text. Does not know what is logged.

Nobody writes a secret into the log on purpose. But messages of libraries quote what they were given, and
what clients send holds addresses with keys in them and whole pictures.
"""

import json
import logging
import re
import sys
import time
from typing import Literal

Format = Literal["text", "json"]

_SECRETS = (
    (re.compile(r"data:[\w.+-]*/?[\w.+-]*[;,][^\s\"'<>)]*", re.IGNORECASE), "data:..."),
    (re.compile(r"(\w+://)[^\s/@\"']+@"), r"\1...@"),
    (re.compile(r"(\w+://[^\s?#\"'<>]*)[?#][^\s\"'<>]+"), r"\1?..."),
    (re.compile(r"\b(bearer|basic)\s+[^\s\"']+", re.IGNORECASE), r"\1 ..."),
    (re.compile(r"\b(sk|hf)[-_][A-Za-z0-9_-]{8,}"), r"\1-..."),
)


def without_secrets(text: str) -> str:
    """``text`` without passwords and queries of URLs, keys, or the contents of ``data:`` URLs."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


class Lines(logging.Formatter):
    """For people: the time and what is said."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


class JSONLines(logging.Formatter):
    """For programs: ``time`` (UTC), ``level``, ``logger``, ``message``, what the record has in ``fields``,
    and ``trace`` of an error.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps({name: _safe(value) for name, value in line.items()}, ensure_ascii=False)


class ToStderr(logging.Handler):
    """Writes to what stderr is at the moment: another may have been put in its place for a while."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _safe(value: object) -> object:
    return without_secrets(value) if isinstance(value, str) else value


def log_to_stderr(quiet: bool, how: Format = "text") -> None:
    """Ours and uvicorn's, for the rest of this process; ``quiet``: warnings and errors alone."""
    handler = ToStderr()
    handler.setFormatter(JSONLines() if how == "json" else Lines())
    for name, level in (
        ("vlfit", logging.WARNING if quiet else logging.INFO),
        ("uvicorn", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
