"""From the fields of a request to what the engine is asked for: how words are chosen, in which form, with
which tools.

Knows: OpenAI's names and their meaning. Does not know: messages (``conversation.py``), HTTP, the engine.
"""

import json
import re
from dataclasses import replace
from typing import Any

from vlfit.api.conversation import Tool
from vlfit.api.sampling_params import Form, SamplingParams
from vlfit.api.schema_limits import check_schema
from vlfit.errors import InvalidRequest
from vlfit.prompt.tool_calls import calls_form
from vlfit.server.openai.chat_schema import (
    AllowedChoice,
    ChatRequest,
    FunctionTool,
    ResponseFormat,
    SamplingWishes,
    ToolChoice,
)
from vlfit.server.openai.validation import renamed
from vlfit.tasks.boxes import fenced_json

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def words_of(wishes: SamplingWishes, default: SamplingParams) -> SamplingParams:
    """How words are chosen, over the checkpoint's own settings. Raises ``InvalidRequest``."""
    stop = [wishes.stop] if isinstance(wishes.stop, str) else wishes.stop
    asked: dict[str, Any] = {
        "temperature": wishes.temperature,
        "top_p": wishes.top_p,
        "top_k": 0 if wishes.top_k == -1 else wishes.top_k,  # vLLM writes "off" as -1
        "min_p": wishes.min_p,
        "presence_penalty": wishes.presence_penalty,
        "frequency_penalty": wishes.frequency_penalty,
        "repetition_penalty": wishes.repetition_penalty,
        "seed": wishes.seed,
        "stop": None if stop is None else tuple(stop),
        "stop_token_ids": None if wishes.stop_token_ids is None else tuple(wishes.stop_token_ids),
        "ignore_eos": wishes.ignore_eos,
        "loop_guard": wishes.loop_guard,
    }
    return replace(default, **{name: value for name, value in asked.items() if value is not None})


def sampling_of(wishes: ChatRequest, default: SamplingParams) -> SamplingParams:
    """All that a chat asks for but its messages. Raises ``InvalidRequest``."""
    if wishes.top_logprobs is not None and not wishes.logprobs:
        raise InvalidRequest(
            "top_logprobs is set without logprobs", "set logprobs to true", param="top_logprobs"
        )
    max_tokens = wishes.max_tokens if wishes.max_completion_tokens is None else wishes.max_completion_tokens
    if wishes.max_tokens not in (None, max_tokens):
        raise InvalidRequest(
            f"max_tokens is {wishes.max_tokens} and max_completion_tokens is {max_tokens}",
            "they are two names of one limit: send one of them",
            param="max_tokens",
        )
    form = form_of(wishes)
    if form is not None and wishes.ignore_eos:
        raise InvalidRequest(
            "ignore_eos is set, and the answer is to have a form, which ends",
            "leave one out",
            param="ignore_eos",
        )
    words = words_of(wishes, default)
    with renamed({} if wishes.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}):
        return replace(
            words,
            max_tokens=max_tokens if max_tokens is not None else default.max_tokens,
            top_logprobs=(wishes.top_logprobs or 0) if wishes.logprobs else None,
            form=form,
        )


def tools_of(wishes: ChatRequest) -> tuple[Tool, ...]:
    """The tools that the model is told of: none where it may not call any.

    Raises ``InvalidRequest`` for names that occur twice, and for a choice of what there is not.
    """
    tools = tuple(_tool(each) for each in wishes.tools or ())
    names = [tool.name for tool in tools]
    for number, tool in enumerate(tools):
        where = f"tools[{number}].function.name"
        if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,200}", tool.name):
            raise InvalidRequest(
                f"{where} is {tool.name[:80]!r}", "use letters, digits, underscores and dashes", param=where
            )
        if tool.name in names[:number]:
            raise InvalidRequest(f"{where} is {tool.name!r} for the second time", param=where)
    choice = wishes.tool_choice
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice asks for a call, and there are no tools", param="tool_choice")
    chosen = _chosen(choice)
    for name in chosen:
        if name not in names:
            raise InvalidRequest(
                f"tool_choice asks for {name[:80]!r}, which is not among the tools",
                f"the tools are: {', '.join(names)[:200] or 'none'}",
                param="tool_choice",
            )
    if isinstance(choice, AllowedChoice):
        return tuple(tool for tool in tools if tool.name in chosen)
    return () if choice == "none" else tools


def _chosen(choice: str | ToolChoice | AllowedChoice | None) -> tuple[str, ...]:
    """The tools that a choice names."""
    if isinstance(choice, AllowedChoice):
        return tuple(each.function.name for each in choice.allowed_tools.tools)
    return (choice.function.name,) if isinstance(choice, ToolChoice) else ()


def forced_tool(wishes: ChatRequest) -> str | None:
    """The function that the answer is a call of, if only one can be."""
    return wishes.tool_choice.function.name if isinstance(wishes.tool_choice, ToolChoice) else None


def form_of(wishes: ChatRequest) -> Form | None:
    """The form that the answer must have, of its JSON and of its calls; None: any."""
    form = _form_of(wishes)
    if form is None or form.kind == "json":
        return form
    names = {"tool_choice", "parallel_tool_calls", "response_format"}
    return replace(form, wire=wishes.model_dump(include=names, exclude_none=True, by_alias=True))


def _form_of(wishes: ChatRequest) -> Form | None:
    tools, choice = tools_of(wishes), wishes.tool_choice
    wish = wishes.response_format
    schema = _schema_of(wish)
    parallel = wishes.parallel_tool_calls is not False
    if isinstance(choice, ToolChoice):
        called = tuple(tool for tool in tools if tool.name == choice.function.name)
        return calls_form(called, parallel=False, required=True)
    if isinstance(choice, AllowedChoice):
        choice = choice.allowed_tools.mode
    if tools and choice == "required":
        return calls_form(tools, parallel=parallel, required=True)
    if tools and (schema is not None or not parallel or any(tool.strict for tool in tools)):
        return calls_form(tools, parallel=parallel, required=False, otherwise=schema)
    if schema is None:
        return None
    if wish is not None and wish.json_schema is not None and wish.json_schema.fenced:
        check_schema(schema, "response_format")
        return replace(fenced_json(schema), place="response_format")
    return Form("json", json.dumps(schema), "response_format")


def _schema_of(wish: ResponseFormat | None) -> dict[str, Any] | None:
    if wish is None or wish.type == "text":
        return None
    if wish.type == "json_object":
        return _ANY_OBJECT
    if wish.json_schema is None:
        raise InvalidRequest(
            "response_format.json_schema is missing",
            'send {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
            param="response_format.json_schema",
        )
    return _ANY_OBJECT if wish.json_schema.json_schema is None else wish.json_schema.json_schema


def _tool(tool: FunctionTool) -> Tool:
    function = tool.function
    return Tool(function.name, function.description or "", function.parameters or {}, bool(function.strict))
