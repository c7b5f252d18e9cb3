"""Pydantic models of Anthropic's Messages API, and which of its fields have an effect.

``FIELDS`` is the table of docs/anthropic.md. Fields that neither Anthropic nor vlfit knows are ignored, and
listed in the response (``vlfit.ignored``), as for OpenAI's API.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag

from vlfit.server.chat.chat_schema import MAX_IGNORED_SHOWN, MAX_PARTS, MAX_TOOLS, FailOnFirst, StrictModel
from vlfit.server.chat.foreign_fields import Effect

# Without effect on the answer, so that they are not listed as ignored.
_BOOKKEEPING = frozenset(
    {
        *("cache_control", "metadata", "service_tier", "inference_geo", "user_profile_id", "workspace_id"),
        *("diagnostics", "betas", "billing_policy", "caller"),
    }
)


def _one_or_list(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str


class InlineSource(StrictModel):
    """A file in the request. ``data``: base64, without the head of a data: URL."""

    type: Literal["base64"]
    media_type: str = ""
    data: str


class URLSource(StrictModel):
    type: Literal["url"]
    url: str


class FileSource(StrictModel):
    """An uploaded file; always refused."""

    type: Literal["file"]
    file_id: str = ""


class TextSource(StrictModel):
    """A document as plain text."""

    type: Literal["text"]
    media_type: str = "text/plain"
    data: str


class ImageTransformations(StrictModel):
    """What to do with large pictures. They are always scaled down, and the response's ``vlfit.images`` says
    so; ``oversized_image`` ``error`` is refused.
    """

    oversized_image: str | None = None


class ImageBlock(StrictModel):
    type: Literal["image"]
    source: Annotated[InlineSource | URLSource | FileSource, Field(discriminator="type")]
    transformations: ImageTransformations | None = None


TextOrImage = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ContentSource(StrictModel):
    """A document as blocks of text and pictures."""

    type: Literal["content"]
    content: Annotated[
        Union[  # noqa: UP007
            Annotated[str, Tag("text")],
            Annotated[list[TextOrImage], Tag("parts"), Field(max_length=MAX_PARTS), FailOnFirst()],
        ],
        Discriminator(_one_or_list),
    ]


class Citations(StrictModel):
    enabled: bool | None = None


class DocumentBlock(StrictModel):
    """A PDF document (base64 or URL), or text. ``title`` and ``context`` come before it."""

    type: Literal["document"]
    source: Annotated[
        InlineSource | URLSource | FileSource | TextSource | ContentSource, Field(discriminator="type")
    ]
    title: str | None = Field(default=None, max_length=300)
    context: str | None = None
    citations: Citations | None = None


class ToolUseBlock(StrictModel):
    """A call by the model, as a response has it."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=200)
    name: str = Field(min_length=1, max_length=200)
    input: dict[str, Any]


ResultPart = Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]


class ToolResultBlock(StrictModel):
    """What a tool returned: text, pictures, documents."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[
            Union[  # noqa: UP007
                Annotated[str, Tag("text")],
                Annotated[list[ResultPart], Tag("parts"), Field(max_length=MAX_PARTS), FailOnFirst()],
            ],
            Discriminator(_one_or_list),
        ]
        | None
    ) = None
    is_error: bool | None = None


class ThinkingBlock(StrictModel):
    """Reasoning of an earlier response. ``signature`` is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(StrictModel):
    """Reasoning that only its author can read; left out."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(StrictModel):
    """One message of a conversation. ``content``: a string or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Union[  # noqa: UP007
            Annotated[str, Tag("text")],
            Annotated[list[Block], Tag("parts"), Field(max_length=MAX_PARTS), FailOnFirst()],
        ],
        Discriminator(_one_or_list),
    ]


