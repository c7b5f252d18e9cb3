"""The command that a log came from, written again with some of its flags changed.

Knows: how ``vllm serve`` is spelt. Does not know which flags to change (``rules/``) or since which version it
has them (``plan/vllm/flags.py``).
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from vlfit.doctor.facts import Facts
from vlfit.plan.vllm.flags import LIVES

NO_MODEL = "MODEL"
# Named in the log of the server, but no flags of it.
_NO_FLAGS = {"api_server_count", "model_config", "subparser", "dispatch_function"}


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
        if name in without or name in _NO_FLAGS or not _is_there(name, facts):
            continue
        words += _flag(name, value)
    return " ".join(words)


def _is_there(name: str, facts: Facts) -> bool:
    """Whether the version of the log has this flag; an unknown one counts as recent."""
    life = LIVES.get("--" + name.replace("_", "-"))
    return life is None or facts.at_least(*life.first)


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
