"""One engine step with fault isolation: encode images, forward pass, sample; a failure costs one request.

Images are encoded one request at a time. If a pass over several requests fails, each is run alone and only
those that fail again have failed. A failed pass has changed only KV slots, and the retry overwrites those:
cached token counts advance after a pass, and features stay with their sequence until then. Where layers keep
states, a failed pass may have changed those: before the retry they are computed again, from the first token.
"""

import logging
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from vlfit.api.pooling import Vector
from vlfit.engine.execution.model_runner import ModelRunner
from vlfit.engine.memory.budget import Budget, is_out_of_memory, requested_bytes
from vlfit.engine.sampling.sampler import (
    SampledToken,
    SamplingRow,
    TokenText,
    is_plain_greedy,
    sample_on_host,
)
from vlfit.engine.sampling.verification import verify_draft
from vlfit.engine.scheduling.sequence import Draft, ScheduledChunk, Sequence
from vlfit.errors import ModelFailed, OutOfMemory, VlfitError
from vlfit.kernels.sampling.draw import always_samples_on_gpu
from vlfit.units import counted, format_bytes

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Result of a chunk that ran.

    ``sampled``: the sequence's next token; None in the middle of a prompt; ``ModelFailed`` if the logits are
    not finite. ``accepted``: the tokens after ``sampled``, one for each accepted draft token. ``pooled``: the
    result of a pooled request whose prompt ends in the chunk.
    """

    chunk: ScheduledChunk
    sampled: SampledToken | ModelFailed | None
    accepted: tuple[SampledToken, ...] = ()
    pooled: Vector | None = None


@dataclass(slots=True)
class StepResult:
    """Result of a step: ``results`` of the chunks that ran, and ``failed`` sequences with their errors.

    ``num_retries``: image encodings and forward passes that were retried after a failure. ``seconds``: time
    of the forward pass; None if it failed, or if images were encoded in the step.
    """

    results: list[ChunkResult] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)
    num_retries: int = 0
    seconds: float | None = None


class StepExecutor:
    """Runs batches on the model runner; an exception fails only the requests that cause it.

    ``token_text``: text of a token id, for logprobs. ``max_num_batched_tokens``: most tokens of a pass.
    """

    def __init__(
        self, runner: ModelRunner, budget: Budget, token_text: TokenText, max_num_batched_tokens: int = 256
    ) -> None:
        self.runner = runner
        self._max_num_batched_tokens = max_num_batched_tokens
        self.budget = budget
        self._token_text = token_text
        self._last_logged = float("-inf")
        self._encoded_images = False  # in this step, so that its time is not that of a pass

    def run(
        self,
        batch: list[ScheduledChunk],
        *,
        expect_same_batch: bool = False,
        encode_seconds: float = math.inf,
    ) -> StepResult:
        """Encode images, run a forward pass over ``batch`` and sample. Failures are returned, not raised.

        Order of ``batch``: as for ``ModelRunner.run``. ``expect_same_batch``: the next batch probably has the
        same sequences, so its forward pass is launched before the tokens of this one are read, provided that
        the device chooses all of these. ``encode_seconds``: after so long no further image is encoded, but
        one at least, and chunks end before it. Does not ``advance`` the sequences.
        """
        result = StepResult()
        self._encoded_images = False
        encode_until = time.perf_counter() + encode_seconds
        prepared = (self._try_prepare(chunk, result, encode_until) for chunk in batch)
        ready = [chunk for chunk in prepared if chunk is not None and chunk.num_tokens]
        if not ready:
            return result
        expect_same_batch &= len(ready) == len(batch)
        began = time.perf_counter()
        outcome = self._attempt(partial(self._forward, ready, expect_same_batch), ready, retry=True)
        if not isinstance(outcome, Exception):
            result.results = outcome
            result.seconds = None if self._encoded_images else time.perf_counter() - began
        elif len(ready) == 1 and not isinstance(outcome, OutOfMemory):
            result.failed.append((ready[0].sequence, outcome))
        else:
            result.num_retries = 1
            self._isolate(ready, result)
        for chunk_result in result.results:
            self.runner.release_images(chunk_result.chunk)
        return result

    def draft(self, batch: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """``batch`` with tokens drafted by the draft model where ``wanted_drafts``.

        If that fails, it is logged, its sequences get no more drafts of it, and ``batch`` has none.
        """
        if not any(chunk.wanted_drafts for chunk in batch):
            return batch
        outcome = self._attempt(partial(self.runner.draft, batch), batch)
        if not isinstance(outcome, Exception):
            return outcome
        for chunk in batch:
            chunk.sequence.draft_rows = None
        return [replace(chunk, wanted_drafts=0) for chunk in batch]

    def finish_drafts(self, sequence: Sequence) -> None:
        """Have the draft model store what is missing of ``sequence``, which ends. A failure is logged."""
        drafter = self.runner.drafter
        if drafter is not None and sequence.is_decoding and sequence.slot_mapping is not None:
            self._attempt(partial(drafter.finish, sequence), [ScheduledChunk(sequence, 1)])

    def _try_prepare(
        self, chunk: ScheduledChunk, result: StepResult, encode_until: float
    ) -> ScheduledChunk | None:
        """Build the slot mapping and encode images; once more after freeing caches if memory is short.

        Returns the part of ``chunk`` that can be computed, perhaps 0 tokens; None if it failed.
        """
        prepare = partial(self._prepare, chunk, encode_until)
        outcome = self._attempt(prepare, [chunk], retry=True)
        if isinstance(outcome, OutOfMemory):
            self._free_caches()
            result.num_retries += 1
            outcome = self._attempt(prepare, [chunk])
        if isinstance(outcome, Exception):
            result.failed.append((chunk.sequence, outcome))
            return None
        return chunk if outcome == chunk.num_tokens else replace(chunk, num_tokens=outcome)

    def _prepare(self, chunk: ScheduledChunk, encode_until: float) -> int:
        """Prepare ``chunk``. Returns how many of its tokens have all that their forward pass needs."""
        sequence = chunk.sequence
        self.runner.build_slots(sequence)
        num_features = len(sequence.features)
        num_tokens = self.runner.encode_images(chunk, encode_until, at_least_one=not self._encoded_images)
        self._encoded_images |= len(sequence.features) > num_features
        return num_tokens

    def _isolate(self, batch: list[ScheduledChunk], result: StepResult) -> None:
        """Run each request of a failed batch alone."""
        self._free_caches()
        for chunk in batch:
            outcome = self._attempt(partial(self._run_alone, chunk), [chunk])
            if isinstance(outcome, Exception):
                result.failed.append((chunk.sequence, outcome))
            else:
                result.results += outcome

    def _run_alone(self, chunk: ScheduledChunk) -> list[ChunkResult]:
        """Run ``chunk`` after a failed pass. States are computed again, up to its first token."""
        sequence, end = chunk.sequence, chunk.sequence.num_cached_tokens
        if self.runner.cache.states and end:
            sequence.num_cached_tokens = sequence.pending_tokens = 0
            while sequence.num_cached_tokens < end:
                count = min(self._max_num_batched_tokens, end - sequence.num_cached_tokens)
                part = ScheduledChunk(sequence, count)
                self.runner.encode_images(part)
                self.runner.run([part])
                self.runner.release_images(part)
                sequence.num_cached_tokens += count
            self.runner.encode_images(chunk)
        return self._forward([chunk], expect_same_batch=False)

    def _forward(self, batch: list[ScheduledChunk], expect_same_batch: bool) -> list[ChunkResult]:
        """One forward pass; a token for each chunk that reaches the end of its sequence."""
        sampling_sequences = [chunk.sequence for chunk in batch if chunk.needs_sampling]
        if any(chunk.draft_tokens for chunk in batch):
            return self._verify(batch)
        output = self.runner.run(batch)
        if expect_same_batch and all(_sampled_on_device(sequence) for sequence in sampling_sequences):
            self.runner.launch_next(batch)
        tokens, is_finite, chosen_on_device = output.read()
        sampling_rows = [_sampling_row(sequence) for sequence in sampling_sequences]
        sampled = iter(
            sample_on_host(output.logits, tokens, chosen_on_device, sampling_rows, self._token_text)
        )
        finite_flags = iter(is_finite)
        pooled = iter(output.read_pooled())
        results = []
        for chunk in batch:
            token: SampledToken | ModelFailed | None = None
            vector: Vector | None = None
            if chunk.needs_sampling:
                token = next(sampled)
                if not next(finite_flags):
                    token = _nonfinite(chunk.sequence, self.runner.cache.dtype)
            elif chunk.needs_pooling:
                vector = next(pooled)
                if not np.isfinite(vector).all():
                    token, vector = _nonfinite(chunk.sequence, self.runner.cache.dtype), None
            results.append(ChunkResult(chunk, token, pooled=vector))
        return results

    def _verify(self, batch: list[ScheduledChunk]) -> list[ChunkResult]:
        """One forward pass over decoding sequences with draft tokens: sample, then accept matching drafts."""
        output = self.runner.run(batch)
        tokens, is_finite, chosen_on_device = output.read()
        results = []
        begin = 0
        for chunk in batch:
            rows = slice(begin, begin + chunk.num_tokens)
            begin = rows.stop
            sampled = verify_draft(
                output.logits[rows],
                tokens[rows],
                is_finite[rows],
                chosen_on_device[rows] if chosen_on_device is not None else None,
                _sampling_row(chunk.sequence),
                Draft(chunk.draft_tokens, chunk.draft_probabilities),
                self._token_text,
            )
            first = sampled[0] if sampled else _nonfinite(chunk.sequence, self.runner.cache.dtype)
            results.append(ChunkResult(chunk, first, tuple(sampled[1:])))
        return results

    def _attempt(
        self, run: Callable[[], T], batch: list[ScheduledChunk], *, retry: bool = False
    ) -> T | Exception:
        """Result of ``run``, or its exception without traceback.

        ``retry``: only for the log, whether a failure for lack of memory is tried again.
        """
        try:
            with torch.inference_mode():
                return run()
        except Exception as error:
            failure = self._describe(error, batch, retry)
            # A traceback keeps its frames alive, and with them the tensors of a pass.
            drop_tracebacks(error)
        return failure

    def _describe(self, error: Exception, batch: list[ScheduledChunk], retry: bool) -> Exception:
        """Log ``error`` and return the one for the request, with numbers if memory was short."""
        requests = _describe_batch(batch)
        if not is_out_of_memory(error):
            if isinstance(error, VlfitError) and error.http_status < 500:
                return error  # the request's own fault, such as a grammar that allows no next token
            logger.error("a pass failed for %s:\n%s", requests, "".join(traceback.format_exception(error)))
            return error
        requested = requested_bytes(error)
        reason = (
            f"{format_bytes(requested)} were requested"
            if requested is not None
            else str(error).splitlines()[0]
        )
        memory = "RAM" if self.budget.device.type == "cpu" else "the GPU"
        message = f"{memory} is out of memory: {reason}, {self.budget.describe_free()}, for {requests}"
        self._log_out_of_memory(message, batch, retry)
        return OutOfMemory(
            message,
            "Send fewer or smaller images or less text, or try again; or start with a smaller --context, "
            "--image-tokens or --chunk.",
        )

    def _log_out_of_memory(self, message: str, batch: list[ScheduledChunk], retry: bool) -> None:
        """Log once in a while: a batch may have to be isolated in every step."""
        now = time.perf_counter()
        if len(batch) > 1:
            if now - self._last_logged < LOG_INTERVAL_SECONDS:
                return
            self._last_logged = now
            message += "; running each request alone"
        elif retry:
            message += "; retrying after freeing caches"
        logger.warning("%s", message)

    def _free_caches(self) -> None:
        """Free memory that only saves time."""
        self.runner.encoder_cache.clear()
        if self.runner.encoder_graph is not None:
            self.runner.encoder_graph.release()
        self.budget.release()


def drop_tracebacks(error: BaseException | None) -> None:
    """Clear the tracebacks of ``error`` (None: nothing) and its causes: their frames keep tensors alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _describe_batch(batch: list[ScheduledChunk]) -> str:
    tokens = sum(chunk.num_tokens for chunk in batch)
    requests = counted(len(batch), "request")
    image_tokens = sum(image.tokens for chunk in batch for image in chunk.sequence.prompt.images)
    images = f", {counted(image_tokens, 'image token')}" if image_tokens else ""
    longest = max(chunk.sequence.num_cached_tokens + chunk.num_tokens for chunk in batch)
    return f"{counted(tokens, 'token')} of {requests} (context so far {longest}{images})"


def _nonfinite(sequence: Sequence, dtype: torch.dtype) -> ModelFailed:
    at = "its vector" if sequence.pooling else f"token {len(sequence.generated) + 1} of its answer"
    return ModelFailed(
        f"the model computed no usable numbers (NaN or infinity) for {at}, in {dtype}",
        "Try --dtype bfloat16 or float32 if this is float16; else the checkpoint is damaged: fetch it again.",
    )


def _sampled_on_device(sequence: Sequence) -> bool:
    """Whether the device chooses the next token, and the answer does not end with it by ``max_tokens``.

    If the host may have to sample from this pass's logits, the next pass must not overwrite them.
    """
    chosen_on_device = is_plain_greedy(sequence.params) or always_samples_on_gpu(sequence.params)
    return chosen_on_device and len(sequence.generated) + 1 < sequence.max_tokens


def _sampling_row(sequence: Sequence) -> SamplingRow:
    return SamplingRow(
        sequence.params,
        sequence.prompt.token_ids,
        sequence.generated,
        sequence.seed,
        sequence.position + 1,
        sequence.grammar_matcher,
    )
