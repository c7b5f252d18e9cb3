"""How the next token is chosen and when to stop: one frozen record of wishes. No torch.

The names and ranges are OpenAI's and vLLM's. ``engine/sampling/sampler.py`` carries them out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vlfit.checkpoint.processor_files import GenerationDefaults
from vlfit.errors import InvalidRequest

MAX_TOP_LOGPROBS = 20
COLDEST = 1e-5  # the bound that vLLM has, too
MOST_SEED = 2**63 - 17  # with a sign it fits 64 bits, and there is room to number the choices of one request


# JSON in one line: where a form allows spaces anywhere, a model that does not know how to go on may write
# nothing else for ever. Both are patterns, of llguidance.
SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True, slots=True)
class Form:
    """The form that an answer must have: ``text`` is a JSON schema, or a grammar in llguidance's Lark.

    ``place`` is the field of a request that it came in, which errors give as their ``param``. ``wire``:
    fields of an OpenAI request that ask another server for this form, as a grammar itself cannot be sent to
    one.
    """

    kind: Literal["json", "grammar"]
    text: str
    place: str | None = field(default=None, compare=False)
    wire: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Wishes for one completion. Raises ``InvalidRequest`` (with ``param``) for a value out of range.

    ``temperature`` 0 is greedy, and below ``COLDEST`` it becomes 0: nothing but the likeliest token has a
    chance there, and quotients would leave float32. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    ``max_tokens`` None means: as many as the context has room for, at most the engine's default.
    ``top_logprobs`` None gives no logprobs, 0 gives the chosen token's alone, k adds the k likeliest.
    ``loop_guard`` stops a completion that repeats itself (finish reason ``loop``); off by default.
    ``form``: only tokens that keep to it are chosen; penalties and temperature apply among those.
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
    form: Form | None = None

    @classmethod
    def usual(cls, defaults: GenerationDefaults) -> "SamplingParams":
        """As the checkpoint's makers want it where a request says nothing: what transformers would do."""
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
        if self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)
        self._check("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        self._check("top_k", self.top_k >= 0, "0 (off) or more")
        self._check("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        self._check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2")
        self._check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2")
        self._check("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "above 0 and at most 10")
        self._check("seed", self.seed is None or abs(self.seed) <= MOST_SEED, f"within {MOST_SEED} of 0")
        if len(self.stop) > 16:
            raise InvalidRequest(f"stop holds {len(self.stop)} strings", "send 16 at most", param="stop")
        if not all(self.stop):
            raise InvalidRequest(
                "stop holds an empty string", "leave it out: it stands everywhere", param="stop"
            )
        self._check(
            "top_logprobs",
            self.top_logprobs is None or 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
            f"between 0 and {MAX_TOP_LOGPROBS}",
        )

    def _check(self, name: str, good: bool, rule: str) -> None:
        if not good:
            raise InvalidRequest(f"{name} is {getattr(self, name)!r}", f"{name} must be {rule}", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether a token counts for more or less where it was said before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
