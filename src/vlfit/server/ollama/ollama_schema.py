"""Pydantic models of Ollama's requests (its docs/api.md and api/types.go), and which fields have an effect.

``FIELDS`` is the table of docs/ollama.md. Fields that neither Ollama nor vlfit knows are ignored, and listed
in the response (``vlfit.ignored``), as for OpenAI's API.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from vlfit.server.chat.chat_schema import MAX_PARTS, MAX_TOOLS, FailOnFirst, StrictModel
from vlfit.server.chat.foreign_fields import Effect
from vlfit.server.embeddings.pooled_endpoint import MAX_INPUTS


def _as_whole(value: Any) -> Any:
    """Whole numbers may be sent as 4096.0, as Ollama takes them."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_as_whole, json_schema_input_type=int)]
Images = Annotated[list[str], Field(max_length=MAX_PARTS), FailOnFirst()]
Format = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["", "json"]},
                {"type": "object", "description": "JSON Schema"},
                {"type": "null"},
            ]
        }
    ),
]
Think = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": ["low", "medium", "high"]}, {"type": "null"}]}),
]
Duration = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string", "description": "such as 5m"}, {"type": "number"}, {"type": "null"}]}
    ),
]


class Options(StrictModel):
    """``options`` of a request. Those that change answers in Ollama and have no effect here are refused."""

    num_ctx: Whole | None = None
    num_predict: Whole | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Whole | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: (
        Annotated[
            str | Annotated[list[str], Field(max_length=MAX_PARTS), FailOnFirst()],
            Field(union_mode="left_to_right"),
        ]
        | None
    ) = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: Whole | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None


class Called(StrictModel):
    """The function that a call names; ``arguments``: an object, not JSON text as in OpenAI's API."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolCallMessage(StrictModel):
    """One call of an assistant's message."""

    function: Called
    id: str | None = None


class OllamaMessage(StrictModel):
    """One message of a chat.

    ``images``: base64. ``tool_name``: in a message of the role ``tool``, the function that was called.
    """

    role: str
    content: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[ToolCallMessage], Field(max_length=MAX_PARTS), FailOnFirst()] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    thinking: str | None = None


class OllamaFunction(StrictModel):
    """A function that the model may call; ``parameters``: JSON Schema of its arguments."""

    name: str = Field(min_length=1, max_length=200)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(StrictModel):
    """One entry of ``tools``."""

    type: Literal["function"] = "function"
    function: OllamaFunction


class GenerationFields(StrictModel):
    """Fields that chat and generate share. ``stream`` is true by default."""

    model: str = Field(min_length=1)
    stream: bool | None = None
    format: Format = None
    keep_alive: Duration = None
    options: Options | None = None
    think: Think = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None


