"""Sampling parameters, output grammar and tools of a request, from its fields."""

import json
import re
from dataclasses import replace
from typing import Any

from vlfit.api.conversation import Tool
from vlfit.api.sampling_params import Grammar, SamplingParams
from vlfit.api.schema_limits import check_schema
from vlfit.backends.base import Backend, check_generates
from vlfit.errors import InvalidRequest
from vlfit.models.registry import ToolCallSyntax
from vlfit.prompt.reasoning import reasoning_then
from vlfit.prompt.tool_calls import ToolCallParser, tool_call_grammar
from vlfit.server.chat.chat_schema import (
    AllowedToolsChoice,
    ChatRequest,
    FunctionTool,
    NamedToolChoice,
    ResponseFormat,
    SamplingFields,
)
from vlfit.server.chat.model_facts import thinking_of
from vlfit.server.chat.template_variables import template_variables
from vlfit.server.chat.validation import rename_params_in_errors
from vlfit.tasks.boxes import fenced_json_grammar

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def base_sampling_params(params: SamplingFields, default: SamplingParams) -> SamplingParams:
    """``default`` with the fields that ``params`` sets, except ``max_tokens``, logprobs and grammar.

    Those three are named differently in each API, so the caller sets them. Raises ``InvalidRequest`` for
    values out of range.
    """
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    values: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": 0 if params.top_k == -1 else params.top_k,  # vLLM writes "off" as -1
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "seed": params.seed,
        "stop": None if stop is None else tuple(stop),
        "stop_token_ids": None if params.stop_token_ids is None else tuple(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "loop_guard": params.loop_guard,
    }
    return replace(default, **{name: value for name, value in values.items() if value is not None})


def chat_sampling_params(params: ChatRequest, backend: Backend) -> SamplingParams:
    """All sampling parameters of a chat request, over the defaults of ``backend``'s checkpoint.

    The output grammar is included. Raises ``InvalidRequest`` for invalid values and combinations, and for a
    model that writes no text: before it is loaded, and another one put to sleep for it.
    """
    check_generates(backend)
    default = backend.default_sampling()
    if params.top_logprobs is not None and not params.logprobs:
        raise InvalidRequest(
            "top_logprobs is set without logprobs", "Set logprobs to true.", param="top_logprobs"
        )
    max_tokens = params.max_tokens if params.max_completion_tokens is None else params.max_completion_tokens
    if params.max_tokens not in (None, max_tokens):
        raise InvalidRequest(
            f"max_tokens is {params.max_tokens} and max_completion_tokens is {max_tokens}",
            "They are two names of one limit: send only one.",
            param="max_tokens",
        )
    form = output_grammar(params, backend.tool_calls)
    if form is not None and params.ignore_eos:
        raise InvalidRequest(
            "ignore_eos cannot be combined with response_format or tool_choice, whose output must end",
            "Leave ignore_eos out.",
            param="ignore_eos",
        )
    variables = template_variables(params, backend)
    if form is not None:
        form = reasoning_then(form, thinking_of(backend, variables))
    sampling = base_sampling_params(params, default)
    with rename_params_in_errors(
        {} if params.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    ):
        return replace(
            sampling,
            max_tokens=max_tokens if max_tokens is not None else default.max_tokens,
            top_logprobs=(params.top_logprobs or 0) if params.logprobs else None,
            grammar=form,
            template_variables=variables,
        )


def offered_tools(params: ChatRequest) -> tuple[Tool, ...]:
    """The tools shown to the model: all of the request's, unless ``tool_choice`` limits them.

    None for ``tool_choice`` ``none``, the listed ones for ``allowed_tools``. Raises ``InvalidRequest`` for
    invalid or duplicate names, and for a ``tool_choice`` that is not among the tools.
    """
    tools = tuple(_tool(each) for each in params.tools or ())
    names = [tool.name for tool in tools]
    for number, tool in enumerate(tools):
        where = f"tools[{number}].function.name"
        if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,200}", tool.name):
            raise InvalidRequest(
                f"{where} is {tool.name[:80]!r}", "Use letters, digits, underscores and dashes.", param=where
            )
        if tool.name in names[:number]:
            raise InvalidRequest(
                f"{where} is {tool.name!r}, a duplicate", "Give each tool its own name.", param=where
            )
    choice = params.tool_choice
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice is required, but the request has no tools", param="tool_choice")
    names_chosen = _chosen_names(choice)
    for name in names_chosen:
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names {name[:80]!r}, which is not among the tools",
                f"The tools are: {', '.join(names)[:200] or 'none'}.",
                param="tool_choice",
            )
    if isinstance(choice, AllowedToolsChoice):
        return tuple(tool for tool in tools if tool.name in names_chosen)
    return () if choice == "none" else tools


