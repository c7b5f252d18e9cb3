"""One step of the engine, done so that a failure costs one request: pictures, forward pass, sampling.

Pictures are encoded apart, each on its request's account. A pass over several requests that fails is done
again for each alone, and only who fails then has failed. That is sound because a pass changes nothing before
it is over but slots that it writes anew: the account of cached tokens moves on behind it, and features stay
with their sequence until then. Knows torch's errors. Does not know who is told (``engine.py``) or who runs
next (``scheduler.py``).
"""

import logging
import time
import traceback
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from vlfit.engine.execution.model_runner import Runner
from vlfit.engine.memory.budget import Budget, asked_bytes, is_shortage
from vlfit.engine.sampling.sampler import Draw, Sampled, TokenText, is_plain_greedy, sample
from vlfit.engine.scheduling.scheduler import Work
from vlfit.engine.scheduling.sequence import Sequence
from vlfit.engine.scheduling.speculative import came_true
from vlfit.errors import ModelFailed, OutOfMemory
from vlfit.kernels.sampling.draw import surely_draws
from vlfit.layers.kv_cache import slots_of
from vlfit.units import format_bytes

logger = logging.getLogger(__name__)

SAY_AGAIN_SECONDS = 60.0

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Done:
    """A work that is over; ``sampled`` is None where a prompt goes on. ``more`` comes behind it where guesses
    have come true.
    """

    work: Work
    sampled: Sampled | ModelFailed | None
    more: tuple[Sampled, ...] = ()


@dataclass(slots=True)
class Outcome:
    """``again``: how many passes failed and were done again request by request. ``seconds`` that the pass
    took, where it was one and no picture was encoded for it.
    """

    done: list[Done] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)
    again: int = 0
    seconds: float | None = None