class AnthropicTool(StrictModel):
    """A tool of the client's. Those that Anthropic defines (``type`` other than ``custom``) are refused."""

    name: str = Field(min_length=1, max_length=200)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(StrictModel):
    """Whether a tool must be called. ``any``: some tool must be called; ``tool``: the one called ``name``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(StrictModel):
    """Whether the reasoning is part of the response, for models that reason."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictModel):
    """JSON of the given schema, enforced in full or refused."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    format: OutputFormat | None = None
    effort: str | None = None


class CountTokensRequest(StrictModel):
    """``POST /v1/messages/count_tokens``."""

    model: str = Field(min_length=1)
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_PARTS - 1), FailOnFirst()]
    system: (
        Annotated[
            Union[  # noqa: UP007
                Annotated[str, Tag("text")],
                Annotated[list[TextBlock], Tag("parts"), Field(max_length=MAX_PARTS), FailOnFirst()],
            ],
            Discriminator(_one_or_list),
        ]
        | None
    ) = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS), FailOnFirst()] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    container: Any = None
    mcp_servers: Any = None
    compaction: Any = None
    thread: Any = None


class MessagesRequest(CountTokensRequest):
    """``POST /v1/messages``. ``max_tokens`` beyond the context means as many as the prompt leaves."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_PARTS), FailOnFirst()] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def ignored_fields(params: CountTokensRequest, *, thinks: bool, can_switch: bool = False) -> tuple[str, ...]:
    """Names of fields that were sent but have no effect, at most ``MAX_IGNORED_SHOWN``.

    ``thinks``: whether the model reasons; ``can_switch``: whether its template switches that off. Bookkeeping
    such as ``cache_control`` is not listed.
    """
    ignored = _ignored(params, thinks=thinks, can_switch=can_switch)
    return tuple(islice(ignored, MAX_IGNORED_SHOWN))


def _ignored(params: CountTokensRequest, *, thinks: bool, can_switch: bool) -> Iterator[str]:
    yield from _extras("", params)
    config, thinking = params.output_config, params.thinking
    if config is not None:
        yield from _extras("output_config.", config)
        if config.effort is not None:
            yield "output_config.effort"
    if thinking is not None:
        if thinks == (thinking.type == "disabled") and not can_switch:
            yield "thinking"  # it can be switched neither on nor off
        elif thinks and thinking.budget_tokens is not None:
            yield "thinking.budget_tokens"
    for index, tool in enumerate(params.tools or ()):
        yield from _extras(f"tools[{index}].", tool)
    for index, message in enumerate(params.messages):
        yield from _extras(f"messages[{index}].", message)
        if isinstance(message.content, str):
            continue
        for position, block in enumerate(message.content):
            where = f"messages[{index}].content[{position}]"
            yield from _extras(f"{where}.", block)
            if isinstance(block, ToolResultBlock) and block.is_error:
                yield f"{where}.is_error"
            elif isinstance(block, RedactedThinkingBlock) or (
                isinstance(block, ThinkingBlock) and not thinks
            ):
                yield where


def _extras(prefix: str, value: StrictModel) -> Iterator[str]:
    for name, sent in (value.model_extra or {}).items():
        if name not in _BOOKKEEPING and sent is not None:
            yield f"{prefix}{name}"


_CACHE: tuple[Effect, str] = ("ignored", "the prefix cache finds equal beginnings by itself")
_TYPE: tuple[Effect, str] = ("honoured", "")
_SERVICE: tuple[Effect, str] = ("ignored", "bookkeeping of Anthropic's service")
_NO_TOOLS: tuple[Effect, str] = ("refused", "vlfit runs no tools: the client does")
_STATE: tuple[Effect, str] = ("refused", "the server keeps nothing between requests")
_ALL_TOOLS: tuple[Effect, str] = (
    "ignored",
    "the model sees every tool that is sent, and the client calls it",
)

_PROMPT: dict[str, tuple[Effect, str]] = {
    "model": ("honoured", "a name of the served model; any other, such as `claude-...`, gets 404"),
    "messages": ("honoured", "a final assistant message (a prefill) is refused"),
    "system": ("honoured", "text, or blocks of text, which are joined by a blank line"),
    "tools": ("honoured", "see below"),
    "tool_choice": ("honoured", "enforced"),
    "thinking": (
        "honoured",
        "switches thinking on and off where the chat template can; missing: as the template has it. Thoughts"
        " are shown unless it is `disabled`, missing, or `display` is `omitted`; listed in `vlfit.ignored`"
        " for models that do not think, and where it is `disabled` but cannot be switched off",
    ),
    "output_config": ("honoured", "see below"),
    "cache_control": _CACHE,
    "speed": ("ignored", "there is one speed"),
    "user_profile_id": _SERVICE,
    "workspace_id": _SERVICE,
    "betas": ("ignored", "the header `anthropic-beta` as well"),
    "billing_policy": _SERVICE,
    "mcp_servers": _NO_TOOLS,
    "compaction": _STATE,
    "context_management": ("ignored", "nothing is taken out of a prompt: what does not fit is refused"),
}

