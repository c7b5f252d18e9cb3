"""The command that a log came from, written again with some of its flags changed.

Knows: how ``vllm serve`` is spelt, and since which version it has the flags that remedies use (read in the
sources of 0.8.5 to 0.33.0). Does not know which flags to change (``rules/``).
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from vlfit.doctor.facts import Facts

NO_MODEL = "MODEL"
# Named in the log of the server, but no flags of it.
_NO_FLAGS = {"api_server_count", "model_config", "subparser", "dispatch_function"}
SINCE: Mapping[str, tuple[int, ...]] = {
    "kv_cache_memory_bytes": (0, 11),
    "mm_processor_cache_gb": (0, 11),
    "cudagraph_capture_sizes": (0, 12),
    "language_model_only": (0, 19, 1),
}


def serve(
    facts: Facts,
    changes: Mapping[str, Any] | None = None,
    *,
    without: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    model: str | None = None,
) -> str:
    """``vllm serve`` as the log has it, with ``changes``; a flag that its version lacks is left out."""
    arguments = {**facts.arguments, **(changes or {})}
    words = [f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    words += ["vllm", "serve", shlex.quote(model or facts.model or NO_MODEL)]
    for name, value in arguments.items():
        if name in without or name in _NO_FLAGS or not facts.at_least(*SINCE.get(name, (0,))):
            continue
        words += _flag(name, value)
    return " ".join(words)


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list | tuple):
        return [flag, *(shlex.quote(str(item)) for item in value)]
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return [flag, shlex.quote(text)]


def without_model(facts: Facts) -> str:
    """What to add to a remedy when the log does not name the model."""
    return "" if facts.model else f" The log does not name the model: put it where {NO_MODEL} stands."
