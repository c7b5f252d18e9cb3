"""Requests for a vector or a score instead of text, and what a checkpoint is made for. No torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    Vector: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]
else:
    Vector = object  # numpy is imported only where vectors are computed

PoolingTask = Literal["embed", "score"]
ModelKind = Literal["chat", "embedding", "reranker"]

# What Qwen3-VL-Embedding and -Reranker were trained with; a checkpoint may name others.
DEFAULT_INSTRUCTION = "Represent the user's input."
QUERY_INSTRUCTION = "Retrieve images or text relevant to the user's query."
RERANK_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What a pooled request computes from the last token of its prompt.

    ``task``: ``embed``: the hidden state after the final norm, at length 1; ``score``: the probability of
    "yes" against "no" as the next token. ``dimensions``: first components of the vector to keep; None: all.
    ``truncate``: if the prompt is longer than the context, shorten the text at its end.
    """

    task: PoolingTask = "embed"
    dimensions: int | None = None
    truncate: bool = False


@dataclass(frozen=True, slots=True)
class ModelPooling:
    """What a checkpoint is made for, and how it is asked for vectors or scores.

    ``kind``: ``embedding`` and ``reranker`` models write no text; a ``chat`` model gives vectors, but was not
    trained for that. ``dimensions``: components of a vector. ``instruction``: the default one.
    ``score_tokens``: ids of "yes" and "no" for scores (the second None: only the first counts); None: the
    checkpoint does not say.
    """

    kind: ModelKind
    dimensions: int
    instruction: str = DEFAULT_INSTRUCTION
    score_tokens: tuple[int, int | None] | None = None
