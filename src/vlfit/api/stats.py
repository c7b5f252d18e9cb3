"""Statistics of an engine: counters, settings, memory. Plain records, without torch.

The engine replaces its ``Counters`` as a whole after each step, so that other threads read consistent numbers
without a lock.
"""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the engine was built.

    ``steps``, ``seconds``: forward passes and their duration. ``prompt_tokens``: prefilled;
    ``cached_prompt_tokens``: found in the prefix cache instead. ``tokens``: generated.
    ``decode_steps``, ``decode_seconds``: steps without prompt tokens; ``decode_cached_tokens``: tokens that
    those steps read from the KV cache (one token is counted once, not per layer). ``finished``,
    ``cancelled``, ``failed``: requests. ``retried_steps``: steps that failed and were run again, request by
    request. ``draft_tokens``: verified; ``accepted_tokens``: draft tokens accepted, part of ``tokens``.
    ``model_draft_tokens``, ``model_accepted_tokens``: those of both that a draft model has drafted.
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
    model_draft_tokens: int = 0
    model_accepted_tokens: int = 0

    def after_step(
        self,
        seconds: float,
        *,
        prompt_tokens: int,
        sampled: int,
        cached: int,
        retried: int = 0,
        drafted: int = 0,
        drafted_by_model: int = 0,
    ) -> "Counters":
        """A copy that includes one more step, which took ``seconds``.

        ``prompt_tokens``: prefilled in the step. ``sampled``: sampled tokens, at most one per request;
        accepted draft tokens are counted by ``after_accepted_token``. ``cached``: tokens in the KV cache
        before the step, summed over its requests. ``retried``: how often the step was run again.
        ``drafted``: draft tokens verified in it; ``drafted_by_model``: those of them by a draft model.
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
            model_draft_tokens=self.model_draft_tokens + drafted_by_model,
        )

    def after_accepted_token(self, *, by_model: bool = False) -> "Counters":
        """A copy that includes one more accepted draft token; ``by_model``: a draft model's."""
        return replace(
            self,
            tokens=self.tokens + 1,
            accepted_tokens=self.accepted_tokens + 1,
            model_accepted_tokens=self.model_accepted_tokens + by_model,
        )


@dataclass(frozen=True, slots=True)
class KVPool:
    """Blocks of the KV cache, ``block_size`` tokens each.

    ``blocks``: in all. ``used``: allocated to running requests. ``cached``: full blocks in the prefix cache,
    used or not. ``planned``: blocks at start; ``blocks`` is less while other programs hold the memory.
    """

    blocks: int
    used: int
    block_size: int
    cached: int = 0
    planned: int = 0


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes used by the engine.

    ``weights``: by ledger line. ``kv_cache``: keys and values; ``state_cache``: recurrent states.
    ``image_cache``: current size; at most ``image_cache_limit``. ``state_snapshots``: copies of states for
    the prefix cache, in RAM and on the device, at most ``state_snapshots_limit``; of these on a GPU
    ``device_snapshots``.

    ``allocated``: GPU memory in torch's tensors; ``reserved``: GPU memory that torch has from the driver,
    including ``cuda_graphs``; ``peak_allocated``, ``peak_reserved``: the most of each so far. All four are
    None on a CPU.

    ``resident``: RAM of the process now; ``resident_before``: before weights were loaded; None if unknown.
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
    state_cache: int = 0
    state_snapshots: int = 0
    state_snapshots_limit: int = 0
    device_snapshots: int = 0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The effective settings of an engine.

    ``value_bytes``: bytes of a number in ``dtype``. ``context``, ``image_tokens``, ``chunk``, ``kv_tokens``:
    limits in tokens. ``sequences``: running at once. ``offload``: number of text layers in RAM.
    ``table_in_ram``: the token embedding is in RAM, for a GPU. ``state_snapshots``: copies of states on it.
    ``cpu_16_bit``: large matrix products on a CPU use 16 bits whatever the dtype. ``cpu_stored``: they use
    weights as stored, which goes before it. ``kv_dtype``: ``fp8``, or ``bf16``, which stands for
    ``value_bytes`` per number of any dtype. ``draft_model``: layers of the checkpoint draft tokens, too.
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
    cpu_stored: bool = False
    kv_dtype: str = "bf16"
    speculate: bool = True
    draft_model: bool = False
    table_in_ram: bool = False
    state_snapshots: int = 0


@dataclass(frozen=True, slots=True)
class SleepState:
    """How a sleeping engine sleeps.

    ``level``: "ram" (weights are kept there) or "files" (they will be read again). ``ram_bytes``: RAM for the
    weights, 0 for "files". ``freed_bytes``: GPU memory (on a CPU, RAM) released. ``seconds``: time it took.
    """

    level: str
    ram_bytes: int
    freed_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SleepResult:
    """Result of ``sleep`` or ``wake``. ``asleep``: state after it; None: awake.

    ``changed``: False if the engine was in that state already; ``seconds`` is 0 then, else the time that the
    change took.
    """

    asleep: SleepState | None
    changed: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineAccount:
    """All statistics at one moment, ``seconds`` after the engine was built.

    ``running``, ``waiting``: requests. ``num_preemptions``: so far, for lack of KV blocks. ``asleep``: None
    while awake.
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