# Every field of Anthropic's types for these requests, with what vlfit does with it.
FIELDS: dict[str, dict[str, tuple[Effect, str]]] = {
    "/v1/messages": {
        **_PROMPT,
        "max_tokens": (
            "honoured",
            "at least 1; beyond the context it means as many as the prompt leaves, and the answer then ends"
            " with `model_context_window_exceeded`",
        ),
        "stream": ("honoured", ""),
        "stop_sequences": ("honoured", "at most 16"),
        "temperature": ("honoured", "0 to 2; the checkpoint's own by default"),
        "top_p": ("honoured", ""),
        "top_k": ("honoured", ""),
        "container": _NO_TOOLS,
        "diagnostics": _SERVICE,
        "inference_geo": _SERVICE,
        "metadata": _SERVICE,
        "service_tier": _SERVICE,
        "fallbacks": ("ignored", "an unknown model is 404"),
        "fallback_credit_token": _SERVICE,
        "thread": _STATE,
    },
    "/v1/messages/count_tokens": _PROMPT,
    "messages": {
        "role": ("honoured", "`user`, `assistant`, `system`"),
        "content": ("honoured", "a string, or blocks of the types below; others are refused"),
    },
    "text": {
        "type": _TYPE,
        "text": ("honoured", ""),
        "citations": ("ignored", ""),
        "cache_control": _CACHE,
    },
    "image": {
        "type": _TYPE,
        "source": ("honoured", "`base64` and `url`; `file` is refused"),
        "transformations": (
            "honoured",
            "pictures are scaled down, and `vlfit.images` says so; `error` is refused",
        ),
        "cache_control": _CACHE,
    },
    "document": {
        "type": _TYPE,
        "source": (
            "honoured",
            "`base64` and `url`: PDF, on a server that takes it (`--image-formats default,pdf`); `text`,"
            " `content`; `file` is refused",
        ),
        "title": ("honoured", "the name of a PDF; the first line of a text"),
        "context": ("honoured", "text before the document"),
        "citations": ("refused", "unless `enabled` is false"),
        "cache_control": _CACHE,
    },
    "tool_use": {
        "type": _TYPE,
        "id": ("honoured", ""),
        "name": ("honoured", ""),
        "input": ("honoured", ""),
        "caller": ("ignored", ""),
        "toolset_name": ("ignored", ""),
        "cache_control": _CACHE,
    },
    "tool_result": {
        "type": _TYPE,
        "tool_use_id": ("honoured", "of a `tool_use` block before"),
        "content": ("honoured", "text, pictures, documents"),
        "is_error": ("ignored", "chat templates have no place for it: say it in the content"),
        "toolset_name": ("ignored", ""),
        "cache_control": _CACHE,
    },
    "thinking": {
        "type": _TYPE,
        "thinking": ("honoured", "of models that think; their template keeps or drops it. Else ignored"),
        "signature": ("ignored", "not checked"),
    },
    "redacted_thinking": {"type": _TYPE, "data": ("ignored", "left out")},
    "tools": {
        "name": ("honoured", ""),
        "type": ("honoured", "none or `custom`; tools that Anthropic defines or runs are refused"),
        "description": ("honoured", ""),
        "input_schema": ("honoured", "enforced with `strict` or a `tool_choice` that forces a call"),
        "strict": ("honoured", ""),
        "allowed_callers": _ALL_TOOLS,
        "defer_loading": _ALL_TOOLS,
        "eager_input_streaming": ("ignored", "the input of a call arrives whole"),
        "input_examples": ("ignored", "put them into the description"),
        "cache_control": _CACHE,
    },
    "tool_choice": {
        "type": ("honoured", "`auto`, `any`, `tool`, `none`"),
        "name": ("honoured", ""),
        "disable_parallel_tool_use": ("honoured", ""),
    },
    "thinking config": {
        "type": ("honoured", "`enabled`, `adaptive`, `between_tools`, `disabled`"),
        "budget_tokens": ("ignored", "thoughts count towards `max_tokens`"),
        "display": ("honoured", "`omitted`: no thoughts; `summarized`: all of them"),
    },
    "output_config": {
        "format": ("honoured", "`json_schema`: enforced in full, or refused"),
        "effort": ("ignored", ""),
    },
}
