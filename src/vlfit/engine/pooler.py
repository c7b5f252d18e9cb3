"""Pooled requests: a vector or a score from the last token of a prompt, and prompts cut to the context."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from tokenizers import Tokenizer

from vlfit.api.conversation import Conversation, TextPart
from vlfit.api.pooling import ModelPooling, PoolingParams, Vector
from vlfit.errors import CheckpointError, InvalidRequest
from vlfit.prompt.builder import Prompt

ANSWERS = ("yes", "no")  # the tokens whose logits are compared, if the checkpoint does not name others
_MAX_CUTS = 8  # a text is tokenized differently once it is cut, so one cut may not be enough
_LONGEST_TOKEN = 256  # bytes; longer ones are runs of spaces and the like


def pool(params: PoolingParams, values: Vector) -> Vector:
    """The result of a pooled request.

    ``values``: the hidden state [hidden], or the logits of the score tokens [1 or 2]. Returns the vector
    [dimensions] at length 1 (a zero vector stays zero), or [the probability of the first token].
    """
    wide = values.astype(np.float64)
    if params.task == "score":
        odds = wide[0] - (wide[1] if len(wide) > 1 else 0.0)
        return np.array([0.5 * (1.0 + np.tanh(0.5 * odds))], dtype=np.float32)
    kept = wide[: params.dimensions]
    length = np.linalg.norm(kept)
    result: Vector = (kept / length if length else kept).astype(np.float32)
    return result


def score_tokens(pooling: ModelPooling, tokenizer: Tokenizer, vocabulary: int) -> tuple[int, ...]:
    """Ids of the tokens for scores, "yes" first; empty if the vocabulary has none.

    Empty also for an embedding model, which is not trained to say yes or no. ``vocabulary``: rows of the
    output head. Raises ``CheckpointError`` if the checkpoint names a token beyond it.
    """
    if pooling.kind == "embedding":
        return ()
    words = (tokenizer.token_to_id(word) for word in ANSWERS)
    yes, no = pooling.score_tokens or tuple(words)
    if yes is None or (no is None and pooling.score_tokens is None):
        return ()
    ids = (yes,) if no is None else (yes, no)
    if max(ids) >= vocabulary:
        raise CheckpointError(
            f"the checkpoint scores by token {max(ids)}; its vocabulary has {vocabulary}",
            "Fetch 1_LogitScore/config.json again.",
        )
    return ids


def check_pooling(pooling: PoolingParams, model: ModelPooling, tokens: tuple[int, ...], name: str) -> None:
    """Raise ``InvalidRequest`` for a task that the model ``name`` does not have, or wrong ``dimensions``.

    ``tokens``: its ``score_tokens``.
    """
    if pooling.task == "score" and not tokens:
        raise InvalidRequest(
            f"{name!r} cannot score documents: "
            + (
                "it is an embedding model"
                if model.kind == "embedding"
                else 'its vocabulary has no tokens "yes" and "no"'
            ),
            "Use a Qwen3-VL-Reranker, or compare vectors.",
            param="model",
        )
    if pooling.task == "embed" and model.kind == "reranker":
        raise InvalidRequest(
            f"{name!r} is a reranker: it scores documents and has no vectors",
            "Use /v1/rerank, or serve a Qwen3-VL-Embedding.",
            param="model",
        )
    if pooling.dimensions is not None and not 1 <= pooling.dimensions <= model.dimensions:
        raise InvalidRequest(
            f"dimensions is {pooling.dimensions}; {name!r} has vectors of {model.dimensions}",
            f"Use 1 to {model.dimensions}.",
            param="dimensions",
        )


def build_within(
    build: Callable[[Conversation], Prompt], tokenizer: Tokenizer, conversation: Conversation, context: int
) -> Prompt:
    """``build(conversation)``, with the text that ends it cut so that the prompt is shorter than ``context``.

    Nothing is cut if ``conversation`` does not end in text; the prompt may then be too long.
    """
    conversation = _with_last_text(conversation, lambda text: text[: context * _LONGEST_TOKEN])
    for _ in range(_MAX_CUTS):
        prompt = build(conversation)
        surplus = len(prompt.token_ids) - (context - 1)
        if surplus <= 0:
            break
        shorter = _with_last_text(conversation, partial(_cut, tokenizer, surplus))
        if shorter == conversation:
            break
        conversation = shorter
    return prompt


def _cut(tokenizer: Tokenizer, tokens: int, text: str) -> str:
    """``text`` without its last ``tokens`` tokens."""
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    return text[: offsets[-tokens][0]] if tokens < len(offsets) else ""


def _with_last_text(conversation: Conversation, change: Callable[[str], str]) -> Conversation:
    """``conversation`` with its last part changed, if that is text."""
    last = conversation[-1]
    if not last.parts or not isinstance(last.parts[-1], TextPart):
        return conversation
    changed = TextPart(change(last.parts[-1].text))
    return (*conversation[:-1], replace(last, parts=(*last.parts[:-1], changed)))
