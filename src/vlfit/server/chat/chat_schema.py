"""Pydantic models of a chat completion request.

Fields that vlfit does not implement:

- those that would change the answer (``logit_bias``, ``audio``, ...) are refused with 400, also those of
  other servers (``foreign_fields.py``);
- OpenAI's bookkeeping fields (``user``, ``metadata``, ...) are accepted without effect;
- anything else is ignored, as vLLM does, but listed in the response's ``vlfit.ignored``, so that a
  misspelt ``temprature`` does not go unnoticed.
"""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag

from vlfit.api.conversation import Detail
from vlfit.errors import InvalidRequest
from vlfit.server.chat.foreign_fields import refuse_foreign_fields

MAX_CHOICES = 16
MAX_TOOLS = 128  # OpenAI's limit
MAX_PARTS = 10_000  # messages, content parts and tool calls of one request, in all
MAX_IGNORED_SHOWN = 50  # names in ``vlfit.ignored``
_NO_EFFECT = frozenset({"cache_control", "annotations"})  # of content parts: they ask for nothing here
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


class FailOnFirst(FailFast):
    """Makes pydantic stop validating a list at its first error, the only one that is reported."""

    __hash__ = object.__hash__  # pydantic's class has none, but branches of a union need one


class StrictModel(BaseModel):
    """Base of all request models: no type conversions, unknown fields kept in ``model_extra``, immutable."""

    # Strict: "0.7" is not a number and 1 is not a boolean, as in OpenAI's API.
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


def unknown_fields(path: str, part: StrictModel) -> Iterator[str]:
    """Paths of the fields of ``part``, and of objects in it, that have no effect; ``path``: its own."""
    yield from (f"{path}.{name}" for name in part.model_extra or {} if name not in _NO_EFFECT)
    for name, value in part:
        if isinstance(value, StrictModel):
            yield from unknown_fields(f"{path}.{name}", value)


class TextContent(StrictModel):
    type: Literal["text"]
    text: str


def _known_detail(detail: Any) -> Any:
    return "high" if detail == "original" else detail


# OpenAI's newer "original" equals "high" here, which never scales a picture down.
AnyDetail = Annotated[
    Detail, BeforeValidator(_known_detail, json_schema_input_type=Literal[Detail, "original"])
]


class ImageURL(StrictModel):
    """Where a picture is.

    ``url``: data:image/...;base64,..., https:// or http://. ``detail`` ``low``: fewer image tokens.
    """

    url: str
    detail: AnyDetail = "auto"


def _with_url(image: Any) -> Any:
    return ImageURL(url=image) if isinstance(image, str) else image


class ImageContent(StrictModel):
    """A picture. ``image_url`` may also be the bare URL, as many clients send it."""

    type: Literal["image_url"]
    image_url: Annotated[ImageURL, BeforeValidator(_with_url, json_schema_input_type=ImageURL | str)]


class VideoContent(StrictModel):
    """A clip as a list of picture URLs, ``fps`` frames per second (an extension of vlfit)."""

    type: Literal["video"]
    frames: Annotated[list[str], Field(min_length=1, max_length=MAX_PARTS), FailOnFirst()]
    fps: float = Field(default=2.0, gt=0, le=1000)


def _time_text(value: Any) -> Any:
    """A number of seconds as text; anything else as it is."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < 1e9:
        return str(value)[:20] if isinstance(value, float) else value
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _with_unit(value: Any) -> Any:
    text = _time_text(value)
    return text if text is value else f"{text}s"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int | float) else value


_Time = Annotated[str, BeforeValidator(_time_text, json_schema_input_type=float | str)]


class VideoURL(StrictModel):
    """Where a video is.

    ``url``: a video file (data:video/mp4;base64,..., https:// or http://), if the server takes them; or all
    frames of a clip, as in vLLM: ``data:video/jpeg;base64,`` followed by each frame's base64, separated by
    commas. An animated GIF, WebP or PNG is a clip as a video file is. ``fps``: frames per second; of a file,
    those that are looked at, or fewer of a long one. ``every`` (an extension of vlfit): in place of ``fps``,
    the time between two frames: seconds, or ``2s``. ``at`` (another): only the frames at these times, in
    seconds or as ``0:35``, as pictures.
    """

    url: str
    fps: float = Field(default=2.0, gt=0, le=1000)
    every: Annotated[str, BeforeValidator(_with_unit, json_schema_input_type=float | str)] | None = None
    at: (
        Annotated[
            list[_Time],
            Field(min_length=1, max_length=100),
            FailOnFirst(),
            BeforeValidator(_as_list, json_schema_input_type=float | str | list[float | str]),
        ]
        | None
    ) = None


class VideoURLContent(StrictModel):
    """A clip in one URL."""

    type: Literal["video_url"]
    video_url: VideoURL


class FileData(StrictModel):
    """A document in the request.

    ``file_data``: data:application/pdf;base64,... ``filename`` is its name in errors and notes, and may
    choose pages: ``report.pdf#2-5`` (an extension of vlfit).
    """

    file_data: str | None = None
    filename: str | None = Field(default=None, max_length=300)
    file_id: str | None = None


class FileContent(StrictModel):
    """A document, as OpenAI has it: each page of a PDF is a picture, as many as the context has room for."""

    type: Literal["file"]
    file: FileData


ContentPart = Annotated[
    TextContent | ImageContent | VideoContent | VideoURLContent | FileContent, Field(discriminator="type")
]


def _kind_of_content(content: Any) -> str:
    if content is None:
        return "nothing"
    return "parts" if isinstance(content, list) else "text"


class CalledFunction(StrictModel):
    """A call by the model; ``arguments`` is JSON in a string."""

    name: str
    arguments: str = ""


class CalledTool(StrictModel):
    """One entry of an assistant message's ``tool_calls``."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(StrictModel):
    """One message of a chat.

    ``content``: a string or a list of parts; null only in an assistant's message with tool calls.

    ``reasoning_content``, or vLLM's ``reasoning``: an assistant's thoughts, which templates keep or drop.
    """

    role: str
    content: Annotated[
        Union[  # noqa: UP007
            Annotated[None, Tag("nothing")],
            Annotated[str, Tag("text")],
            Annotated[list[ContentPart], Tag("parts"), Field(max_length=MAX_PARTS), FailOnFirst()],
        ],
        Discriminator(_kind_of_content),
    ] = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=MAX_PARTS), FailOnFirst()] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class StreamOptions(StrictModel):
    """Options of a stream. ``include_usage``: end a stream with an event of token counts."""

    include_usage: bool = False


