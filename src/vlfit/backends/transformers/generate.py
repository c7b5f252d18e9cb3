"""Requests under transformers' ``generate()``: it runs the forward passes, tokens are chosen here.

``generate()`` keeps whatever cache the architecture wants. Its logits processor samples as the native engine
does, so that a seed or a grammar gives the same tokens under both, and masks every token but the sampled one.
Its stopping criterion delivers that token and decides whether to go on.
"""

import time
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import Grammar
from vlfit.engine.request import Request
from vlfit.engine.sampling.detokenizer import Detokenizer
from vlfit.engine.sampling.grammar import GrammarCompiler, GrammarMatcher
from vlfit.engine.sampling.output_processor import IncrementalDetokenizer
from vlfit.engine.sampling.sampler import SampledToken, SamplingRow, sample_on_host
from vlfit.errors import CheckpointError, InvalidRequest, ModelFailed

RecordStep = Callable[[int, float], None]  # (prompt tokens computed, 0 after the first pass; seconds)


def generate(
    model: Any,
    device: torch.device,
    dtype: torch.dtype,
    request: Request,
    token_text: Callable[[int], str],
    record_step: RecordStep,
    should_stop: Callable[[], bool],
) -> Chunk:
    """Run ``request`` on ``model`` to its end. Its listener gets every chunk but the last, which is returned.

    ``token_text``: returns the text of a token, for logprobs. ``record_step`` is called after each forward
    pass. ``should_stop`` is called after each token: if true, the request ends with the finish reason
    ``cancelled``. Raises ``ModelFailed``, and what the model's code raises.
    """
    callbacks = _Callbacks(request, token_text, record_step, should_stop)
    inputs = {name: _on_device(value, device, dtype) for name, value in request.prompt.inputs.items()}
    model.generate(
        **inputs,
        max_new_tokens=request.max_tokens,
        logits_processor=[callbacks.sample_token],
        stopping_criteria=[callbacks.deliver_token],
    )
    if callbacks.final_chunk is None:
        raise ModelFailed(
            "the model stopped before its last token", "Try again, and report it if it happens again."
        )
    return callbacks.final_chunk


def _on_device(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


class _Callbacks:
    """What ``generate()`` calls at each token: ``sample_token``, then ``deliver_token``."""

    def __init__(
        self,
        request: Request,
        token_text: Callable[[int], str],
        record_step: RecordStep,
        should_stop: Callable[[], bool],
    ) -> None:
        self._request = request
        self._token_text = token_text
        self._record_step = record_step
        self._should_stop = should_stop
        self._sampled = SampledToken(0)
        self._step_began = time.perf_counter()
        self.final_chunk: Chunk | None = None

    def sample_token(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores`` [1, vocabulary] with every token masked but the sampled one."""
        row = scores[0].float()
        value, argmax = row.max(-1)
        if not torch.isfinite(value):
            raise ModelFailed(
                "the model computed NaN or infinity instead of logits",
                "Large models may overflow in float16: use --dtype bfloat16 or float32. Else the weights "
                "are broken.",
            )
        request, params = self._request, self._request.params
        masked = params.has_penalties or request.grammar_matcher is not None
        if params.greedy and not masked and params.top_logprobs is None:
            self._sampled = SampledToken(int(argmax))
        else:  # on the CPU, which needs no kernels for one row
            sampling_row = SamplingRow(
                params,
                request.prompt.token_ids,
                request.generated,
                request.seed,
                request.num_tokens,
                request.grammar_matcher,
            )
            [self._sampled] = sample_on_host(
                row[None].cpu(), [int(argmax)], None, [sampling_row], self._token_text
            )
        only = torch.full_like(scores, float("-inf"))
        only[0, self._sampled.token_id] = 0.0
        return only

    def deliver_token(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """Deliver the sampled token. Returns a bool tensor [1]: whether it is the last."""
        request, now = self._request, time.perf_counter()
        self._record_step(0 if request.generated else request.prompt.num_tokens, now - self._step_began)
        self._step_began = now
        request.first_token_at = request.first_token_at or now
        request.generated.append(self._sampled.token_id)
        if request.grammar_matcher is not None:
            request.grammar_matcher.accept_token(self._sampled.token_id)
        if self._should_stop():
            self.final_chunk = request.final_chunk(Chunk("", finish_reason="cancelled"))
        else:
            chunk = request.completion.add(self._sampled.token_id, self._sampled.logprobs)
            if chunk.finish_reason is not None:
                self.final_chunk = request.final_chunk(chunk)
            else:
                self._send(chunk)
        return torch.tensor([self.final_chunk is not None], device=input_ids.device)

    def _send(self, chunk: Chunk) -> None:
        """A listener that raises has gone away: its request ends."""
        try:
            self._request.listener(chunk)
        except Exception:
            self._request.cancelled = True


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 16  # decoded before the next one: no character spans more


class ModelTokenizer:
    """Detokenizers, token texts and grammar matchers from a transformers ``tokenizer``. Thread-safe."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._fast_tokenizer = _fast_tokenizer(tokenizer)
        self._grammar_compiler: GrammarCompiler | None = None
        self._lock = Lock()
        self.eos_token_ids = eos_token_ids

    def detokenizer(self) -> IncrementalDetokenizer:
        """A new streaming detokenizer, for one completion."""
        if self._fast_tokenizer is None:
            return WindowDetokenizer(self._tokenizer)
        return Detokenizer(self._fast_tokenizer)

    def token_text(self, token_id: int) -> str:
        """The text of one token; bytes that are no whole character become U+FFFD."""
        return str(self._tokenizer.decode([token_id]))

    def grammar_matcher(self, grammar: Grammar | None) -> GrammarMatcher | None:
        """A new matcher for ``grammar``, for one completion; None for no grammar.

        Raises ``InvalidRequest`` for an invalid grammar, or if llguidance cannot read the tokenizer.
        """
        if grammar is None:
            return None
        if self._fast_tokenizer is None:
            raise InvalidRequest(
                "structured output needs a tokenizer that llguidance can read, and this model's cannot be "
                f"({type(self._tokenizer).__name__})",
                "Leave the format out, or describe it in the prompt.",
                param=grammar.place,
            )
        with self._lock:
            if self._grammar_compiler is None:
                # A copy: transformers changes its tokenizer while it works.
                copy = Tokenizer.from_str(self._fast_tokenizer.to_str())
                self._grammar_compiler = GrammarCompiler(copy, sorted(self.eos_token_ids))
        return self._grammar_compiler.make_matcher(grammar)


class WindowDetokenizer:
    """A streaming detokenizer for any tokenizer: decodes the last few tokens again with each new one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_delivered = 0  # tokens whose text was returned

    def add(self, token_id: int) -> str:
        """Add a token; return the text that it completes, "" within a character."""
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT):
            return ""
        self._num_delivered = len(self._ids)
        return text

    def flush(self) -> str:
        """The text that ``add`` has held back, with U+FFFD for an incomplete character. Call at the end."""
        text = self._new_text()
        self._num_delivered = len(self._ids)
        return text

    def _new_text(self) -> str:
        first = max(self._num_delivered - _CONTEXT_TOKENS, 0)
        before = self._decode(self._ids[first : self._num_delivered])
        return self._decode(self._ids[first:])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""


def _fast_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """The ``tokenizers`` object inside, if there is one and ``Detokenizer`` can follow it."""
    fast = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None)
    if not isinstance(fast, Tokenizer):
        return None
    try:
        Detokenizer(fast)
    except CheckpointError:
        return None
    return fast
