"""One request to a model of any architecture: transformers computes, every token is chosen and told by us.

``generate()`` of transformers runs the passes, with whatever cache the architecture wants. What it is given
looks at each row of logits, chooses as ``engine/sampler.py`` does, so that a seed or a form means the same as
with the native engine, and leaves it that one token; and it is asked after each whether to go on.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vlfit.engine.answer import Chunk, Timings, Usage
from vlfit.engine.any_model.prompts import AnyPrompt
from vlfit.engine.completion import Completion
from vlfit.engine.constraint import Constraint
from vlfit.engine.sampler import Draw, Sampled, sample
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import ModelFailed

Listener = Callable[[Chunk | Exception], None]
Told = Callable[[int, float], None]


@dataclass(eq=False, slots=True)
class Request:
    """One completion. Times are those of ``time.perf_counter``; ``asked`` is when its preparation began."""

    prompt: AnyPrompt
    sampling: SamplingParams
    max_tokens: int
    completion: Completion
    listener: Listener
    seed: int
    constraint: Constraint | None
    asked: float
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    generated: list[int] = field(default_factory=list)
    cancelled: bool = False

    @property
    def tokens(self) -> int:
        """So far, prompt and completion."""
        return self.prompt.tokens + len(self.generated)

    def last(self, chunk: Chunk) -> Chunk:
        """``chunk`` as the end of it: with what it cost and how long it took."""
        now = time.perf_counter()
        usage = Usage(self.prompt.tokens, self.prompt.image_tokens, len(self.generated))
        timings = Timings(
            queued_s=(self.started or now) - self.arrived,
            first_token_s=(self.first_token or now) - self.asked,
            total_s=now - self.asked,
            completion_tokens=len(self.generated),
        )
        return Chunk(chunk.text, chunk.logprobs, chunk.finish_reason, usage, timings)


def run(
    model: Any,
    device: torch.device,
    dtype: torch.dtype,
    request: Request,
    token_text: Callable[[int], str],
    told: Told,
    stopping: Callable[[], bool],
) -> Chunk:
    """Let ``model`` answer ``request``. Its listener gets each chunk but the last, which is given back.

    ``told`` is called after each pass with the tokens of the prompt that it computed, and its seconds.
    ``stopping``: whether the request is to end early, as a cancelled one does. Raises what the model raises.
    """
    turn = _Turn(request, token_text, told, stopping)
    inputs = {name: _moved(value, device, dtype) for name, value in request.prompt.inputs.items()}
    model.generate(
        **inputs,
        max_new_tokens=request.max_tokens,
        logits_processor=[turn.choose],
        stopping_criteria=[turn.ended],
    )
    if turn.last is None:
        raise ModelFailed("the model stopped without an end", "try again; report it if it stays so")
    return turn.last


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


class _Turn:
    """What ``generate()`` calls at each token."""

    def __init__(
        self, request: Request, token_text: Callable[[int], str], told: Told, stopping: Callable[[], bool]
    ) -> None:
        self._request = request
        self._token_text = token_text
        self._told = told
        self._stopping = stopping
        self._chosen = Sampled(0)
        self._before = time.perf_counter()
        self.last: Chunk | None = None

    def choose(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores`` [1, vocabulary] with nothing left but the token that is chosen."""
        row = scores[0].float()
        value, likeliest = row.max(-1)
        if not torch.isfinite(value):
            raise ModelFailed(
                "the model computed NaN or infinity instead of words",
                "in float16 large models may: use --dtype bfloat16 or float32; else the weights are broken",
            )
        request, wished = self._request, self._request.sampling
        alters = wished.penalizes or request.constraint is not None
        if wished.greedy and not alters and wished.top_logprobs is None:
            self._chosen = Sampled(int(likeliest))
        else:  # on the CPU, where choosing needs no kernels: a row of words, not of the model
            draw = Draw(
                wished,
                request.prompt.token_ids,
                request.generated,
                request.seed,
                request.tokens,
                request.constraint,
            )
            tokens = [int(likeliest)]
            [self._chosen] = sample(row[None].cpu(), tokens, None, [draw], self._token_text)
        only = torch.full_like(scores, float("-inf"))
        only[0, self._chosen.token_id] = 0.0
        return only

    def ended(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """Tell of the token that was chosen. [1]: whether it is the last."""
        request, now = self._request, time.perf_counter()
        self._told(0 if request.generated else request.prompt.tokens, now - self._before)
        self._before = now
        if request.first_token is None:
            request.first_token = now
        request.generated.append(self._chosen.token_id)
        if request.constraint is not None:
            request.constraint.take(self._chosen.token_id)
        if self._stopping():
            self.last = request.last(Chunk("", finish_reason="cancelled"))
        else:
            chunk = request.completion.add(self._chosen.token_id, self._chosen.logprobs)
            if chunk.finish_reason is not None:
                self.last = request.last(chunk)
            else:
                self._tell(chunk)
        return torch.tensor([self.last is not None], device=input_ids.device)

    def _tell(self, chunk: Chunk) -> None:
        """A listener that fails has gone away: its request ends."""
        try:
            self._request.listener(chunk)
        except Exception:
            self._request.cancelled = True
