"""``POST /v1/embeddings``: OpenAI's embeddings, with pictures as vLLM's ``messages`` or as inputs."""

import base64
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag

from vlfit.api.conversation import Conversation, Message, Part, TextPart
from vlfit.api.outputs import Chunk
from vlfit.api.pooling import DEFAULT_INSTRUCTION, QUERY_INSTRUCTION, PoolingParams
from vlfit.backends.base import Backend, Prepared
from vlfit.errors import InvalidRequest
from vlfit.server.chat.chat_schema import (
    BOOKKEEPING,
    MAX_IGNORED_SHOWN,
    MAX_PARTS,
    ChatMessage,
    ChatRequest,
    ContentPart,
    FailOnFirst,
    StrictModel,
)
from vlfit.server.chat.preparation import build_conversation, file_urls, limits_from_now
from vlfit.server.chat.validation import parse_body
from vlfit.server.embeddings.pooled_endpoint import (
    MAX_INPUTS,
    Item,
    PooledEndpoint,
    PooledResults,
    as_chat,
    encode_floats,
    item_in_errors,
    item_of,
)
from vlfit.server.error_replies import EncodedJSON, encode_json
from vlfit.server.http.admission import Slots
from vlfit.tasks.embeddings import check_embeds, prepare_conversation, prepare_embedding

# Fields of other servers that vlfit lacks, each with the values that would not change the vectors.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "normalize": (True,),
    "normalized": (True,),
    "use_activation": (True,),
    "late_chunking": (False,),
    "return_multivector": (False,),
    "embedding_type": ("float",),
    "output_dtype": ("float",),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "add_generation_prompt": (True, False),  # vectors are of the token that an answer would follow
    "continue_final_message": (True, False),
    "add_special_tokens": (True, False),  # Qwen3-VL has none to add
}
# What a vector is for, as Cohere, Jina, Voyage and NVIDIA call it.
_QUERY_TYPES = ("query", "search_query", "retrieval.query")
_OTHER_TYPES = ("document", "passage", "search_document", "retrieval.passage", "retrieval", "text-matching")


def _kind_of_input(value: Any) -> str:
    if isinstance(value, list):
        first = value[0] if value else ""
        if isinstance(first, int) and not isinstance(first, bool):
            return "list[int]"
        return "list[list[int]]" if isinstance(first, list) else "items"
    return "text"


def _kind_of_item(value: Any) -> str:
    if isinstance(value, dict):
        return "part" if "type" in value else "object"
    return "str"


class InputObject(StrictModel):
    """``text``, a picture (``image``: URL or base64), or both; or ``content``: parts as in a chat message."""

    text: str | None = None
    image: str | None = None
    content: Annotated[list[ContentPart], Field(max_length=MAX_PARTS), FailOnFirst()] | None = None

    def item(self) -> Item:
        """The input as one chat message would have it."""
        return item_of(self.text, self.image) if self.content is None else self.content


AnyItem = Annotated[
    Union[  # noqa: UP007
        Annotated[str, Tag("str")],
        Annotated[ContentPart, Tag("part")],
        Annotated[InputObject, Tag("object")],
    ],
    Discriminator(_kind_of_item),
]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], FailOnFirst()]


