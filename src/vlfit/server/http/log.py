"""The server's log: lines of text, or one JSON object per line, with secrets redacted in both.

Libraries quote their input in error messages, and clients send URLs with keys and whole pictures in them.
"""

import json
import logging
import re
import sys
import time
from typing import Literal

LogFormat = Literal["text", "json"]

_SECRETS = (
    (re.compile(r"data:[\w.+-]*/?[\w.+-]*[;,][^\s\"'<>)]*", re.IGNORECASE), "data:..."),
    (re.compile(r"(\w+://)[^\s/@\"']+@"), r"\1...@"),
    (re.compile(r"(\w+://[^\s?#\"'<>]*)[?#][^\s\"'<>]+"), r"\1?..."),
    (re.compile(r"\b(bearer|basic)\s+[^\s\"']+", re.IGNORECASE), r"\1 ..."),
    (re.compile(r"\b(sk|hf)[-_][A-Za-z0-9_-]{8,}"), r"\1-..."),
)


def redact(text: str) -> str:
    """``text`` with ``...`` for URL passwords and queries, API keys and the contents of ``data:`` URLs."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


class TextFormatter(logging.Formatter):
    """Local time and message, and the traceback of an error; secrets redacted."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The ``record`` as text, with secrets redacted."""
        return redact(super().format(record))


class JSONFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``; ``trace`` if there is one.

    A record's attribute ``fields``, a dict, is merged into the object. Secrets in strings are redacted.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The ``record`` as one line of JSON, without the newline."""
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
        return json.dumps({name: _redact_value(value) for name, value in line.items()}, ensure_ascii=False)


class StderrHandler(logging.Handler):
    """Write to the current ``sys.stderr``, which may have been replaced since the handler was made."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record`` to stderr at once. Never raises: errors go to ``handleError``."""
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _redact_value(value: object) -> object:
    return redact(value) if isinstance(value, str) else value


def log_to_stderr(quiet: bool, log_format: LogFormat = "text") -> None:
    """Log vlfit's messages and uvicorn's warnings to stderr from now on; call once.

    ``quiet``: vlfit's warnings and errors only.
    """
    handler = StderrHandler()
    handler.setFormatter(JSONFormatter() if log_format == "json" else TextFormatter())
    for name, level in (
        ("vlfit", logging.WARNING if quiet else logging.INFO),
        ("uvicorn", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
