"""``POST /api/embed``, and ``POST /api/embeddings``, its older form for one text."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from vlfit.api.conversation import Part
from vlfit.api.outputs import Chunk
from vlfit.api.pooling import PoolingParams
from vlfit.backends.base import Backend, Prepared
from vlfit.errors import InvalidRequest
from vlfit.server.chat.chat_schema import MAX_IGNORED_SHOWN
from vlfit.server.chat.validation import parse_body
from vlfit.server.embeddings.pooled_endpoint import (
    PooledEndpoint,
    PooledResults,
    encode_floats,
    item_in_errors,
)
from vlfit.server.error_replies import EncodedJSON, encode_json
from vlfit.server.generation import ServerContext
from vlfit.server.http.admission import Slots
from vlfit.server.ollama.keep_alive import KeepAlive, parse_keep_alive
from vlfit.server.ollama.ollama_schema import OllamaEmbeddingsRequest, OllamaEmbedRequest
from vlfit.server.ollama.translation import check_num_ctx
from vlfit.tasks.embeddings import check_embeds, prepare_embedding


@dataclass(frozen=True, slots=True)
class EmbedCall:
    """A parsed request.

    ``texts``: what is embedded; none: the model is only loaded or unloaded. ``keep_alive``: seconds,
    ``FOREVER``, or None if not sent. ``started``: ``time.perf_counter_ns`` at arrival.
    """

    request: OllamaEmbedRequest | OllamaEmbeddingsRequest
    texts: list[str]
    keep_alive: float | None
    started: int

    @property
    def model(self) -> str:
        """The name of the model that the request asks for."""
        return self.request.model

    @property
    def stream(self) -> bool:
        """Never: the reply is one JSON object."""
        return False

    @property
    def pooling_params(self) -> PoolingParams:
        """The parameters of each vector. The older route cuts what does not fit, as Ollama's does."""
        if isinstance(self.request, OllamaEmbeddingsRequest):
            return PoolingParams(truncate=True)
        return PoolingParams(dimensions=self.request.dimensions, truncate=self.request.truncate is not False)

    def place(self, index: int) -> str:
        """The field that held text ``index``."""
        if isinstance(self.request, OllamaEmbeddingsRequest):
            return "prompt"
        return "input" if isinstance(self.request.input, str) else f"input[{index}]"


class OllamaEmbedEndpoint(PooledEndpoint[EmbedCall]):
    """``POST /api/embed`` and ``POST /api/embeddings``; ``request_class`` says which, and has the fields."""

    def __init__(
        self,
        context: ServerContext,
        keep_alive: KeepAlive,
        request_class: type[OllamaEmbedRequest] | type[OllamaEmbeddingsRequest],
    ) -> None:
        super().__init__(context)
        self._keep_alive = keep_alive
        self._request_class = request_class

    def parse(self, body: bytes | bytearray) -> EmbedCall:
        """Parse the body. Raises ``InvalidRequest``, also for an empty text among several."""
        started = time.perf_counter_ns()
        request = parse_body(self._request_class, body)
        call = EmbedCall(request, request.texts(), parse_keep_alive(request.keep_alive), started)
        for index, text in enumerate(call.texts):
            if not text:
                raise InvalidRequest(
                    f"{call.place(index)} is empty", "Send some text.", param=call.place(index)
                )
        return call

    def num_inputs(self, params: EmbedCall) -> int:
        """One for each text."""
        return len(params.texts)

    def check(self, params: EmbedCall, backend: Backend) -> None:
        """Raise ``UsageError`` if the model gives no vectors, ``InvalidRequest`` for wrong ``dimensions``,
        ``DoesNotFit`` for a ``num_ctx`` beyond the server's context.
        """
        check_embeds(backend)
        check_num_ctx(params.request.options, context=self.context.model.context or backend.context)
        size = backend.pooling.dimensions if backend.pooling is not None else None
        wanted = params.pooling_params.dimensions
        if wanted is not None and not 1 <= wanted <= (size or wanted):
            raise InvalidRequest(
                f"dimensions is {wanted}; {backend.model!r} has vectors of {size}",
                f"Use 1 to {size}.",
                param="dimensions",
            )

    async def reply_without_completion(self, params: EmbedCall) -> dict[str, Any] | None:
        """Load the model for a request without text, or unload it with ``keep_alive`` 0."""
        if params.texts:
            return None
        await self._keep_alive.load_or_unload(self.context.model, params.keep_alive)
        if isinstance(params.request, OllamaEmbeddingsRequest):
            return {"embedding": []}
        return {"model": params.model, "embeddings": []}

    def finished(self, params: EmbedCall) -> None:
        """Begin the time of ``keep_alive``."""
        self._keep_alive.request_ended(self.context.model, params.keep_alive)

    async def prepare(self, params: EmbedCall, sampling: object, slots: Slots) -> Sequence[Prepared]:
        """Tokenize all texts in a thread."""

        def run(backend: Backend, inputs: Sequence[tuple[Part, ...]]) -> list[Prepared]:
            prepared = []
            for index, parts in enumerate(inputs):
                with item_in_errors(params.place(index)):
                    prepared.append(prepare_embedding(backend, parts, None, params.pooling_params))
            return prepared

        return await self.prepare_each(params.texts, params.place, run, slots)

    def response_writer(
        self, params: EmbedCall, prepared: Sequence[Prepared], request_id: str
    ) -> "OllamaEmbedWriter":
        """The writer of the vectors."""
        can_sleep = self._keep_alive.supports(self.context.model)
        context = self.context.model.context or self.context.backend.context
        ignored = tuple(islice(_ignored(params, context, can_sleep), MAX_IGNORED_SHOWN))
        return OllamaEmbedWriter(self.context.backend, params, prepared, ignored)


def _ignored(params: EmbedCall, context: int | None, can_sleep: bool) -> Iterator[str]:
    request = params.request
    yield from request.model_extra or ()
    if request.keep_alive is not None and not can_sleep:
        yield "keep_alive"
    if request.options is not None:
        for name, value in request.options:  # those that vlfit knows, then the others
            if value is not None and not (name == "num_ctx" and value == context):
                yield f"options.{name}"


class OllamaEmbedWriter(PooledResults):
    """Formats the reply; each vector is encoded as it arrives."""

    def __init__(
        self, backend: Backend, params: EmbedCall, prepared: Sequence[Prepared], ignored: tuple[str, ...]
    ) -> None:
        super().__init__(backend, prepared, ignored)
        self._params = params
        self._prepared_after = time.perf_counter_ns() - params.started
        self._encoded = [""] * len(prepared)

    def add(self, index: int, chunk: Chunk) -> None:
        """Encode the vector of text ``index``."""
        super().add(index, chunk)
        vector, self.results[index] = self.results[index], None
        if vector is not None:
            self._encoded[index] = encode_floats(vector)

    def body(self) -> EncodedJSON:
        """The vectors, in the order of the texts, with durations in nanoseconds."""
        if isinstance(self._params.request, OllamaEmbeddingsRequest):
            return EncodedJSON(f'{{"embedding":{self._encoded[0]}}}'.encode())
        rest = {
            "model": self._params.model,
            "total_duration": time.perf_counter_ns() - self._params.started,
            "load_duration": self._prepared_after,
            "prompt_eval_count": self.prompt_tokens,
            "vlfit": self.extras(),
        }
        return EncodedJSON(f'{{"embeddings":[{",".join(self._encoded)}],'.encode() + encode_json(rest)[1:])
