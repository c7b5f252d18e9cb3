"""Renders a checkpoint's chat template as transformers does.

A template is code by whoever made the checkpoint: it runs in Jinja's sandbox, bounded in steps and in length
(``bounded_templates.py``), and sees plain values only.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from vlfit.errors import CheckpointError, InvalidRequest
from vlfit.prompt.bounded_templates import BoundedEnvironment, compile_bounded, render_bounded

# Set by whoever renders a prompt, never by a request's ``template_variables``.
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# A message or a tool as templates take them: strings, lists and dicts.
TemplateValue = dict[str, Any]


class ChatTemplate:
    """A compiled chat template. The constructor raises ``CheckpointError`` for a syntax error in ``source``.

    ``source``: Jinja. ``special_tokens``: text of each special token by name (``eos_token``), as variables of
    the template. ``literals``: all literal text in ``source``, joined by NUL. ``variables``: names that the
    template reads. ``takes_tools``: whether ``tools`` is among them.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template, self.literals, self.variables = _compile(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template has an error in line {error.lineno}: {error.message}",
                "Fetch the checkpoint's chat_template.json (or .jinja) again.",
            ) from error
        except RecursionError:
            raise CheckpointError(
                "the chat template has more blocks within each other than can be read",
                "No model's is so: fetch the checkpoint from where its makers offer it.",
            ) from None
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
            return render_bounded(
                self._template,
                {
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                },
            )
        except _Refusal as error:
            raise InvalidRequest(
                f"the checkpoint's chat template refuses these messages: {error}",
                "Most templates take an optional system message first, then user and assistant in turn.",
                param="messages",
            ) from error
        except Exception as error:  # a template is code, and may fail in any way that code does
            if (field := _arguments_without_object(messages)) is not None:
                raise InvalidRequest(
                    f"{field} is not a JSON object, which the checkpoint's chat template needs",
                    "Send the arguments whole; leave out a call that was cut off, and its result.",
                    param=field,
                ) from error
            raise CheckpointError(
                f"the checkpoint's chat template fails: {type(error).__name__}: {error}",
                "Fetch the checkpoint's chat_template.json (or .jinja) again.",
            ) from error


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
def _compile(source: str) -> tuple[Template, str, frozenset[str]]:
    """The template, and its ``literals`` and ``variables``. Raises ``TemplateSyntaxError``."""
    environment = _environment()
    parsed = environment.parse(source)
    written = {node.data for node in parsed.find_all(nodes.TemplateData)}
    written |= {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)}
    variables = frozenset(meta.find_undeclared_variables(parsed) - environment.globals.keys())
    return compile_bounded(environment, parsed), "\0".join(written), variables


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        {"tojson": _to_json}, trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Refusal(TemplateError):
    """Raised by a template's ``raise_exception``."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks training targets; a prompt takes its content."""

    tags = {"generation"}  # noqa: RUF012  (how Jinja's base class has it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
