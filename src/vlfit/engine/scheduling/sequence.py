"""Requests of the native engine: prompt, generated tokens, block table, and chunks of them."""

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from vlfit.engine.request import Request
from vlfit.models.interface import PreparedImage, VisionFeatures
from vlfit.plan.native.cost import MAX_CANDIDATES

IntVector = np.ndarray[tuple[int], np.dtype[np.int64]]
IntMatrix = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """Prefix cache keys of a prompt without its last token, which is always computed.

    ``block_keys``: one for each full block. ``image_ends``: for each image that ends inside a block, the
    number of prompt tokens up to the image's end, and the key of the block's part up to there.

    For models with states: ``part_ends``: the same for each position inside a block where there may be a
    snapshot of a state. ``snapshot_ends``: numbers of tokens after which one is wanted. Both ascend.
    """

    block_keys: tuple[bytes, ...]
    image_ends: tuple[tuple[int, bytes], ...]
    part_ends: tuple[tuple[int, bytes], ...] = ()
    snapshot_ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftProbabilities:
    """The distributions that draft tokens were drawn from, each over the tokens that were possible.

    ``token_ids`` [drafts, n] int64 and their ``probabilities`` [drafts, n] floating point, on any device. A
    row sums to 1; one with fewer than n tokens ends with probabilities of 0. n is at most ``MAX_CANDIDATES``,
    as a GPU verifies with so many: a proposer draws from its likeliest tokens alone.
    """

    token_ids: Tensor
    probabilities: Tensor

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        if shape != self.probabilities.shape or len(shape) != 2 or not 1 <= shape[1] <= MAX_CANDIDATES:
            raise ValueError(
                f"token ids {tuple(shape)} and probabilities {tuple(self.probabilities.shape)} must be "
                f"[drafts, n] alike, with n from 1 to {MAX_CANDIDATES}"
            )


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens for one sequence, and what they were drawn from.

    ``wanted``: tokens that a draft model is to draft, in place of ``token_ids`` (``execution/drafter.py``).
    ``probabilities``: None: not drawn, but found or the likeliest ones, or drawn for a request with a seed by
    the random numbers that draw its own tokens (``DRAW_WORD``), so that they mostly come out the same. Tokens
    drawn from ``probabilities`` must come from numbers that nothing else uses (``DRAFT_WORD``). How both are
    verified: ``engine/sampling/verification.py``.
    """

    token_ids: tuple[int, ...] = ()
    probabilities: DraftProbabilities | None = None
    wanted: int = 0

    def __bool__(self) -> bool:
        return bool(self.token_ids or self.wanted)

    def first(self, count: int) -> "Draft":
        """The first ``count`` tokens. ``probabilities`` keep their rows; those of other tokens are unused."""
        return replace(self, token_ids=self.token_ids[:count], wanted=min(self.wanted, count))


class DraftProposer(Protocol):
    """Proposes draft tokens for one sequence (``speculative.py``)."""

    @property
    def cost(self) -> float:
        """What a draft token takes, in plain decode steps, after the answer that was given last."""
        ...

    def propose(self, generated: list[int], max_tokens: int) -> Draft:
        """At most ``max_tokens`` draft tokens, or none, to follow ``generated``, the whole answer so far."""
        ...

    def record_acceptance(self, num_accepted: int, num_drafts: int) -> None:
        """Record how many of the ``num_drafts`` draft tokens that were verified were accepted."""
        ...


@dataclass(slots=True)
class DraftRows:
    """How far a draft model has followed a sequence.

    ``stored``: how many of its first tokens have keys and values in the draft model's cache. ``hidden``: the
    text model's hidden states of the tokens after these, [n, hidden] of each pass. Those of drafts that were
    not accepted are at the end, beyond ``num_cached_tokens``.
    """

    stored: int = 0
    hidden: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A tokenized prompt with its images, positions and prefix cache keys.

    ``placeholders``: indices of the image tokens; the k-th takes the k-th feature row of all ``images``.
    ``positions``: M-RoPE positions [3, tokens]; ``next_position``: that of the first generated token.
    ``keys``: None: the prefix cache is not used.
    """

    token_ids: IntVector
    placeholders: IntVector
    positions: IntMatrix
    next_position: int
    images: tuple[PreparedImage, ...]
    keys: PromptKeys | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_image_tokens(self) -> int:
        return len(self.placeholders)


