"""The sizes of a model, as `config.json` has them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; the defaults are mini's."""

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
