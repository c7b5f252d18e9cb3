"""The reference's own set-up of Jinja for chat templates, in a process of its own.

Written from transformers' ``apply_chat_template``. The process and its limits are the engine's
(``prompt/template_process.py``), the environment is not.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from vlfit.errors import CheckpointError
from vlfit.prompt.template_process import TemplateProcess, TemplateRefusal

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = TemplateProcess("vlfit.parity.reference.reference_template")


def render_reference(source: str, variables: Mapping[str, Any]) -> str:
    """Render the chat template ``source``.

    Raises ``CheckpointError`` if the template refuses ``variables`` or takes too much, ``TemplateFailure`` if
    it fails, and ``TemplatesUnavailable``.
    """
    try:
        return _TEMPLATES.render(source, variables)
    except TemplateRefusal as error:
        raise CheckpointError(f"the chat template refuses the messages: {error}") from None


def _environment() -> "Environment":
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    from vlfit.prompt.template_worker import raise_exception

    raise_exception(message)


if __name__ == "__main__":
    from vlfit.prompt.template_worker import run_worker

    run_worker(_environment)
