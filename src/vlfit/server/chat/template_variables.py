"""Variables that a request sets for the chat template: ``chat_template_kwargs`` and ``reasoning_effort``."""

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from vlfit.backends.base import Backend
from vlfit.errors import CheckpointError, InvalidRequest
from vlfit.prompt.chat_template import RESERVED_VARIABLES, ChatTemplate
from vlfit.server.chat.chat_schema import ChatRequest
from vlfit.server.chat.model_facts import checkpoint_of

MAX_VARIABLES = 32
MAX_VALUES = 1_000  # in lists and objects, of all variables together
MAX_DEPTH = 8
MAX_CHARACTERS = 20_000  # of all names and texts together
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_FIELD = "chat_template_kwargs"


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise ``InvalidRequest`` for reserved names, names that are none of Jinja, and values too large."""
    if len(variables) > MAX_VARIABLES:
        raise InvalidRequest(
            f"{_FIELD} has {len(variables)} variables",
            f"Send at most {MAX_VARIABLES}: templates read few.",
            param=_FIELD,
        )
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise InvalidRequest(
                f"{_FIELD} has {name!r}, which vlfit sets itself",
                "Send messages and tools as fields of their own.",
                param=_FIELD,
            )
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{_FIELD} has {name[:60]!r}, which is no name of a variable",
                "Use letters, digits and underscores.",
                param=_FIELD,
            )
    values, characters = 0, 0
    level: list[Any] = [dict(variables)]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                characters += sum(map(len, value))
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, str):
                characters += len(value)
            elif isinstance(value, float) and not math.isfinite(value):
                raise InvalidRequest(f"{_FIELD} has the number {value}", param=_FIELD)
        values += len(below)
        if values > MAX_VALUES or characters > MAX_CHARACTERS:
            break
        level = below
        if not level:
            return
    raise InvalidRequest(
        f"{_FIELD} has more than {MAX_VALUES:,} values, {MAX_CHARACTERS:,} characters or {MAX_DEPTH} levels",
        "Send switches of the template, such as enable_thinking; texts belong into messages.",
        param=_FIELD,
    )


def template_variables(params: ChatRequest, backend: Backend) -> str | None:
    """The JSON object of the request's variables for ``SamplingParams.template_variables``; None: none left.

    Variables that the template of ``backend``'s checkpoint does not read are left out (``unread_variables``).
    All are passed on if the model runs on another server. Raises ``InvalidRequest`` as ``check_variables``.
    """
    check_variables(params.chat_template_kwargs or {})
    variables = params.template_variables()
    if not variables:
        return None
    unread = _unread(variables, backend)
    read = {name: value for name, value in variables.items() if name not in unread}
    return json.dumps(read, ensure_ascii=False) if read else None


def unread_variables(params: ChatRequest, backend: Backend) -> tuple[str, ...]:
    """Paths of the request's variables that have no effect, for ``vlfit.ignored``.

    ``reasoning_effort`` is one of them if the template has neither a switch nor levels.
    """
    paths = [f"{_FIELD}.{name}" for name in _unread(params.chat_template_kwargs or {}, backend)]
    if params.reasoning_effort is not None:
        effort = {"enable_thinking": True, "reasoning_effort": params.reasoning_effort}
        if len(_unread(effort, backend)) == len(effort):
            paths.append("reasoning_effort")
    return tuple(paths)


def _unread(variables: Mapping[str, Any], backend: Backend) -> list[str]:
    if not variables or checkpoint_of(backend) is None:
        return []
    read = _read_by(backend.chat_template)
    return [name for name in variables if name not in read]


@lru_cache(maxsize=16)
def _read_by(source: str) -> frozenset[str]:
    """Names that the template ``source`` reads; none if it cannot be parsed, which ``prepare`` reports."""
    try:
        return ChatTemplate(source, {}).variables
    except CheckpointError:
        return frozenset()
