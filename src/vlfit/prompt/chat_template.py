"""Renders a checkpoint's chat template as transformers does.

A template is code by whoever made the checkpoint: it runs in a process of its own (``template_process.py``),
and sees plain values only.
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from vlfit.errors import InvalidRequest
from vlfit.prompt.template_process import (
    TEMPLATES,
    TemplateFacts,
    TemplateFailure,
    TemplateProcess,
    TemplateRefusal,
    failed,
)

# Set by whoever renders a prompt, never by a request's ``template_variables``.
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# A message or a tool as templates take them: strings, lists and dicts.
TemplateValue = dict[str, Any]


class ChatTemplate:
    """A chat template. The constructor raises ``CheckpointError`` for a syntax error in ``source``.

    ``source``: Jinja. ``special_tokens``: text of each special token by name (``eos_token``), as variables of
    the template. ``process``: that renders it. ``literals``: all literal text in ``source``, joined by NUL.
    ``variables``: names that the template reads. ``takes_tools``: whether ``tools`` is among them.

    The constructor and ``render`` raise ``CheckpointError`` too if the template takes too much time or
    memory, and ``TemplatesUnavailable`` if the process does not run.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], process: TemplateProcess = TEMPLATES
    ) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._process = process
        facts = _read(source, process)
        self.literals, self.variables = facts.literals, facts.variables
        self.takes_tools = "tools" in self.variables

    def render(
        self,
        messages: list[TemplateValue],
        tools: list[TemplateValue] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the prompt; with ``add_generation_prompt`` also the header of the model's turn.

        ``messages`` and ``tools``: as ``ControlTokens.mark`` returns them. ``variables``: further variables
        of the template (``enable_thinking``), which replace special tokens of the same name.

        Raises ``InvalidRequest`` if the template refuses the messages by ``raise_exception``, or fails with a
        tool call whose arguments are not a JSON object, and ``CheckpointError`` if it fails in any other way.
        """
        try:
            return self._process.render(
                self._source,
                {
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                },
            )
        except TemplateRefusal as error:
            raise InvalidRequest(
                f"the checkpoint's chat template refuses these messages: {error}",
                "Most templates take an optional system message first, then user and assistant in turn.",
                param="messages",
            ) from error
        except TemplateFailure as error:
            if (field := _arguments_without_object(messages)) is not None:
                raise InvalidRequest(
                    f"{field} is not a JSON object, which the checkpoint's chat template needs",
                    "Send the arguments whole; leave out a call that was cut off, and its result.",
                    param=field,
                ) from error
            raise failed(str(error)) from error


def _arguments_without_object(messages: list[TemplateValue]) -> str | None:
    """The first tool call in ``messages`` whose arguments are not a JSON object, as a path; None: all are."""
    for number, message in enumerate(messages):
        for index, call in enumerate(message.get("tool_calls") or ()):
            if not isinstance(call["function"]["arguments"], dict):
                return f"messages[{number}].tool_calls[{index}].function.arguments"
    return None


def read_template_variables(
    variables: str | None, first_control_token: Callable[[str], str | None]
) -> dict[str, Any]:
    """Parse ``SamplingParams.template_variables``; {} for None.

    ``first_control_token``: the first name of a control token in a text, None if it has none. Raises
    ``InvalidRequest`` if a string among the variables has one: the template would write it into the prompt.
    """
    if variables is None:
        return {}
    values: dict[str, Any] = json.loads(variables)
    forged = first_control_token(json.dumps(values, ensure_ascii=False))
    if forged is not None:
        raise InvalidRequest(
            f"chat_template_kwargs contains {forged!r}, a control token of the model",
            "Leave it out: only the chat template writes control tokens.",
            param="chat_template_kwargs",
        )
    return values


@lru_cache(maxsize=8)  # models of a family share one, and a check of a model opens it several times
def _read(source: str, process: TemplateProcess) -> TemplateFacts:
    return process.read(source)
