"""The body of a chat request as OpenAI defines it, checked field by field.

Knows: names, types and which fields vlfit carries out, refuses or ignores. Does not know: pictures, the
engine, how what is wrong is said (``server/openai/validation.py``).

Three kinds of fields that are not carried out:

- those that would change the answer (``logit_bias``, ``audio``, ...) are refused with 400;
- OpenAI's book-keeping fields (``user``, ``metadata``, ...) change nothing and are accepted;
- anything else is ignored, as vLLM does, but the response names it in ``vlfit.ignored``, so that a
  misspelt ``temprature`` does not go unnoticed.
"""

from itertools import islice
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag

from vlfit.api.conversation import Detail
from vlfit.errors import InvalidRequest

MAX_CHOICES = 16
MOST_TOOLS = 128  # as OpenAI has it
MOST_PARTS = 10_000  # messages, their parts and their calls of one request, in all
MOST_NAMED = 50  # fields that were ignored
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


class FirstWrong(FailFast):
    """Of a list that is read no further than its first mistake, which is the one that is told."""

    __hash__ = object.__hash__  # pydantic's has none, and a branch of a union needs one


class Strict(BaseModel):
    # Strict: "0.7" is no number and 1 is no truth value, as at OpenAI.
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class TextContent(Strict):
    type: Literal["text"]
    text: str


def _known_detail(detail: Any) -> Any:
    return "high" if detail == "original" else detail


# "original" is OpenAI's newest word; nothing is more than "high" here, which makes no picture smaller.
AnyDetail = Annotated[
    Detail, BeforeValidator(_known_detail, json_schema_input_type=Literal[Detail, "original"])
]


class ImageURL(Strict):
    """``url``: data:image/...;base64,..., https:// or http://. ``detail``: low for few tokens."""

    url: str
    detail: AnyDetail = "auto"


def _with_url(image: Any) -> Any:
    return ImageURL(url=image) if isinstance(image, str) else image


class ImageContent(Strict):
    """``image_url`` may be the URL alone, as many clients send it."""

    type: Literal["image_url"]
    image_url: Annotated[ImageURL, BeforeValidator(_with_url, json_schema_input_type=ImageURL | str)]


class VideoContent(Strict):
    """vlfit's own extension: a clip as a list of picture URLs, ``fps`` of them to a second."""

    type: Literal["video"]
    frames: Annotated[list[str], Field(min_length=1, max_length=MOST_PARTS), FirstWrong()]
    fps: float = Field(default=2.0, gt=0, le=1000)


class VideoURL(Strict):
    """``url``: the frames of a clip in one, as vLLM takes them: ``data:video/jpeg;base64,`` and each frame's
    base64, with commas between. Files of films are not decoded.
    """

    url: str
    fps: float = Field(default=2.0, gt=0, le=1000)


class VideoURLContent(Strict):
    type: Literal["video_url"]
    video_url: VideoURL


ContentPart = Annotated[
    TextContent | ImageContent | VideoContent | VideoURLContent, Field(discriminator="type")
]


def _kind_of_content(content: Any) -> str:
    if content is None:
        return "nothing"
    return "parts" if isinstance(content, list) else "text"


class CalledFunction(Strict):
    """``arguments`` is JSON in a string, as the model wrote it."""

    name: str
    arguments: str = ""


class CalledTool(Strict):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Strict):
    """``content`` is a string or a list of parts; it may be null where the assistant only calls tools."""

    role: str
    content: Annotated[
        Union[  # noqa: UP007
            Annotated[None, Tag("nothing")],
            Annotated[str, Tag("text")],
            Annotated[list[ContentPart], Tag("parts"), Field(max_length=MOST_PARTS), FirstWrong()],
        ],
        Discriminator(_kind_of_content),
    ] = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=MOST_PARTS), FirstWrong()] | None = None
    tool_call_id: str | None = None


class StreamOptions(Strict):
    include_usage: bool = False


class NamedSchema(Strict):
    """``schema`` is JSON Schema, of which everything is kept to or refused; ``strict`` changes nothing.

    ``fenced``: JSON may stand between fences, and with spaces, as Qwen3-VL likes to write it. A word of ours.
    """

    name: str = Field(min_length=1, max_length=200)
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    fenced: bool | None = None


class ResponseFormat(Strict):
    """``json_object``: any JSON object. ``json_schema``: JSON of that schema. ``text``: anything."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class Function(Strict):
    """``parameters`` is the JSON Schema of its arguments. With ``strict`` they are held to it."""

    name: str = Field(min_length=1, max_length=200)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class ToolChoice(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Field(min_length=1, max_length=MOST_TOOLS), FirstWrong()]


class AllowedChoice(Strict):
    """As if there were no other tools than these: the model is not told of the rest."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, dict):
        return "some" if choice.get("type") == "allowed_tools" else "one"
    if isinstance(choice, AllowedChoice):
        return "some"
    return "one" if isinstance(choice, ToolChoice) else "word"


AnyToolChoice = Annotated[
    Union[  # noqa: UP007
        Annotated[Literal["none", "auto", "required"], Tag("word")],
        Annotated[ToolChoice, Tag("one")],
        Annotated[AllowedChoice, Tag("some")],
    ],
    Discriminator(_kind_of_choice),
]


class SamplingWishes(Strict):
    """How words are chosen: what chats and plain completions have in common. A field that is null or absent
    takes the checkpoint's own default.
    """

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
        str | Annotated[list[str], Field(max_length=MOST_PARTS), FirstWrong()] | None,
        Field(union_mode="left_to_right"),
    ] = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MOST_PARTS), FirstWrong()] | None
    ) = None
    ignore_eos: bool | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    loop_guard: bool | None = None

    def ignored(self) -> tuple[str, ...]:
        """The fields that were sent and have no effect, as a person would write them; the first of many."""
        names = (name for name in self.model_extra or {} if name not in BOOKKEEPING)
        return tuple(islice(names, MOST_NAMED))


class ChatRequest(SamplingWishes):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(max_length=MOST_PARTS), FirstWrong()]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS), FirstWrong()] | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    logit_bias: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None

    def refuse_unsupported(self) -> None:
        """Raises ``InvalidRequest`` for a field that would change the answer and that vlfit cannot carry
        out.
        """
        refused = {
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
