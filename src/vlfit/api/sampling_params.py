"""Sampling parameters of a completion, with OpenAI's and vLLM's names and ranges. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vlfit.checkpoint.processor_files import GenerationDefaults
from vlfit.errors import InvalidRequest

MAX_TOP_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5  # lower ones mean greedy, as in vLLM
MAX_SEED = 2**63 - 17  # 64 bits with sign, minus the choices of one request, whose seeds are consecutive


# llguidance options for JSON in one line: with free whitespace, an undecided model may write it for ever.
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True, slots=True)
class Grammar:
    """Structured output. ``text``: a JSON schema, or for the kind ``grammar`` llguidance's Lark syntax.

    ``place``: the request field that held it, for ``param`` of errors; None if unknown. ``wire``: the OpenAI
    request fields for the same output from a remote server that does not take the grammar; None if no fields
    can express it.
    """

    kind: Literal["json", "grammar"]
    text: str
    place: str | None = field(default=None, compare=False)
    wire: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one completion. Raises ``InvalidRequest`` (with ``param``) for a value out of range.

    ``temperature`` 0 is greedy. A value below ``MIN_TEMPERATURE`` is set to 0, as dividing logits by it would
    overflow float32. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    ``max_tokens`` None: the engine's default, or what is left of the context if that is less.
    ``top_logprobs`` None: no logprobs; 0: of the sampled token only; k: also of the k likeliest tokens.
    ``loop_guard``: stop a completion that repeats itself (finish reason ``loop``).
    ``grammar``: sample only tokens that continue valid output; penalties and temperature apply to those.
    ``template_variables``: a JSON object of variables for the chat template; None: none. It shapes the
    prompt, so ``prepare`` reads it and sampling does not.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    loop_guard: bool = False
    grammar: Grammar | None = None
    template_variables: str | None = None

    @classmethod
    def from_defaults(cls, defaults: GenerationDefaults) -> "SamplingParams":
        """Parameters from a checkpoint's generation config: greedy unless it sets ``do_sample``.

        The repetition penalty is taken over in both cases, as in transformers. Stop tokens and
        ``max_new_tokens`` are not.
        """
        if not defaults.do_sample:
            return cls(repetition_penalty=defaults.repetition_penalty)
        return cls(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        )

    def __post_init__(self) -> None:
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        self._check("temperature", 0.0 <= self.temperature <= 2.0, "between 0 and 2")
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        self._check("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        self._check("top_k", self.top_k >= 0, "0 (off) or more")
        self._check("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        self._check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2")
        self._check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2")
        self._check("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "above 0 and at most 10")
        self._check("seed", self.seed is None or abs(self.seed) <= MAX_SEED, f"within {MAX_SEED} of 0")
        if len(self.stop) > 16:
            raise InvalidRequest(f"stop has {len(self.stop)} strings", "Send at most 16.", param="stop")
        if not all(self.stop):
            raise InvalidRequest(
                "stop contains an empty string", "Leave it out: it would match at once.", param="stop"
            )
        self._check(
            "top_logprobs",
            self.top_logprobs is None or 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
            f"between 0 and {MAX_TOP_LOGPROBS}",
        )

    def _check(self, name: str, valid: bool, rule: str) -> None:
        if not valid:
            raise InvalidRequest(f"{name} is {getattr(self, name)!r}", f"It must be {rule}.", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty for repeated tokens is set."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
