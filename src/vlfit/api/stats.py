"""Statistics of an engine: counters, settings, memory. Plain records, without torch.

The engine replaces its ``Counters`` as a whole after each step, so that other threads read consistent numbers
without a lock.
"""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the engine was built.

    ``steps``, ``seconds``: forward passes and their duration. ``prompt_tokens``: computed for prompts;
    ``cached_prompt_tokens``: found in the prefix cache instead. ``tokens``: generated.
    ``decode_steps``, ``decode_seconds``: the steps without prompt tokens; ``decode_cached_tokens``: tokens
    they read from the KV cache, all layers counted once. ``retried_steps``: steps that failed and were run
    again, request by request. ``draft_tokens``: computed speculatively; ``accepted_tokens``: those accepted,
    which are part of ``tokens``.
    """

    steps: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    cached_prompt_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    decode_cached_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    retried_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def after_step(
        self,
        seconds: float,
        *,
        prompt_tokens: int,
        sampled: int,
        cached: int,
        retried: int = 0,
        drafted: int = 0,
    ) -> "Counters":
        """Count a step. ``cached``: tokens of its requests in the KV cache before it. ``sampled``: one token
        for each request that got any; accepted draft tokens are counted by ``after_accepted_token``.
        """
        decoding = not prompt_tokens
        return replace(
            self,
            steps=self.steps + 1,
            seconds=self.seconds + seconds,
            prompt_tokens=self.prompt_tokens + prompt_tokens,
            tokens=self.tokens + sampled,
            decode_steps=self.decode_steps + decoding,
            decode_seconds=self.decode_seconds + (seconds if decoding else 0.0),
            decode_cached_tokens=self.decode_cached_tokens + (cached if decoding else 0),
            retried_steps=self.retried_steps + retried,
            draft_tokens=self.draft_tokens + drafted,
        )

    def after_accepted_token(self) -> "Counters":
        """Count an accepted draft token."""
        return replace(self, tokens=self.tokens + 1, accepted_tokens=self.accepted_tokens + 1)


@dataclass(frozen=True, slots=True)
class KVPool:
    """Blocks of the KV cache. ``used``: allocated to running requests. ``cached``: full and in the prefix
    cache, used or not. ``planned``: at start; more than ``blocks`` while other programs hold the memory.
    """

    blocks: int
    used: int
    block_size: int
    cached: int = 0
    planned: int = 0


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes held by the engine.

    ``weights``: by ledger line. ``image_cache``: of at most ``image_cache_limit``. On a GPU, ``allocated``
    is what torch's tensors take and ``reserved`` what torch has taken from the driver, each with its peak;
    ``cuda_graphs`` is part of ``reserved``. ``resident``: RAM of the whole process, ``resident_before``
    before weights were loaded; None if unknown.
    """

    weights: dict[str, int]
    kv_cache: int
    image_cache: int
    image_cache_limit: int
    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    resident: int | None = None
    resident_before: int | None = None
    cuda_graphs: int = 0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings in effect.

    ``value_bytes``: of one number in the computation's dtype. ``offload``: text layers kept in RAM.
    ``cpu_16_bit``: large matrix products on a CPU use 16 bits whatever the dtype. ``kv_dtype``: ``fp8``, or
    ``bf16`` for a KV cache of ``value_bytes`` per number.
    """

    device: str
    gpu_uuid: str
    dtype: str
    value_bytes: int
    context: int
    image_tokens: int
    sequences: int
    chunk: int
    kv_tokens: int
    offload: int = 0
    cpu_16_bit: bool = False
    kv_dtype: str = "bf16"
    speculate: bool = True


@dataclass(frozen=True, slots=True)
class SleepState:
    """A sleeping engine.

    ``park``: where the weights wait, "ram" or "files". ``ram``: bytes of RAM that they take, 0 in files.
    ``freed``: bytes of GPU memory (on a CPU, of RAM) given back, in ``seconds``.
    """

    park: str
    ram: int
    freed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SleepResult:
    """Result of sleep or wake: the state (``asleep`` None: awake), whether it changed, and the duration."""

    asleep: SleepState | None
    changed: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineAccount:
    """All statistics at one moment, ``seconds`` after the engine was built.

    ``num_preemptions``: running requests preempted for want of KV blocks. ``asleep``: None while awake.
    """

    seconds: float
    settings: EngineSettings
    running: int
    waiting: int
    pool: KVPool
    memory: MemoryUsage
    counters: Counters = field(default_factory=Counters)
    num_preemptions: int = 0
    asleep: SleepState | None = None
