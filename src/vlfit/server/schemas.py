"""The body of a chat request as OpenAI defines it, checked field by field.

Knows: names, types and which fields vlfit carries out, refuses or ignores. Does not know: pictures, the
engine.

Three kinds of fields that are not carried out:

- those that would change the answer (``tools``, a JSON schema, ``logit_bias``, ...) are refused with 400;
- OpenAI's book-keeping fields (``user``, ``metadata``, ...) change nothing and are accepted;
- anything else is ignored, as vLLM does, but the response names it in ``vlfit.ignored``, so that a
  misspelt ``temprature`` does not go unnoticed.
"""

from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from vlfit.engine.conversation import Detail
from vlfit.errors import InvalidRequest

MAX_CHOICES = 16
BOOKKEEPING = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "verbosity",
    }
)


class _Strict(BaseModel):
    # Strict: "0.7" is no number and 1 is no truth value, as at OpenAI.
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class TextContent(_Strict):
    type: Literal["text"]
    text: str


class ImageURL(_Strict):
    """``url``: data:image/...;base64,..., https:// or http://. ``detail``: low for few tokens."""

    url: str
    detail: Detail = "auto"


class ImageContent(_Strict):
    type: Literal["image_url"]
    image_url: ImageURL


class VideoContent(_Strict):
    """vlfit's own extension: a clip as a list of picture URLs, ``fps`` of them to a second."""

    type: Literal["video"]
    frames: list[str] = Field(min_length=1)
    fps: float = Field(default=2.0, gt=0, le=1000)


ContentPart = Annotated[TextContent | ImageContent | VideoContent, Field(discriminator="type")]


def _kind_of_content(content: Any) -> str:
    return "parts" if isinstance(content, list) else "text"


class ChatMessage(_Strict):
    """``content`` is a string or a list of parts."""

    role: str
    content: Annotated[
        Union[Annotated[str, Tag("text")], Annotated[list[ContentPart], Tag("parts")]],  # noqa: UP007
        Discriminator(_kind_of_content),
    ]


class StreamOptions(_Strict):
    include_usage: bool = False


class ResponseFormat(_Strict):
    type: str


class ChatRequest(_Strict):
    """``POST /v1/chat/completions``. A field that is null or absent takes the checkpoint's own default."""

    model: str | None = None
    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[str | list[str] | None, Field(union_mode="left_to_right")] = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    loop_guard: bool | None = None

    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    logit_bias: dict[str, float] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None

    def refuse_unsupported(self) -> None:
        """Raises ``InvalidRequest`` for a field that would change the answer and that vlfit cannot carry
        out.
        """
        if self.response_format is not None and self.response_format.type != "text":
            raise InvalidRequest(
                f"response_format {self.response_format.type!r} is not there yet",
                "ask for JSON in the prompt, and leave response_format out or set it to text",
                param="response_format",
            )
        refused = {
            "tools": self.tools,
            "tool_choice": self.tool_choice not in (None, "none", "auto"),
            "functions": self.functions,
            "function_call": self.function_call not in (None, "none", "auto"),
            "logit_bias": self.logit_bias,
            "modalities": self.modalities not in (None, [], ["text"]),
            "audio": self.audio,
            "web_search_options": self.web_search_options is not None,
        }
        for name, wanted in refused.items():
            if wanted:
                raise InvalidRequest(f"vlfit does not support {name}", f"leave {name} out", param=name)

    def ignored(self) -> tuple[str, ...]:
        """The fields that were sent and have no effect, as a person would write them."""
        return tuple(name for name in self.model_extra or {} if name not in BOOKKEEPING)


def parse_chat_request(body: bytes) -> ChatRequest:
    """``body`` as a request. Raises ``InvalidRequest`` naming the first field that is wrong."""
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> InvalidRequest:
    """The first thing wrong, in one sentence; what was sent is quoted only if it is short."""
    first = error.errors(include_url=False, include_context=True)[0]
    kind, where, sent = first["type"], _path(first["loc"]), first.get("input")
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {first['msg']}", "send a JSON object")
    if kind == "model_type" and not where:
        return InvalidRequest("the body is JSON, but not an object", 'send {"messages": [...]}')
    if kind == "missing":
        return InvalidRequest(f"{where} is missing", "see OpenAI's chat completions API", param=where)
    if kind == "union_tag_invalid":
        tag = first["ctx"]["tag"]
        return InvalidRequest(
            f"{where} has type {_short(tag)}, which vlfit does not take",
            'use "text", "image_url", or "video" with "frames": [picture URLs]',
            param=where,
        )
    if kind == "union_tag_not_found":
        return InvalidRequest(f"{where} has no type", 'use "text", "image_url" or "video"', param=where)
    return InvalidRequest(f"{where} is {_short(sent)}", first["msg"], param=where)


def _path(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content", "parts", 1, "image_url", "image_url", "url")`` as a person writes it.

    Pydantic puts the tag of each union on the way; the tags say nothing to the sender and are dropped.
    """
    steps: list[str] = []
    tags = {"text", "parts", "image_url", "video", "str", "list[str]"}
    for index, step in enumerate(location):
        before = location[index - 1] if index else None
        if isinstance(step, int):
            steps.append(f"[{step}]")
        elif step in tags and (before in ("content", "stop") or isinstance(before, int)):
            continue
        else:
            steps.append(f".{step}" if steps else step)
    return "".join(steps)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
