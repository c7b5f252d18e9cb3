"""The sizes of a model, as `config.json` has them, and its family."""

from dataclasses import dataclass
from typing import Final

QWEN3_VL: Final = "qwen3_vl"
QWEN3_5: Final = "qwen3_5"


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; the defaults are mini's.

    ``family``: ``QWEN3_VL`` or ``QWEN3_5``. What stands from ``linear_key_heads`` on is of Qwen3.5 only:
    gated delta nets with every ``full_interval``-th layer a full one, rotation of ``rotated`` of a head's
    dimensions (None: all), one layer more that predicts the token after next (``drafts``).
    """

    vision_depth: int = 8
    vision_hidden: int = 192
    vision_feed_forward: int = 768
    vision_heads: int = 3
    positions: int = 576
    deepstack: tuple[int, ...] = (2, 4, 6)
    depth: int = 6
    hidden: int = 256
    feed_forward: int = 640
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 4096
    rope_theta: float = 10000.0
    mrope_section: tuple[int, int, int] = (12, 10, 10)
    patch: int = 16
    temporal: int = 2
    merge: int = 2
    context: int = 4096
    epsilon: float = 1e-6
    family: str = QWEN3_VL
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    kernel: int = 4
    full_interval: int = 1
    rotated: int | None = None
    drafts: bool = False

    @property
    def is_hybrid(self) -> bool:
        """Whether it is a Qwen3.5: states, output gates, zero-centred norms, thinking."""
        return self.family == QWEN3_5

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution of a gated delta net: queries, keys, values."""
        return (
            2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_heads * self.linear_value_dim
        )

    def is_full(self, layer: int) -> bool:
        """Whether a text layer attends to all tokens."""
        return (layer + 1) % self.full_interval == 0


# The second mini: three gated delta nets and a full layer, as Qwen3.5 repeats them, no deepstack. Its widths
# are mini's, so that what mini has learnt can be taken over (``inherit.py``).
MINI35: Final = Shape(
    deepstack=(), depth=4, family=QWEN3_5, linear_key_heads=2, linear_value_heads=4, linear_key_dim=64,
    linear_value_dim=64, full_interval=4, drafts=True,
)  # fmt: skip
