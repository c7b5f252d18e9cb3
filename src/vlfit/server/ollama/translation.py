"""From Ollama's requests to chat requests, and the names of fields in errors back again."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from vlfit.errors import DoesNotFit, InvalidRequest, VlfitError
from vlfit.server.chat.chat_schema import (
    MAX_IGNORED_SHOWN,
    CalledFunction,
    CalledTool,
    ChatMessage,
    ChatRequest,
    Function,
    FunctionTool,
    ImageContent,
    ImageURL,
    NamedSchema,
    ResponseFormat,
    TextContent,
)
from vlfit.server.chat.inline_files import bare_file_url
from vlfit.server.chat.validation import rename_params_in_errors
from vlfit.server.ollama.ollama_schema import (
    GenerationFields,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
)

# From the fields of a chat request to Ollama's, for errors.
_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    **{
        name: f"options.{name}"
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
            *("presence_penalty", "frequency_penalty"),
        )
    },
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (0, 1),
    "tfs_z": (0, 1),
    "mirostat": (0,),
    "vocab_only": (False,),
    "embedding_only": (False,),
}
_PICTURE = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]\.image_url")
_PLACE = "[img]"  # of a picture in a text
_SCHEMAS = ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties")
_MAPS_OF_SCHEMAS = ("properties", "$defs", "definitions")
_THINK_LEVELS = ("low", "medium", "high")
_NO_LIMIT = (0, -1, -2)  # num_predict: none, for ever, until the context is full


@contextmanager
def ollama_names_in_errors(*, is_chat: bool, chat: ChatRequest | None = None) -> Iterator[None]:
    """Make errors raised in the block name Ollama's fields instead of those of a chat request.

    ``is_chat``: those of ``/api/chat``; False: of ``/api/generate``. ``chat``: what ``to_chat_request`` made,
    where pictures may stand between texts; None: pictures come first.
    """
    try:
        with rename_params_in_errors(_NAMES):
            yield
    except VlfitError as error:
        picture = _PICTURE.match(error.param or "")
        if picture is not None:
            owner = f"messages[{picture[1]}]." if is_chat else ""
            number = _image_number(chat, int(picture[1]), int(picture[2]))
            error.param = f"{owner}images[{number}]"
        raise


def _image_number(chat: ChatRequest | None, message: int, position: int) -> int:
    """Which of a message's ``images`` stands at ``position`` in its content, as ``_content`` orders them."""
    content = chat.messages[message].content if chat is not None and message < len(chat.messages) else None
    if not isinstance(content, list):
        return position
    is_image = [isinstance(part, ImageContent) for part in content]
    leading = is_image.index(False) if False in is_image else len(is_image)
    placed = sum(is_image) - leading
    return placed + position if position < leading else sum(is_image[:position]) - leading


def check_fields(params: GenerationFields, *, context: int | None, thinks: bool, model: str) -> None:
    """Refuse fields that would change the answer and that vlfit or the model does not support.

    ``context``: most tokens of a request; None: unknown, not checked. ``thinks``: whether the model reasons.
    Raises ``DoesNotFit`` for a larger ``num_ctx``, ``InvalidRequest`` for other fields.
    """
    options = params.options or Options()
    for name, neutral in _NEUTRAL.items():
        value = getattr(options, name)
        if value is not None and value not in neutral:
            raise InvalidRequest(
                f"options.{name} is {value!r}, which vlfit does not support",
                f"Leave {name} out.",
                param=f"options.{name}",
            )
    check_num_ctx(options, context=context)
    think = params.think
    if think is not None and not isinstance(think, bool) and think not in _THINK_LEVELS:
        raise InvalidRequest(
            f"think is {str(think)[:60]!r}", f"Use true, false, {', '.join(_THINK_LEVELS)}.", param="think"
        )
    if think and not thinks:
        raise InvalidRequest(f"{model!r} does not support thinking", "Leave think out.", param="think")
    if isinstance(params, OllamaGenerateRequest):
        _check_generate(params)


def check_num_ctx(options: Options | None, *, context: int | None) -> None:
    """Raise ``DoesNotFit`` if ``num_ctx`` is larger than ``context``, the server's; None: unknown."""
    num_ctx = options.num_ctx if options is not None else None
    if num_ctx is not None and context is not None and num_ctx > context:
        raise DoesNotFit(
            f"options.num_ctx is {num_ctx}, and this server's context has {context} tokens",
            f"Send at most {context} or leave num_ctx out; vlfit serve --context {num_ctx} plans for more.",
            param="options.num_ctx",
        )


