"""What each layer of a text model keeps of the past: keys and values in blocks, or a state of fixed size.

A model's cache spec has one entry per text layer. Allocation, the ledger, block counts and the prefix cache
read it; none of them knows which family it came from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

STATE_DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_SCALE_BYTES = 2  # a bfloat16 scale for each row of a head, in an FP8 cache


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values of every token, in the blocks of the KV cache.

    ``window``: a token attends to itself and the ``window - 1`` tokens before it; None: to all before it.
    Windowed layers keep all tokens too; only attention is limited.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None

    def bytes_per_token(self, value_bytes: int, *, fp8: bool = False) -> int:
        """Keys and values of one token; in FP8 one byte each and a scale for each row of a head."""
        row = self.head_dim + KV_SCALE_BYTES if fp8 else self.head_dim * value_bytes
        return 2 * self.kv_heads * row


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state of ``shape`` for each sequence, however long the sequence is.

    ``dtype`` is a name that torch has ("float32").
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes for one sequence."""
        return prod(self.shape) * STATE_DTYPE_BYTES[self.dtype]


LayerCache = Paged | State
CacheSpec = Sequence[LayerCache]


def kv_bytes_per_token(spec: CacheSpec, value_bytes: int, *, fp8: bool = False) -> int:
    """Bytes that one token takes in all paged layers."""
    return sum(layer.bytes_per_token(value_bytes, fp8=fp8) for layer in spec if isinstance(layer, Paged))


def state_bytes_per_sequence(spec: CacheSpec) -> int:
    """Bytes that one sequence takes in all layers with a state."""
    return sum(layer.nbytes for layer in spec if isinstance(layer, State))


def paged_shapes(spec: CacheSpec) -> dict[tuple[int, int], list[int]]:
    """Paged layers by (kv_heads, head_dim). Each shape is two tensors of the cache, keys and values."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for index, layer in enumerate(spec):
        if isinstance(layer, Paged):
            shapes.setdefault((layer.kv_heads, layer.head_dim), []).append(index)
    return shapes


def allows_prefix_sharing(spec: CacheSpec) -> bool:
    """Whether blocks are all that a prefix leaves behind: a state cannot be taken over at a block's end."""
    return all(isinstance(layer, Paged) for layer in spec)
