"""A copy of a model beside the widest one: distributions along its answers, boxes, words and counts.

The widest copy answers every question greedily, and its tokens and logits are kept. Each other copy, in an
engine of its own, is then made to say the same tokens, so that every position has the same past in both, and
answers by itself where the answer is looked at. Engines follow one another: one at a time is in memory.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.engine import NativeEngine
from vlfit.engine.sampling.sampler import StepOutput
from vlfit.engine.scheduling.sequence import ScheduledChunk
from vlfit.errors import UsageError
from vlfit.parity.questions import CopyFigures, Question, figures_of

# Of the widest copy's log probabilities that are kept; later positions of each answer count for top 1 alone.
KEPT_BYTES = 256 * 2**20
_JUDGED = ("boxes", "words", "count")  # kinds whose own answers are compared


@dataclass(frozen=True)
class Original:
    """What the widest copy said, by question: token ids of prompt and answer, and the answer's text.

    ``logs``: log probabilities [positions, vocabulary] along the answers.
    """

    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    logs: tuple[Tensor, ...]

    @property
    def positions(self) -> int:
        return sum(len(each) for each in self.logs)


def ask_original(engine: NativeEngine, questions: Sequence[Question]) -> tuple[Original, CopyFigures]:
    """Answers of the widest copy, greedily and one at a time, and its figures beside itself.

    RAM: ``KEPT_BYTES`` at most. Raises what a request of ``engine`` raises.
    """
    vocabulary = engine.checkpoint.config.text.vocab_size
    most = max(KEPT_BYTES // (4 * vocabulary * max(len(questions), 1)), 1)
    prompts, tokens, texts, logs = [], [], [], []
    for question in questions:
        rows: list[Tensor] = []

        def keep(step: int, row: Tensor, rows: list[Tensor] = rows) -> None:
            if step < most:
                rows.append(row.log_softmax(-1))

        prompt, generated = _answer(engine, question, keep)
        prompts.append(prompt)
        tokens.append(generated)
        texts.append(_text(engine, generated))
        logs.append(torch.stack(rows))
    original = Original(tuple(prompts), tuple(tokens), tuple(texts), tuple(logs))
    total = sum(map(len, tokens))
    zeros = [0.0] * original.positions
    return original, figures_of(questions, texts, texts, zeros, total, total, same_prompt=True)


def ask_copy(engine: NativeEngine, questions: Sequence[Question], original: Original) -> CopyFigures:
    """Figures of another copy beside ``original``, which was asked the same ``questions``.

    Raises ``UsageError`` if the two have not the same vocabulary, and what a request of ``engine`` raises.
    """
    divergences: list[float] = []
    agreed, total, same_prompt = 0, 0, True
    texts: list[str] = []
    for index, question in enumerate(questions):
        forced, theirs = original.tokens[index], original.logs[index]
        chosen: list[int] = []

        def keep(step: int, row: Tensor, theirs: Tensor = theirs, chosen: list[int] = chosen) -> None:
            chosen.append(int(row.argmax()))
            if step < len(theirs):
                divergences.append(divergence(theirs[step], row))

        prompt, generated = _answer(engine, question, keep, forced)
        if generated != forced:
            raise UsageError(
                f"{engine.checkpoint.name} could not be made to say the widest copy's tokens",
                "Compare copies of one model, with one tokenizer.",
            )
        same_prompt &= prompt == original.prompts[index]
        agreed += sum(mine == right for mine, right in zip(chosen, forced, strict=True))
        total += len(forced)
        if question.kind not in _JUDGED or tuple(chosen) == forced:
            texts.append(original.texts[index])  # a greedy answer of its own would be the same
        else:
            texts.append(_text(engine, _answer(engine, question, None)[1]))
    return figures_of(questions, texts, original.texts, divergences, agreed, total, same_prompt=same_prompt)


def divergence(logs: Tensor, logits: Tensor) -> float:
    """Kullback-Leibler divergence in nats of softmax(``logits``) from exp(``logs``), log probabilities.

    Of vocabularies padded to different widths the common part counts. 0 if rounding made it negative.
    """
    width = min(len(logs), len(logits))
    right, mine = (each[:width].double().log_softmax(-1) for each in (logs, logits))
    return max(float((right.exp() * (right - mine)).sum()), 0.0)


def _text(engine: NativeEngine, tokens: Sequence[int]) -> str:
    return str(engine.prompts.tokenizer.decode(list(tokens)))


def _answer(
    engine: NativeEngine, question: Question, keep: Any, forced: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The prompt's and the answer's tokens; ``keep``: called with each step's number and logits, or None.

    ``forced``: tokens that the engine is made to say, whatever it would have chosen.
    """
    params = SamplingParams(
        max_tokens=question.tokens if forced is None else len(forced), ignore_eos=forced is not None
    )
    prepared = engine.prepare(question.conversation, params)
    errors: list[Exception] = []

    def listen(item: Chunk | Exception) -> None:
        if isinstance(item, Exception):
            errors.append(item)

    sequence = engine.make_request(prepared, params, listen)
    with _watching(engine, keep, forced):
        engine.submit(sequence)
        while engine.busy:
            engine.step()
    if errors:
        raise errors[0]
    return tuple(sequence.prompt.token_ids.tolist()), tuple(sequence.generated)


@contextmanager
def _watching(engine: NativeEngine, keep: Any, forced: Sequence[int] | None) -> Any:
    """Pass logits of the only request on to ``keep``, and put ``forced`` in place of the chosen tokens."""
    runner, step = engine.runner, 0
    run = runner.run

    def watched(batch: list[ScheduledChunk]) -> StepOutput:
        nonlocal step
        output = run(batch)
        if any(chunk.needs_sampling for chunk in batch):
            if keep is not None:
                keep(step, output.logits[0].detach().float().cpu())
            if forced is not None:
                output.summary[0, 0] = forced[step]
            step += 1
        return output

    runner.run = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner.run