class EmbeddingRequest(StrictModel):
    """``POST /v1/embeddings``: a vector for each of ``input``, or one for ``messages``.

    ``input``: a text, several texts or pictures (content parts, or objects with text and image), or token
    ids, taken without a chat template. ``instruction``: what the vectors are for; ``input_type`` ``query``
    is short for that of a search. ``truncate_prompt_tokens``: -1 cuts texts that are too long.
    """

    input: (
        Annotated[
            Union[  # noqa: UP007
                Annotated[str, Tag("text")],
                Annotated[list[AnyItem], Tag("items"), Field(max_length=MAX_INPUTS), FailOnFirst()],
                Annotated[TokenIds, Tag("list[int]")],
                Annotated[
                    list[TokenIds], Tag("list[list[int]]"), Field(max_length=MAX_INPUTS), FailOnFirst()
                ],
            ],
            Discriminator(_kind_of_input),
        ]
        | None
    ) = None
    messages: Annotated[list[ChatMessage], Field(max_length=MAX_PARTS), FailOnFirst()] | None = None
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    instruction: str | None = None
    input_type: str | None = None
    task: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None

    @property
    def stream(self) -> bool:
        """Never: the reply is one JSON object."""
        return False

    def items(self) -> list[Item]:
        """The inputs that are texts and pictures; empty for token ids and for ``messages``."""
        if isinstance(self.input, str):
            return [self.input]
        items: list[Item] = []
        for each in self.input or ():
            if isinstance(each, str):
                items.append(each)
            elif isinstance(each, InputObject):
                items.append(each.item())
            elif not isinstance(each, int | list):
                items.append([each])
        return items

    def token_ids(self) -> list[tuple[int, ...]]:
        """The inputs that are token ids."""
        if not isinstance(self.input, list) or not self.input:
            return []
        if all(isinstance(each, int) for each in self.input):
            return [tuple(each for each in self.input if isinstance(each, int))]
        return [tuple(each) for each in self.input if isinstance(each, list)]

    @property
    def num_inputs(self) -> int:
        return 1 if self.messages is not None else len(self.items()) or len(self.token_ids())

    def instruction_text(self) -> str | None:
        """``instruction``, or that of ``input_type`` or ``task``; None: the model's own."""
        purpose = self.input_type or self.task
        if self.instruction is not None or purpose is None:
            return self.instruction
        return QUERY_INSTRUCTION if purpose in _QUERY_TYPES else DEFAULT_INSTRUCTION

    def pooling_params(self) -> PoolingParams:
        """The parameters of each vector."""
        return PoolingParams(dimensions=self.dimensions, truncate=self.truncate_prompt_tokens == -1)

    def place(self, index: int) -> str:
        """The field that held input ``index``."""
        return f"input[{index}]" if isinstance(self.input, list) else "input"

    def ignored_fields(self) -> tuple[str, ...]:
        """Names of unknown fields that were sent; at most ``MAX_IGNORED_SHOWN``."""
        names = (name for name in self.model_extra or {} if name not in BOOKKEEPING and name not in REFUSED)
        return tuple(islice(names, MAX_IGNORED_SHOWN))


def read_embedding_request(body: bytes | bytearray) -> EmbeddingRequest:
    """Parse the body. Raises ``InvalidRequest``, also for fields that would change the vectors."""
    params = parse_body(EmbeddingRequest, body)
    if (params.input is None) == (params.messages is None):
        raise InvalidRequest(
            "input is missing" if params.input is None else "input and messages cannot be combined",
            "Send input: a text, or several; or messages.",
            param="input",
        )
    if not params.num_inputs or params.messages == []:
        raise InvalidRequest("there is nothing to embed", "Send at least one input.", param="input")
    for index, item in enumerate(params.items()):
        if not item:
            raise InvalidRequest(
                f"{params.place(index)} is empty", "Send some text or a picture.", param=params.place(index)
            )
    for index, ids in enumerate(params.token_ids()):
        if not ids:
            raise InvalidRequest(f"input[{index}] has no token ids", "Send at least one.", param="input")
    for name, neutral in REFUSED.items():
        value = (params.model_extra or {}).get(name)
        if value is not None and not any(value == each for each in neutral):
            raise InvalidRequest(f"vlfit does not support {name}", f"Leave {name} out.", param=name)
    if params.truncate_prompt_tokens not in (None, -1):
        raise InvalidRequest(
            f"truncate_prompt_tokens is {params.truncate_prompt_tokens}",
            "Use -1, which cuts texts to the context, or leave it out.",
            param="truncate_prompt_tokens",
        )
    for name in ("input_type", "task"):
        value = getattr(params, name)
        if value is not None and value not in (*_QUERY_TYPES, *_OTHER_TYPES):
            raise InvalidRequest(
                f"{name} is {value[:60]!r}",
                f"Use one of: {', '.join((*_QUERY_TYPES, *_OTHER_TYPES))}; or instruction.",
                param=name,
            )
    return params