def _check_generate(params: OllamaGenerateRequest) -> None:
    hints = {
        "suffix": "Leave suffix out.",
        "template": "Leave template out; raw sends a whole prompt.",
        "context": "Send the conversation to /api/chat: what it begins with is computed once.",
        "width": "vlfit draws no pictures.",
        "height": "vlfit draws no pictures.",
        "steps": "vlfit draws no pictures.",
    }
    for name, hint in hints.items():
        if getattr(params, name) not in (None, "", [], 0):
            raise InvalidRequest(f"vlfit does not support {name}", hint, param=name)
    if params.raw:
        for name in ("images", "system", "format"):
            if getattr(params, name):
                raise InvalidRequest(
                    f"{name} cannot be combined with raw", f"Leave {name} or raw out.", param=name
                )


def ignored_fields(
    params: GenerationFields,
    *,
    context: int | None,
    can_sleep: bool,
    can_skip_thinking: bool = False,
    keeps_thoughts: bool = False,
) -> tuple[str, ...]:
    """Names of fields that were sent but have no effect; those beyond ``MAX_IGNORED_SHOWN`` are dropped.

    ``context``: the server's; an ``options.num_ctx`` of the same number is not listed. ``can_sleep``: whether
    ``keep_alive`` has an effect. ``can_skip_thinking``: whether ``think: false`` has one;
    ``keeps_thoughts``: whether the template reads those of earlier answers.
    """
    options = params.options or Options()

    def names() -> Iterator[str]:
        yield from params.model_extra or ()
        yield from (
            f"options.{name}" for name, value in (options.model_extra or {}).items() if value is not None
        )
        if options.num_ctx is not None and options.num_ctx != context:
            yield "options.num_ctx"
        if params.keep_alive is not None and not can_sleep:
            yield "keep_alive"
        if (params.think is False and not can_skip_thinking) or params.think in _THINK_LEVELS:
            yield "think"
        if isinstance(params, OllamaChatRequest):
            for index, message in enumerate(params.messages or ()):
                if message.thinking and not keeps_thoughts:
                    yield f"messages[{index}].thinking"
                yield from (f"messages[{index}].{name}" for name in message.model_extra or ())

    return tuple(islice(names(), MAX_IGNORED_SHOWN))


def image_urls(params: GenerationFields) -> Iterator[tuple[str, str]]:
    """Yield the field's path and a data: URL of every picture, in order.

    Raises ``InvalidRequest`` for pictures sent as ``https:`` and other URLs.
    """
    if isinstance(params, OllamaGenerateRequest):
        yield from _data_urls("images", params.images)
    elif isinstance(params, OllamaChatRequest):
        for index, message in enumerate(params.messages or ()):
            yield from _data_urls(f"messages[{index}].images", message.images)


