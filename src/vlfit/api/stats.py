"""The engine's account of itself: what it has done so far, and what it holds. Records only, no torch.

Knows fields and units. Does not know how bytes are counted (``usage.py``) or who looks. The engine
replaces its ``Counters`` as a whole once a step, so that another thread that looks always sees numbers that
belong together, and no lock is taken.
"""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums since the engine was built; whoever looks twice has rates.

    ``steps`` forward passes took ``seconds``. ``prompt_tokens`` were computed for prompts, ``tokens`` were
    sampled; ``shared_tokens`` of prompts were in the KV cache already. Of the steps, ``decode_steps``
    computed one token of each of their requests and no prompt: they took ``decode_seconds`` and read
    ``decode_cached`` tokens of the KV cache, all layers counted once.
    ``again`` counts passes that failed and were done again, request by request. ``guessed`` tokens were
    computed before it was known that they come; ``came_true`` of them did and are among ``tokens``.
    """

    steps: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    shared_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    decode_cached: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    again: int = 0
    guessed: int = 0
    came_true: int = 0

    def after_step(
        self,
        seconds: float,
        *,
        prompt_tokens: int,
        sampled: int,
        cached: int,
        again: int = 0,
        guessed: int = 0,
    ) -> "Counters":
        """One more step; ``cached`` tokens were in the cache of its requests before it. ``sampled`` has a
        token for each request that got any: those behind it are told by ``after_guess``.
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
            decode_cached=self.decode_cached + (cached if decoding else 0),
            again=self.again + again,
            guessed=self.guessed + guessed,
        )

    def after_guess(self) -> "Counters":
        """One more token that was guessed has been said."""
        return replace(self, tokens=self.tokens + 1, came_true=self.came_true + 1)


@dataclass(frozen=True, slots=True)
class Pool:
    """Blocks of the KV cache: ``used`` are held by running requests, filled or not.

    ``known`` are full and may be shared by requests that begin alike, used or not. ``planned`` were there at
    the start: more than ``blocks`` while other programs have their memory.
    """

    blocks: int
    used: int
    block_size: int
    known: int = 0
    planned: int = 0


@dataclass(frozen=True, slots=True)
class Holdings:
    """Bytes that the engine holds.

    ``weights`` by ledger line. ``image_cache`` of at most ``image_cache_limit``. On a GPU ``allocated`` is
    what torch's tensors take, ``reserved`` what torch took from the driver for them, each with its peak so
    far. ``resident`` is the RAM of the whole process and ``resident_before`` what it was before weights were
    loaded; None where the system does not tell. ``graphs``: the part of ``reserved`` that recorded decode
    steps have.
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
    graphs: int = 0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine runs with. ``value_bytes`` are those of one value that is computed with; ``offload``
    text layers wait in RAM; ``halves``: a CPU multiplies with large matrices in 16 bits whatever values have;
    ``kv_dtype``: fp8, or bf16 for a KV cache of ``value_bytes`` for each number.
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
    halves: bool = False
    kv_dtype: str = "bf16"
    speculate: bool = True


@dataclass(frozen=True, slots=True)
class Asleep:
    """The engine sleeps, its weights ``parked`` in ``ram`` (of which they take ``ram`` bytes) or ``files``.

    It gave back ``freed`` bytes of the GPU, or of RAM on a CPU, and took ``seconds`` to.
    """

    parked: str
    ram: int
    freed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Rest:
    """What came of asking an engine to sleep or to wake: how it is now (``asleep`` is None: awake), whether
    that is new, and how long it took.
    """

    asleep: Asleep | None
    changed: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineAccount:
    """All of it at one moment; ``seconds`` since the engine was built.

    ``pauses``: how often a request that ran was put back to wait, for want of KV blocks. ``asleep`` is None
    while the engine is awake.
    """

    seconds: float
    settings: EngineSettings
    running: int
    waiting: int
    pool: Pool
    holdings: Holdings
    counters: Counters = field(default_factory=Counters)
    pauses: int = 0
    asleep: Asleep | None = None