class Passes:
    def __init__(self, runner: Runner, budget: Budget, token_text: TokenText) -> None:
        self.runner = runner
        self.budget = budget
        self._token_text = token_text
        self._said = float("-inf")
        self._looked = False  # whether the pass waits for pictures, which are encoded just before it

    def run(self, batch: Many[Work], *, alike: bool = False) -> Outcome:
        """Do all of ``batch``, which has its decoding sequences first. What fails is told, not raised.

        ``alike``: as far as is known the next batch is of the same sequences. Then its pass is launched
        before the tokens of this one are read, if the device knows what all go on with.
        """
        outcome = Outcome()
        self._looked = False
        ready = [work for work in batch if self._prepared(work, outcome)]
        if not ready:
            return outcome
        began = time.perf_counter()
        found = self._attempt(partial(self._pass, ready, alike), ready, again=True)
        if not isinstance(found, Exception):
            outcome.done = found
            outcome.seconds = None if self._looked else time.perf_counter() - began
        elif len(ready) == 1 and not isinstance(found, OutOfMemory):
            outcome.failed.append((ready[0].sequence, found))
        else:
            outcome.again = 1
            self._one_by_one(ready, outcome)
        for done in outcome.done:
            self.runner.forget(done.work)
        return outcome

    def _prepared(self, work: Work, outcome: Outcome) -> bool:
        """Slots on the device, and pictures encoded. Where there is no memory for it, once more with less."""
        found = self._attempt(partial(self._prepare, work), [work], again=True)
        if isinstance(found, OutOfMemory):
            self._make_room()
            outcome.again += 1
            found = self._attempt(partial(self._prepare, work), [work])
        if isinstance(found, Exception):
            outcome.failed.append((work.sequence, found))
            return False
        return True

    def _prepare(self, work: Work) -> None:
        sequence = work.sequence
        if sequence.slots is None:
            sequence.slots = slots_of(sequence.blocks, self.runner.cache.block_size).to(self.runner.device)
        seen = len(sequence.features)
        self.runner.look(work)
        self._looked |= len(sequence.features) > seen

    def _one_by_one(self, batch: Many[Work], outcome: Outcome) -> None:
        self._make_room()
        for work in batch:
            found = self._attempt(partial(self._pass, [work], alike=False), [work])
            if isinstance(found, Exception):
                outcome.failed.append((work.sequence, found))
            else:
                outcome.done += found

    def _pass(self, batch: Many[Work], alike: bool) -> list[Done]:
        """One forward pass, and a token for whoever has reached the end of its tokens."""
        speaking = [work.sequence for work in batch if work.finishes_prompt]
        if any(work.guesses for work in batch):
            return self._pass_with_guesses(batch)
        scores = self.runner.run(batch)
        if alike and all(_goes_on_by_itself(sequence) for sequence in speaking):
            self.runner.run_ahead(batch)
        tokens, finite, drawn = scores.read()
        wishes = [_draw(sequence) for sequence in speaking]
        sampled = iter(sample(scores.logits, tokens, drawn, wishes, self._token_text))
        usable = iter(finite)
        done = []
        for work in batch:
            token: Sampled | ModelFailed | None = None
            if work.finishes_prompt:
                token = next(sampled)
                if not next(usable):
                    token = _overflow(work.sequence, self.runner.cache.dtype)
            done.append(Done(work, token))
        return done

    def _pass_with_guesses(self, batch: Many[Work]) -> list[Done]:
        """One forward pass of sequences that all decode: what comes next, and as far as it was guessed what
        comes then.
        """
        scores = self.runner.run(batch)
        best, usable, drawn = scores.read()
        done = []
        row = 0
        for work in batch:
            here = slice(row, row + work.length)
            token: Sampled | ModelFailed
            first = slice(row, row + 1)
            told = drawn and drawn[first]
            wish = [_draw(work.sequence)]
            (token,) = sample(scores.logits[first], best[first], told, wish, self._token_text)
            # An answer that must have a form may not go on with the likeliest token.
            agreed = token.token_id == best[row]
            if not usable[row]:
                token, agreed = _overflow(work.sequence, self.runner.cache.dtype), False
            right = came_true(work.guesses, best[here], usable[here]) if agreed else 0
            done.append(Done(work, token, tuple(map(Sampled, best[row + 1 : row + 1 + right]))))
            row += work.length
        return done

    def _attempt(
        self, do: Callable[[], Found], batch: Many[Work], *, again: bool = False
    ) -> Found | Exception:
        """What ``do`` gives or raises; after a failure nothing of it lives on, nor has it been.

        ``again``: where memory was short it is done once more, with what was kept only to save time.
        """
        try:
            with torch.inference_mode():
                return do()
        except Exception as error:
            failure = self._told(error, batch, again)
            # A traceback holds its frames, and they hold the tensors of a pass, for as long as somebody
            # keeps the error.
            drop_tracebacks(error)
        return failure

    def _told(self, error: Exception, batch: Many[Work], again: bool) -> Exception:
        """What a request is told of ``error``, with numbers where memory was short; and the log."""
        who = _in_words(batch)
        if not is_shortage(error):
            logger.error("a pass failed for %s:\n%s", who, "".join(traceback.format_exception(error)))
            return error
        asked = asked_bytes(error)
        wanted = f"{format_bytes(asked)} were asked for" if asked is not None else str(error).splitlines()[0]
        place = "RAM" if self.budget.device.type == "cpu" else "the GPU"
        message = f"{place} is out of memory: {wanted}, {self.budget.shortage()}, for {who}"
        self._log(message, batch, again)
        return OutOfMemory(
            message,
            "send fewer or smaller pictures or less text, or try again; or start with a smaller --context, "
            "--image-tokens or --chunk",
        )

    def _log(self, message: str, batch: Many[Work], again: bool) -> None:
        """A batch that is done again, request by request, may be so at every step: said once in a while."""
        now = time.perf_counter()
        if len(batch) > 1:
            if now - self._said < SAY_AGAIN_SECONDS:
                return
            self._said = now
            message += "; done again request by request"
        elif again:
            message += "; done again with the memory of what only saves time"
        logger.warning("%s", message)

    def _make_room(self) -> None:
        """Give back what only saves time."""
        self.runner.image_cache.clear()
        if self.runner.recorded is not None:
            self.runner.recorded.release()
        self.budget.release()


def drop_tracebacks(error: BaseException | None) -> None:
    """Let go of the frames in which ``error``, and what led to it, came about, and of what they hold."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _in_words(batch: Many[Work]) -> str:
    tokens = sum(work.length for work in batch)
    requests = f"{len(batch)} requests" if len(batch) > 1 else "a request"
    pictures = sum(image.tokens for work in batch for image in work.sequence.prompt.images)
    seen = f", {pictures} tokens of pictures" if pictures else ""
    longest = max(work.sequence.cached + work.length for work in batch)
    return f"{tokens} tokens of {requests} (context so far {longest}{seen})"


def _overflow(sequence: Sequence, dtype: torch.dtype) -> ModelFailed:
    at = len(sequence.generated) + 1
    return ModelFailed(
        f"the model computed no usable numbers (NaN or infinity) for token {at} of its answer, in {dtype}",
        "try --dtype bfloat16 or float32 if this is float16; else the checkpoint is damaged: fetch it again",
    )


def _goes_on_by_itself(sequence: Sequence) -> bool:
    """Whether the device knows its next token, and it is not its last for being as many as were asked for.

    Where the host may have to draw from this pass's logits, no other may write over them.
    """
    known = is_plain_greedy(sequence.sampling) or surely_draws(sequence.sampling)
    return known and len(sequence.generated) + 1 < sequence.max_tokens


def _draw(sequence: Sequence) -> Draw:
    return Draw(
        sequence.sampling,
        sequence.prompt.token_ids,
        sequence.generated,
        sequence.seed,
        sequence.position + 1,
        sequence.constraint,
    )