class NamedSchema(StrictModel):
    """The schema of an answer.

    ``schema``: JSON Schema, enforced in full or refused; ``strict`` has no effect.

    ``fenced``: allow a Markdown code fence around the JSON and whitespace in it, as Qwen3-VL tends to
    write (an extension of vlfit).
    """

    name: str = Field(min_length=1, max_length=200)
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    fenced: bool | None = None


class ResponseFormat(StrictModel):
    """What an answer must be.

    ``json_object``: any JSON object. ``json_schema``: JSON of the given schema. ``text``: anything.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class Function(StrictModel):
    """A callable function. ``parameters``: JSON Schema of its arguments, enforced with ``strict``."""

    name: str = Field(min_length=1, max_length=200)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(StrictModel):
    """One entry of a request's ``tools``."""

    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    name: str


class NamedToolChoice(StrictModel):
    """A ``tool_choice`` that names the one function that the model must call."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    """The tools that a ``tool_choice`` leaves.

    ``mode``: whether the model may call one of ``tools`` (``auto``) or must (``required``).
    """

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS), FailOnFirst()]


class AllowedToolsChoice(StrictModel):
    """A ``tool_choice`` that restricts the tools to those listed; the model does not see the others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, dict):
        return "some" if choice.get("type") == "allowed_tools" else "one"
    if isinstance(choice, AllowedToolsChoice):
        return "some"
    return "one" if isinstance(choice, NamedToolChoice) else "word"


AnyToolChoice = Annotated[
    Union[  # noqa: UP007
        Annotated[Literal["none", "auto", "required"], Tag("word")],
        Annotated[NamedToolChoice, Tag("one")],
        Annotated[AllowedToolsChoice, Tag("some")],
    ],
    Discriminator(_kind_of_choice),
]


class SamplingFields(StrictModel):
    """Sampling fields of all endpoints. A null or absent field takes the checkpoint's default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        str | Annotated[list[str], Field(max_length=MAX_PARTS), FailOnFirst()] | None,
        Field(union_mode="left_to_right"),
    ] = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_PARTS), FailOnFirst()] | None
    ) = None
    ignore_eos: bool | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    loop_guard: bool | None = None

    def refuse_unsupported(self) -> None:
        """Raise ``InvalidRequest`` for fields that would change the answer but vlfit does not support."""
        refuse_foreign_fields(self.model_extra or {}, self.n)

    def ignored_fields(self) -> tuple[str, ...]:
        """Names of unknown fields that were sent, without bookkeeping; at most ``MAX_IGNORED_SHOWN``."""
        names = (name for name in self.model_extra or {} if name not in BOOKKEEPING)
        return tuple(islice(chain(names, self.ignored_in_parts()), MAX_IGNORED_SHOWN))

    def ignored_in_parts(self) -> Iterator[str]:
        """Paths of unknown fields of content parts, such as ``messages[0].content[1].video_url.step``."""
        return iter(())


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
NO_REASONING = ("none", "minimal")  # of a model that either reasons or does not


class ChatRequest(SamplingFields):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(max_length=MAX_PARTS), FailOnFirst()]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), FailOnFirst()] | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    logit_bias: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None

    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template: those of ``reasoning_effort``, then ``chat_template_kwargs``."""
        effort = self.reasoning_effort
        switch = {} if effort is None else {"enable_thinking": effort not in NO_REASONING}
        level = {} if effort is None else {"reasoning_effort": effort}
        return switch | level | (self.chat_template_kwargs or {})

    def ignored_in_parts(self) -> Iterator[str]:
        """Paths of unknown fields of the messages' content parts."""
        for index, message in enumerate(self.messages):
            if isinstance(message.content, list):
                for position, part in enumerate(message.content):
                    yield from unknown_fields(f"messages[{index}].content[{position}]", part)

    def refuse_unsupported(self) -> None:
        """Also refuse the fields of chat completions that vlfit does not support. Raises
        ``InvalidRequest``.
        """
        super().refuse_unsupported()
        refused = {
            "functions": self.functions,
            "function_call": self.function_call not in (None, "none", "auto"),
            "logit_bias": self.logit_bias,
            "modalities": self.modalities not in (None, [], ["text"]),
            "audio": self.audio,
            "web_search_options": self.web_search_options is not None,
        }
        for name, is_set in refused.items():
            if is_set:
                raise InvalidRequest(f"vlfit does not support {name}", f"Leave {name} out.", param=name)
