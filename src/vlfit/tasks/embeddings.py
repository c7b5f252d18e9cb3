"""Vectors of texts and pictures, and scores of documents for a query.

The prompts are those that Qwen3-VL-Embedding and Qwen3-VL-Reranker were trained with: the instruction is the
system message, and the input, pictures first, is the user's.
"""

import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from vlfit.api.conversation import Conversation, Message, Part, TextPart
from vlfit.api.outputs import ImageSeen, Timings, Usage
from vlfit.api.pooling import DEFAULT_INSTRUCTION, RERANK_INSTRUCTION, PoolingParams, Vector
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend, Prepared, QueuedStream
from vlfit.errors import InvalidRequest, UsageError
from vlfit.tasks.files import FilePart, fit_conversation

WINDOW = 16  # requests in progress at a time: enough for full steps, few enough for the RAM of their pictures
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_NOTHING = "NULL"  # what the reranker was trained to see in place of an empty query or document


@dataclass(frozen=True, slots=True)
class EmbedInput:
    """What one vector is of: ``text`` (may be empty beside files) and pictures, documents and videos."""

    text: str = ""
    files: tuple[FilePart, ...] = ()

    @property
    def parts(self) -> tuple[Part | FilePart, ...]:
        """Files before the text, as in training; an empty text only if there is nothing else."""
        return (*self.files, *((TextPart(self.text),) if self.text or not self.files else ()))


@dataclass(frozen=True, slots=True)
class PooledAnswer:
    """One vector [dimensions], of length 1, or one score [1]. ``images``: how each picture was resized."""

    vector: Vector
    usage: Usage
    images: tuple[ImageSeen, ...] = ()
    timings: Timings | None = None


def check_embeds(backend: Backend) -> None:
    """Raise ``UsageError`` unless ``backend`` gives vectors."""
    if backend.capabilities.embeds:
        return
    if backend.pooling is not None and backend.pooling.kind == "reranker":
        raise UsageError(
            f"{backend.model!r} is a reranker: it scores documents and has no vectors",
            "Open a Qwen3-VL-Embedding.",
            param="model",
        )
    raise UsageError(
        f"the backend {backend.kind!r} gives no vectors of {backend.model!r}",
        "Use the native backend; programs ask a server of vlfit for them at /v1/embeddings.",
        param="model",
    )


def check_scores(backend: Backend) -> None:
    """Raise ``UsageError`` unless ``backend`` scores documents."""
    if not backend.capabilities.scores:
        raise UsageError(
            f"{backend.model!r} does not score documents",
            "Open a Qwen3-VL-Reranker with the native backend.",
            param="model",
        )


def embedding_conversation(
    backend: Backend, parts: Sequence[Part | FilePart], instruction: str | None = None
) -> Conversation:
    """The conversation whose last token makes the vector of ``parts``: pictures and text.

    ``instruction``: what the vector is for; None or empty: the model's default.
    """
    default = backend.pooling.instruction if backend.pooling is not None else DEFAULT_INSTRUCTION
    return (
        Message("system", (TextPart(_sentence(instruction) or default),)),
        Message("user", cast("tuple[Part, ...]", tuple(parts))),
    )


def rerank_conversation(
    backend: Backend,
    query: Sequence[Part | FilePart],
    document: Sequence[Part | FilePart],
    instruction: str | None = None,
) -> Conversation:
    """The question whether ``document`` answers ``query``.

    ``instruction``: what counts as an answer; None or empty: the model's default.
    """
    pooling = backend.pooling
    is_reranker = pooling is not None and pooling.kind == "reranker"
    default = pooling.instruction if pooling is not None and is_reranker else RERANK_INSTRUCTION
    user = (
        TextPart(f"<Instruct>: {(instruction or '').strip() or default}"),
        TextPart("<Query>:"),
        *(query or (TextPart(_NOTHING),)),
        TextPart("\n<Document>:"),
        *(document or (TextPart(_NOTHING),)),
    )
    return (Message("system", (TextPart(_JUDGE),)), Message("user", cast("tuple[Part, ...]", user)))


def _side(side: EmbedInput) -> tuple[Part | FilePart, ...]:
    return side.parts if side.text or side.files else ()


def _sentence(instruction: str | None) -> str:
    """``instruction`` with a full stop, as in training, if it ends in no punctuation."""
    text = (instruction or "").strip()
    return text if not text or unicodedata.category(text[-1]).startswith("P") else f"{text}."


