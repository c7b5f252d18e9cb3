"""One request to a model of any architecture: transformers computes, every token is chosen and told by us.

``generate()`` of transformers runs the passes, with whatever cache the architecture wants. What it is given
looks at each row of logits, chooses as ``sampler.py`` does, so that a seed or a form means the same as
with the native engine, and leaves it that one token; and it is asked after each whether to go on.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from vlfit.api.outputs import Chunk, Timings, Usage
from vlfit.api.sampling_params import Form, SamplingParams
from vlfit.backends.transformers.processor_prompts import AnyPrompt
from vlfit.engine.sampling.detokenizer import Detokenizer
from vlfit.engine.sampling.grammar import Constraint, Constraints
from vlfit.engine.sampling.output_processor import Completion, FollowsTokens
from vlfit.engine.sampling.sampler import Draw, Sampled, sample
from vlfit.errors import CheckpointError, InvalidRequest, ModelFailed

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


# The tokenizer of any model: from ids to text while they come, and what answers may end with.
#
# Knows: tokenizers with a ``tokenizers`` object inside, which is nearly all of them, and what is left to do
# with others. Does not know: templates and pictures (``prompts.py``).


_BROKEN = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 16  # tokens before the next one that are decoded with it: no character spans more


class Words:
    """The words of one model. Any thread may ask."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._inside = _inside(tokenizer)
        self._constraints: Constraints | None = None
        self._lock = Lock()
        self.eos_token_ids = eos_token_ids

    def detokenizer(self) -> FollowsTokens:
        """For one completion."""
        return DecodedAnew(self._tokenizer) if self._inside is None else Detokenizer(self._inside)

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are no whole character show as U+FFFD."""
        return str(self._tokenizer.decode([token_id]))

    def constraint(self, form: Form | None) -> Constraint | None:
        """At the beginning of ``form``. Raises ``InvalidRequest`` where no form can be kept to."""
        if form is None:
            return None
        if self._inside is None:
            raise InvalidRequest(
                "answers of a given form need a tokenizer that llguidance reads, and this model's is none "
                f"({type(self._tokenizer).__name__})",
                "leave the form out, or ask for it in words",
                param=form.place,
            )
        with self._lock:
            if self._constraints is None:
                # A copy: transformers changes its own while it works, which no other thread may look at then.
                own = Tokenizer.from_str(self._inside.to_str())
                self._constraints = Constraints(own, sorted(self.eos_token_ids))
        return self._constraints.of(form)


class DecodedAnew:
    """Text of a tokenizer that does not say how it spells: a few tokens are decoded again with each."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._said = 0  # tokens whose text is out

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(_BROKEN):
            return ""
        self._said = len(self._ids)
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._said = len(self._ids)
        return text

    def _new_text(self) -> str:
        first = max(self._said - _WINDOW, 0)
        before = self._decode(self._ids[first : self._said])
        return self._decode(self._ids[first:])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""


def _inside(tokenizer: Any) -> Tokenizer | None:
    """What the tokenizer is built around, if it is of the package ``tokenizers`` and spells as we know."""
    found = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None)
    if not isinstance(found, Tokenizer):
        return None
    try:
        Detokenizer(found)
    except CheckpointError:
        return None
    return found