@dataclass(eq=False, slots=True)
class Sequence(Request):
    """A request with its state in the KV cache.

    ``num_cached_tokens`` of its ``num_tokens`` have keys and values in the KV cache; ``num_shared_tokens`` of
    the prompt came from the prefix cache at the first admission. ``block_keys``: prefix cache keys of its
    full blocks, kept when it is preempted. ``block_copy``: (source block, own block, tokens) to copy before
    the next step; None: nothing. ``snapshot``: slot of the snapshot that its state is copied from before the
    next step; None: of none. ``snapshot_end``: number of tokens up to the last snapshot of this prefix, whose
    key is ``snapshot_key``. ``state_slot``: of the states of layers that keep one, while it runs;
    ``pending_tokens``: how many tokens of its last step, all accepted, are not in the states yet: the next
    step commits them (``layers/gated_delta.py``). ``slot_mapping``: slots of all its blocks on the device,
    None until built. ``features``: vision features in use, by index of the image, where each time step of a
    clip counts as an image. ``proposer``: None without speculative decoding; ``draft_rows``: None without a
    draft model.
    """

    prompt: PreparedPrompt
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    block_copy: tuple[int, int, int] | None = None
    snapshot: int | None = None
    snapshot_end: int = 0
    snapshot_key: bytes = b""
    state_slot: int = -1
    pending_tokens: int = 0
    slot_mapping: Tensor | None = None
    features: dict[int, VisionFeatures] = field(default_factory=dict)
    proposer: DraftProposer | None = None
    draft_rows: DraftRows | None = None

    @property
    def position(self) -> int:
        """M-RoPE position of the newest generated token (the same in all three dimensions)."""
        return self.prompt.next_position + len(self.generated) - 1

    def token_ids(self, begin: int, end: int) -> IntVector:
        """Token ids ``begin`` to ``end`` (exclusive) of the prompt followed by the answer."""
        if end <= self.prompt.num_tokens:
            return self.prompt.token_ids[begin:end]
        generated = self.generated[max(begin - self.prompt.num_tokens, 0) : end - self.prompt.num_tokens]
        return np.concatenate((self.prompt.token_ids[begin:], np.array(generated, dtype=np.int64)))

    @property
    def max_num_tokens(self) -> int:
        """Most tokens that the sequence can have in the KV cache: all but the last one of its answer."""
        return self.prompt.num_tokens + self.max_tokens - 1

    @property
    def is_decoding(self) -> bool:
        """Whether the whole prompt and all generated tokens but the newest are in the KV cache."""
        return (
            self.num_cached_tokens >= self.prompt.num_tokens and self.num_tokens - self.num_cached_tokens == 1
        )

    def positions(self, begin: int, end: int) -> IntMatrix:
        """M-RoPE positions [3, end - begin] of ``token_ids(begin, end)``."""
        offset = self.prompt.next_position - self.prompt.num_tokens
        generated = np.arange(max(begin, self.prompt.num_tokens), max(end, self.prompt.num_tokens)) + offset
        return np.concatenate((self.prompt.positions[:, begin:end], np.tile(generated, (3, 1))), axis=1)

    def reset_for_preemption(self) -> None:
        """Drop block table, state and features but keep the generated tokens.

        The caller has freed the blocks.
        """
        self.num_cached_tokens = 0
        self.state_slot, self.pending_tokens = -1, 0
        self.snapshot, self.snapshot_end, self.snapshot_key = None, 0, b""
        self.block_table = []
        self.block_copy = None
        self.slot_mapping = None
        self.features.clear()
        if self.draft_rows is not None:
            self.draft_rows = DraftRows()


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next ``num_tokens`` uncached tokens of ``sequence``, computed in one step.

    ``draft_tokens`` come last and are counted in ``num_tokens``, but are not part of the sequence yet.
    ``draft_probabilities``: as in ``Draft``. ``wanted_drafts``: so many tokens a draft model is to draft
    first; ``by_draft_model``: it has drafted ``draft_tokens``.
    """

    sequence: Sequence
    num_tokens: int
    draft_tokens: tuple[int, ...] = ()
    draft_probabilities: DraftProbabilities | None = None
    wanted_drafts: int = 0
    by_draft_model: bool = False

    @property
    def begin(self) -> int:
        """Index of its first token in the sequence."""
        return self.sequence.num_cached_tokens

    @property
    def needs_sampling(self) -> bool:
        """Whether the chunk reaches the end of the sequence, so that the next token is sampled."""
        return self.reaches_end and self.sequence.pooling is None

    @property
    def needs_pooling(self) -> bool:
        """Whether the chunk reaches the end of a pooled request's prompt."""
        return self.reaches_end and self.sequence.pooling is not None

    @property
    def reaches_end(self) -> bool:
        """Whether the chunk has the last token of the sequence so far."""
        return self.sequence.num_cached_tokens + self.num_tokens >= self.sequence.num_tokens

    @property
    def is_decode(self) -> bool:
        """Whether the chunk is the newest generated token alone, without draft tokens."""
        return self.sequence.is_decoding and self.num_tokens == 1