def prepare_embedding(
    backend: Backend, parts: Sequence[Part | FilePart], instruction: str | None, pooling: PoolingParams
) -> Prepared:
    """Prepare the request for the vector of ``parts``; of a document or video as much as the context holds.

    Raises ``PictureError``, ``InvalidRequest`` or ``DoesNotFit``.
    """
    return prepare_conversation(backend, embedding_conversation(backend, parts, instruction), pooling)


def prepare_score(
    backend: Backend,
    query: Sequence[Part | FilePart],
    document: Sequence[Part | FilePart],
    instruction: str | None,
    *,
    truncate: bool = False,
) -> Prepared:
    """Prepare the request for the score of ``document``; raises as ``prepare_embedding``.

    ``truncate``: shorten a text that ends the document, if it does not fit the context.
    """
    conversation = rerank_conversation(backend, query, document, instruction)
    truncate = truncate and bool(document)
    return prepare_conversation(backend, conversation, PoolingParams("score", truncate=truncate))


def prepare_conversation(backend: Backend, conversation: Conversation, pooling: PoolingParams) -> Prepared:
    """``Backend.prepare_pooled``, with documents and videos taken apart."""
    return fit_conversation(
        backend,
        conversation,
        lambda fitted: backend.prepare_pooled(fitted, pooling),
        SamplingParams(max_tokens=1),
    )


def embed_parts(
    backend: Backend,
    text: str,
    *files: FilePart,
    instruction: str | None = None,
    dimensions: int | None = None,
) -> PooledAnswer:
    """The vector of ``text`` and ``files`` together. Blocks; any thread may call it.

    Raises ``UsageError`` if ``backend`` gives no vectors, else as ``prepare_embedding``.
    """
    check_embeds(backend)
    prepared = prepare_embedding(
        backend, EmbedInput(text, files).parts, instruction, PoolingParams(dimensions=dimensions)
    )
    return _wait(backend, prepared)


def embed_all(
    backend: Backend,
    inputs: Iterable[EmbedInput],
    *,
    instruction: str | None = None,
    dimensions: int | None = None,
) -> Iterator[PooledAnswer]:
    """Vectors of ``inputs``, in order, with up to ``WINDOW`` requests in progress.

    Inputs are read as they are needed. Ends with the first error; requests in progress are cancelled then,
    and when the iterator is closed. Raises as ``embed_parts``.
    """
    check_embeds(backend)
    pooling = PoolingParams(dimensions=dimensions)
    yield from _in_window(
        backend, (partial(prepare_embedding, backend, each.parts, instruction, pooling) for each in inputs)
    )


def rerank(
    backend: Backend, query: EmbedInput, documents: Sequence[EmbedInput], *, instruction: str | None = None
) -> list[float]:
    """How well each of ``documents`` answers ``query``: 0 to 1, in their order.

    Raises ``UsageError`` if ``backend`` does not score, else as ``prepare_score``.
    """
    check_scores(backend)
    scored = _in_window(
        backend,
        (partial(prepare_score, backend, _side(query), _side(each), instruction) for each in documents),
    )
    return [float(each.vector[0]) for each in scored]


def _in_window(backend: Backend, requests: "Iterable[partial[Prepared]]") -> Iterator[PooledAnswer]:
    running: deque[tuple[Prepared, QueuedStream]] = deque()
    try:
        for prepare in requests:
            prepared = prepare()
            running.append((prepared, QueuedStream(backend, prepared, SamplingParams(max_tokens=1))))
            if len(running) >= WINDOW:
                yield _result(*running.popleft())
        while running:
            yield _result(*running.popleft())
    finally:
        for _, stream in running:
            stream.close()


def _wait(backend: Backend, prepared: Prepared) -> PooledAnswer:
    return _result(prepared, QueuedStream(backend, prepared, SamplingParams(max_tokens=1)))


def _result(prepared: Prepared, stream: QueuedStream) -> PooledAnswer:
    for chunk in stream:
        if chunk.pooled is not None and chunk.usage is not None:
            return PooledAnswer(chunk.pooled, chunk.usage, prepared.images, chunk.timings)
    raise InvalidRequest("the request was cancelled", "Try again.")


def float_list(vector: Vector) -> list[float]:
    """``vector`` as numbers for JSON; of float32 at length 1, nine decimals lose nothing that counts."""
    import numpy as np

    numbers: list[float] = np.round(vector.astype(np.float64), 9).tolist()
    return numbers