def _data_urls(param: str, images: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    for index, image in enumerate(images or ()):
        if "://" in image[:16]:
            raise InvalidRequest(
                f"{param}[{index}] is a URL",
                "Send the picture itself in base64; /v1/chat/completions takes URLs.",
                param=f"{param}[{index}]",
            )
        yield f"{param}[{index}]", bare_file_url(image)


def to_chat_request(params: OllamaChatRequest | OllamaGenerateRequest) -> ChatRequest:
    """The equivalent chat request; ``prompt`` becomes a user message after ``system``.

    Fields that ``check_fields`` refuses are not looked at. Raises ``InvalidRequest`` for a wrong ``format``
    and for pictures that are sent as URLs.
    """
    options = params.options or Options()
    if isinstance(params, OllamaChatRequest):
        messages = _messages(params.messages or [])
        tools = [
            FunctionTool(
                type="function",
                function=Function(
                    name=tool.function.name,
                    description=tool.function.description,
                    parameters=tool.function.parameters,
                ),
            )
            for tool in params.tools or ()
        ]
    else:
        messages = [ChatMessage(role="system", content=params.system)] if params.system else []
        messages.append(ChatMessage(role="user", content=_content(params.prompt, params.images, "images")))
        tools = []
    return ChatRequest(
        model=params.model,
        messages=messages,
        tools=tools or None,
        response_format=_response_format(params.format),
        # Which templates of models that can skip their reasoning read.
        chat_template_kwargs=None if params.think is None else {"enable_thinking": params.think is not False},
        max_tokens=None if options.num_predict in _NO_LIMIT else options.num_predict,
        logprobs=params.logprobs,
        top_logprobs=params.top_logprobs or None,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=None if options.seed == -1 else options.seed,  # any, as in llama.cpp
        stop=options.stop or None,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )


def _response_format(value: Any) -> ResponseFormat | None:
    if value in (None, ""):
        return None
    if value == "json":
        return ResponseFormat(type="json_object")
    if isinstance(value, dict):
        schema = without_surplus(value)
        return ResponseFormat(type="json_schema", json_schema=NamedSchema(name="format", schema=schema))
    raise InvalidRequest(f"format is {str(value)[:60]!r}", 'Use "json" or a JSON schema.', param="format")


def without_surplus(schema: Any) -> Any:
    """A copy of ``schema`` with ``additionalProperties: false`` added to objects that list ``properties``.

    Ollama reads schemas so; by JSON Schema the model could add other properties. Objects that say
    ``additionalProperties`` themselves keep theirs. Objects composed of several schemas (``allOf``, ``$ref``,
    ...) stay open: each schema would forbid what the others list. ``schema``: any part of a schema, too.
    """
    if isinstance(schema, list):
        return [without_surplus(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for name in _SCHEMAS:
        if name in closed:
            closed[name] = without_surplus(closed[name])
    for name in _MAPS_OF_SCHEMAS:
        if isinstance(closed.get(name), dict):
            closed[name] = {key: without_surplus(each) for key, each in closed[name].items()}
    composed = any(name in schema for name in ("allOf", "anyOf", "oneOf", "$ref", "patternProperties"))
    if isinstance(schema.get("properties"), dict) and not composed:
        closed.setdefault("additionalProperties", False)
    return closed


def _content(text: str | None, images: Sequence[str] | None, param: str) -> str | list[Any]:
    """The text with pictures in place of ``[img]``, in order; those that have no such place come first.

    So Ollama does it. Frigate writes ``[img]`` after the caption of each frame.
    """
    if not images:
        return text or ""
    parts: list[Any] = [
        ImageContent(type="image_url", image_url=ImageURL(url=url)) for _, url in _data_urls(param, images)
    ]
    first, *others = (text or "").split(_PLACE, len(parts))
    ordered = parts[len(others) :]
    if first or others:  # also an empty one: it parts the pictures that come first from the others
        ordered.append(TextContent(type="text", text=first))
    for part, words in zip(parts, others, strict=False):
        ordered.append(part)
        if words:
            ordered.append(TextContent(type="text", text=words))
    return ordered


@dataclass(frozen=True, slots=True)
class _Call:
    """A tool call without a result yet. ``id_was_sent``: ``id`` is the client's; else it was made here."""

    id: str
    name: str
    id_was_sent: bool


def _messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The messages, with ids that pair calls and their results: many of Ollama's clients send none."""
    result = []
    unanswered: list[_Call] = []
    numbers = count()
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        calls = []
        for call in message.tool_calls or ():
            call_id = call.id or f"call_{next(numbers)}"
            unanswered.append(_Call(call_id, call.function.name, bool(call.id)))
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            calls.append(
                CalledTool(id=call_id, function=CalledFunction(name=call.function.name, arguments=arguments))
            )
        answered = None
        if message.role == "tool":
            answered = _take_call(unanswered, message)
        result.append(
            ChatMessage(
                role=message.role,
                content=_content(message.content, message.images, f"{param}.images"),
                tool_calls=calls or None,
                tool_call_id=answered,
                reasoning_content=message.thinking if message.role == "assistant" else None,
            )
        )
    return result


def _take_call(unanswered: list[_Call], result: OllamaMessage) -> str | None:
    """Remove and return the id of the call that ``result`` answers; its own id if there is none.

    That is the call of its ``tool_call_id``; else the earliest of its ``tool_name``, else the earliest.
    LiteLLM sends ids with results, but none with calls: an unknown id means one of those.
    """
    wanted, name = result.tool_call_id, result.tool_name
    with_id = [each for each in unanswered if each.id == wanted]
    others = [each for each in unanswered if wanted is None or not each.id_was_sent]
    named = [each for each in others if each.name == name]
    for each in (*with_id, *named, *others):
        unanswered.remove(each)
        return each.id
    return wanted