class OllamaChatRequest(GenerationFields):
    """``POST /api/chat``. Without messages it loads the model, or unloads it with ``keep_alive`` 0."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_PARTS), FailOnFirst()] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS), FailOnFirst()] | None = None


class OllamaGenerateRequest(GenerationFields):
    """``POST /api/generate``. Without a prompt it loads the model, or unloads it with ``keep_alive`` 0."""

    prompt: str | None = None
    images: Images | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: Any = None
    width: Any = None
    height: Any = None
    steps: Any = None


class OllamaEmbedRequest(StrictModel):
    """``POST /api/embed``. Without input it loads the model, or unloads it with ``keep_alive`` 0.

    ``truncate`` (true by default): cut texts that do not fit the context; false: refuse them.
    """

    model: str = Field(min_length=1)
    input: (
        Annotated[
            str | Annotated[list[str], Field(max_length=MAX_INPUTS), FailOnFirst()],
            Field(union_mode="left_to_right"),
        ]
        | None
    ) = None
    truncate: bool | None = None
    dimensions: Whole | None = None
    keep_alive: Duration = None
    options: Options | None = None

    def texts(self) -> list[str]:
        """What is embedded; a single empty text is none."""
        return [self.input] if isinstance(self.input, str) and self.input else list(self.input or ())


class OllamaEmbeddingsRequest(StrictModel):
    """``POST /api/embeddings``, the older route: one text. Without it, as ``/api/embed`` without input."""

    model: str = Field(min_length=1)
    prompt: str | None = None
    keep_alive: Duration = None
    options: Options | None = None

    def texts(self) -> list[str]:
        """What is embedded; an empty text is none."""
        return [self.prompt] if self.prompt else []


class NamedModelRequest(StrictModel):
    """A request about one model. ``name``: the former name of ``model``."""

    model: str | None = None
    name: str | None = None

    @property
    def wanted(self) -> str:
        """The name of the model; empty if the request has none."""
        return self.model or self.name or ""


class ShowRequest(NamedModelRequest):
    """``POST /api/show``. ``verbose`` adds nothing."""

    verbose: bool | None = None


class PullRequest(NamedModelRequest):
    """``POST /api/pull``. ``stream`` is true by default; ``insecure`` changes nothing."""

    stream: bool | None = None
    insecure: bool | None = None


class DeleteRequest(NamedModelRequest):
    """``DELETE /api/delete``."""


class CopyRequest(StrictModel):
    """``POST /api/copy``."""

    source: str
    destination: str


_GENERATION: dict[str, tuple[Effect, str]] = {
    "model": ("honoured", "any name that `vlfit serve` takes for the served model; unknown ones get 404"),
    "stream": ("honoured", "true by default, as in Ollama"),
    "format": (
        "honoured",
        '`"json"`, or a JSON schema, which is enforced in full or refused; objects have no properties beyond'
        " those listed, as in Ollama",
    ),
    "keep_alive": ("honoured", "see below"),
    "options": ("honoured", "see the table of options"),
    "think": (
        "honoured",
        "models that think answer in `thinking` and `content`; `true` is refused for others; `false` switches"
        " thinking off where the chat template can; else it only leaves `thinking` out, and is listed as"
        " ignored",
    ),
    "logprobs": ("honoured", ""),
    "top_logprobs": ("honoured", "needs `logprobs`"),
}
_NO_EFFECT = "it changes no answer: `vlfit plan` has decided it"
_EMBEDDING: dict[str, tuple[Effect, str]] = {
    "model": ("honoured", "an embedding model, or any other that sees pictures, with worse results"),
    "options": ("honoured", "`num_ctx` as in /api/chat; the others change no vector"),
    "keep_alive": ("honoured", "as in /api/chat"),
}
_SAMPLER = "accepted only at the value that switches it off"

# Every field that Ollama documents for these requests, with what vlfit does with it.
FIELDS: dict[str, dict[str, tuple[Effect, str]]] = {
    "/api/chat": {
        **_GENERATION,
        "messages": ("honoured", "none: load or unload"),
        "tools": ("honoured", ""),
    },
    "/api/generate": {
        **_GENERATION,
        "prompt": ("honoured", "none: load or unload"),
        "images": ("honoured", "base64, or data: URLs"),
        "system": ("honoured", ""),
        "raw": ("honoured", "no chat template; without `images`, `system` and `format`"),
        "suffix": ("refused", "no text is filled in"),
        "template": ("refused", "the checkpoint's own template is used; `raw` sends a whole prompt"),
        "context": ("refused", "send the conversation to /api/chat; the prefix cache makes that as fast"),
        "width": ("refused", "vlfit draws no pictures"),
        "height": ("refused", "vlfit draws no pictures"),
        "steps": ("refused", "vlfit draws no pictures"),
    },
    "messages": {
        "role": ("honoured", "system, user, assistant, tool"),
        "content": ("honoured", ""),
        "images": ("honoured", "base64, or data: URLs; they come before the text"),
        "tool_calls": ("honoured", ""),
        "tool_name": ("honoured", "names the call that a tool's message answers"),
        "thinking": (
            "honoured",
            "by templates that read it (Qwen3.5's keeps thoughts since the last question); else ignored",
        ),
    },
    "options": {
        "num_ctx": (
            "honoured",
            "above the server's context it is refused; below it the whole context is used, and it is listed"
            " as ignored",
        ),
        "num_predict": (
            "honoured",
            "0, -1 and -2: the server's own limit (`--max-tokens`); more than the context leaves: as many as"
            " it leaves",
        ),
        "temperature": ("honoured", "0 to 2"),
        "top_k": ("honoured", ""),
        "top_p": ("honoured", ""),
        "min_p": ("honoured", ""),
        "seed": ("honoured", "-1: any"),
        "stop": ("honoured", ""),
        "repeat_penalty": ("honoured", "over prompt and answer; the checkpoint's own value by default"),
        "presence_penalty": ("honoured", ""),
        "frequency_penalty": ("honoured", ""),
        "typical_p": ("refused", f"{_SAMPLER}, 1"),
        "tfs_z": ("refused", f"{_SAMPLER}, 1"),
        "mirostat": ("refused", f"{_SAMPLER}, 0"),
        "vocab_only": ("refused", "accepted only if false"),
        "embedding_only": ("refused", "accepted only if false"),
        "mirostat_tau": ("ignored", "mirostat is off"),
        "mirostat_eta": ("ignored", "mirostat is off"),
        "repeat_last_n": ("ignored", "penalties look at all tokens"),
        "penalize_newline": ("ignored", "penalties look at all tokens"),
        "num_keep": ("ignored", "nothing is cut off a prompt: what does not fit is refused"),
        **dict.fromkeys(
            (
                *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all"),
                *("use_mmap", "use_mlock", "num_thread"),
            ),
            ("ignored", _NO_EFFECT),
        ),
    },
    "/api/show": {"model": ("honoured", "")},
    "/api/pull": {
        "model": (
            "honoured",
            "downloaded with `vlfit serve --pull`; else success only if the model is on this computer",
        ),
        "stream": ("honoured", "true by default"),
        "insecure": ("ignored", "downloads come from the hub"),
    },
    "/api/delete": {"model": ("refused", "`vlfit models rm` deletes models")},
    "/api/copy": {
        "source": ("refused", "models have one name"),
        "destination": ("refused", "models have one name"),
    },
    "/api/embed": {
        **_EMBEDDING,
        "input": ("honoured", "a text, or several; none: load or unload"),
        "truncate": ("honoured", "true by default, as in Ollama: a text that does not fit is cut"),
        "dimensions": ("honoured", "the first so many components, normalized again"),
    },
    "/api/embeddings": {**_EMBEDDING, "prompt": ("honoured", "none: load or unload")},
}