def _chosen_names(choice: str | NamedToolChoice | AllowedToolsChoice | None) -> tuple[str, ...]:
    """Names of the tools in a tool choice."""
    if isinstance(choice, AllowedToolsChoice):
        return tuple(each.function.name for each in choice.allowed_tools.tools)
    return (choice.function.name,) if isinstance(choice, NamedToolChoice) else ()


def forced_tool(params: ChatRequest) -> str | None:
    """The function that ``tool_choice`` names; None if it names none, also if it is ``required``."""
    return params.tool_choice.function.name if isinstance(params.tool_choice, NamedToolChoice) else None


def tool_call_reader(params: ChatRequest, backend: Backend) -> ToolCallParser | None:
    """A new parser of the tool calls in the output; None if the request offers no tools.

    Raises ``InvalidRequest`` as ``offered_tools`` does.
    """
    schemas = {tool.name: tool.parameters for tool in offered_tools(params)}
    if not schemas:
        return None
    return ToolCallParser(frozenset(schemas), backend.tool_calls, forced_tool(params), schemas)


def output_grammar(params: ChatRequest, syntax: ToolCallSyntax) -> Grammar | None:
    """The grammar of JSON or tool calls that the output must follow; None: free text.

    ``syntax``: how the model writes tool calls. A grammar of another kind than ``json`` also keeps the
    request's fields in its ``wire``, for a remote server that takes no grammars. Raises ``InvalidRequest``
    for a schema or tools that are refused.
    """
    form = _output_form(params, syntax)
    if form is None or form.kind == "json":
        return form
    names = {"tool_choice", "parallel_tool_calls", "response_format"}
    return replace(form, wire=params.model_dump(include=names, exclude_none=True, by_alias=True))


def _output_form(params: ChatRequest, syntax: ToolCallSyntax) -> Grammar | None:
    tools, choice = offered_tools(params), params.tool_choice
    response_format = params.response_format
    schema = _response_schema(response_format)
    parallel = params.parallel_tool_calls is not False
    if isinstance(choice, NamedToolChoice):
        forced = tuple(tool for tool in tools if tool.name == choice.function.name)
        return tool_call_grammar(forced, syntax, parallel=False, required=True)
    if isinstance(choice, AllowedToolsChoice):
        choice = choice.allowed_tools.mode
    if tools and choice == "required":
        return tool_call_grammar(tools, syntax, parallel=parallel, required=True)
    if tools and (schema is not None or not parallel or any(tool.strict for tool in tools)):
        return tool_call_grammar(tools, syntax, parallel=parallel, required=False, otherwise=schema)
    if schema is None:
        return None
    if (
        response_format is not None
        and response_format.json_schema is not None
        and response_format.json_schema.fenced
    ):
        check_schema(schema, "response_format")
        return replace(fenced_json_grammar(schema), place="response_format")
    return Grammar("json", json.dumps(schema), "response_format")


def _response_schema(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return _ANY_OBJECT
    if response_format.json_schema is None:
        raise InvalidRequest(
            "response_format.json_schema is missing",
            'Send {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.',
            param="response_format.json_schema",
        )
    return (
        _ANY_OBJECT
        if response_format.json_schema.json_schema is None
        else response_format.json_schema.json_schema
    )


def _tool(tool: FunctionTool) -> Tool:
    function = tool.function
    return Tool(function.name, function.description or "", function.parameters or {}, bool(function.strict))