class EmbeddingsEndpoint(PooledEndpoint[EmbeddingRequest]):
    """``POST /v1/embeddings``."""

    bare_files = True
    model_kind = "embedding"

    def parse(self, body: bytes | bytearray) -> EmbeddingRequest:
        """Parse the body (``read_embedding_request``). Raises ``InvalidRequest``."""
        return read_embedding_request(body)

    def file_urls(self, params: EmbeddingRequest) -> list[str]:
        """URLs of the request's pictures and files. Raises ``InvalidRequest`` for an invalid part."""
        return file_urls(_chat_of(params))

    def num_inputs(self, params: EmbeddingRequest) -> int:
        """One for each input."""
        return params.num_inputs

    def check(self, params: EmbeddingRequest, backend: Backend) -> None:
        """Raise ``UsageError`` if the model gives no vectors, ``InvalidRequest`` for wrong ``dimensions``."""
        check_embeds(backend)
        size = backend.pooling.dimensions if backend.pooling is not None else None
        if params.dimensions is not None and not 1 <= params.dimensions <= (size or params.dimensions):
            raise InvalidRequest(
                f"dimensions is {params.dimensions}; {backend.model!r} has vectors of {size}",
                f"Use 1 to {size}.",
                param="dimensions",
            )

    async def prepare(self, params: EmbeddingRequest, sampling: object, slots: Slots) -> Sequence[Prepared]:
        """Fetch the pictures, then decode them and tokenize all inputs in a thread."""
        pooling, instruction = params.pooling_params(), params.instruction_text()
        if params.messages is not None:
            return [await self._prepare_messages(params, pooling, slots)]
        ids = params.token_ids()
        if ids:
            backend = self.context.backend
            return await self.context.prepare_threads.run_with_slots(
                slots, lambda: [backend.prepare_pooled(each, pooling) for each in ids]
            )

        def run(backend: Backend, inputs: Sequence[tuple[Part, ...]]) -> list[Prepared]:
            prepared = []
            for index, parts in enumerate(inputs):
                with item_in_errors(params.place(index)):
                    prepared.append(prepare_embedding(backend, parts, instruction, pooling))
            return prepared

        return await self.prepare_each(params.items(), params.place, run, slots)

    async def _prepare_messages(
        self, params: EmbeddingRequest, pooling: PoolingParams, slots: Slots
    ) -> Prepared:
        context, backend = self.context, self.context.backend
        conversation = await build_conversation(_chat_of(params), context.settings, context.fetch_threads)
        conversation = _with_instruction(conversation, params.instruction_text(), backend)
        limits = limits_from_now(context.settings)

        def run() -> Prepared:
            with limits():
                return prepare_conversation(backend, conversation, pooling)

        return await context.picture_threads.run_with_slots(slots, run)

    def response_writer(
        self, params: EmbeddingRequest, prepared: Sequence[Prepared], request_id: str
    ) -> "EmbeddingsWriter":
        """The writer of the list of vectors."""
        return EmbeddingsWriter(self.context.backend, params, prepared)


class EmbeddingsWriter(PooledResults):
    """Formats the reply; each vector is encoded as it arrives."""

    def __init__(self, backend: Backend, params: EmbeddingRequest, prepared: Sequence[Prepared]) -> None:
        super().__init__(backend, prepared, params.ignored_fields())
        self._model = backend.model
        self._as_text = params.encoding_format == "base64"
        self._encoded = [b""] * len(prepared)

    def add(self, index: int, chunk: Chunk) -> None:
        """Encode the vector of input ``index``: as numbers, or as little-endian float32 in base64."""
        super().add(index, chunk)
        vector, self.results[index] = self.results[index], None
        if vector is None:
            return
        value = (
            f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode()}"'
            if self._as_text
            else encode_floats(vector)
        )
        self._encoded[index] = f'{{"object":"embedding","index":{index},"embedding":{value}}}'.encode()

    def body(self) -> EncodedJSON:
        """The list of vectors, in the order of the inputs, with usage."""
        rest = {
            "model": self._model,
            "usage": {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens},
            "vlfit": self.extras(),
        }
        return EncodedJSON(
            b'{"object":"list","data":[' + b",".join(self._encoded) + b"]," + encode_json(rest)[1:]
        )


def _chat_of(params: EmbeddingRequest) -> ChatRequest:
    if params.messages is None:
        return as_chat(params.items())
    messages = list(params.messages)
    if len(messages) > 1 and messages[-1].role == "assistant" and not _has_text(messages[-1]):
        messages.pop()  # vLLM's way to ask for the header of an answer, which is there in any case
    return ChatRequest(messages=messages)


def _has_text(message: ChatMessage) -> bool:
    content = message.content or ()
    return bool(content) and (
        isinstance(content, str) or any(getattr(part, "text", "media") for part in content)
    )


def _with_instruction(conversation: Conversation, instruction: str | None, backend: Backend) -> Conversation:
    """``conversation`` with the instruction as its system message, unless it has one itself."""
    if conversation[0].role == "system":
        return conversation
    default = backend.pooling.instruction if backend.pooling is not None else DEFAULT_INSTRUCTION
    return (Message("system", (TextPart(instruction or default),)), *conversation)
