"""What each layer of a text model caches: keys and values in blocks, or a state of fixed size.

A model's cache spec has one entry per text layer. Allocation, the ledger, block counts and the prefix cache
depend on it alone, not on the model's family.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

STATE_DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
# Most tokens whose inputs a state keeps until it is known which of them stay: the rows of a verify step.
MAX_PENDING_TOKENS = 8
# RAM for snapshots of states by default: ten of a 9B model, 26 of a 0.8B one. A choice: a conversation with
# a picture takes three and one a turn, and half a gigabyte is what a computer with 16 GB can spare.
SNAPSHOT_RAM_BYTES = 512 * 2**20
ALIGNMENT = 16  # of a tensor in a snapshot
KV_SCALE_BYTES = 2  # a bfloat16 scale for each row of a head, in an FP8 cache


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values of every token, in the blocks of the KV cache.

    ``window``: a token attends to itself and the ``window - 1`` tokens before it; None: to all before it. A
    layer with a window still caches every token; only attention is limited.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None

    def bytes_per_token(self, value_bytes: int, *, fp8: bool = False) -> int:
        """Bytes of one token's keys and values: ``value_bytes`` per value, or with ``fp8`` a byte and
        its scale.
        """
        row = self.head_dim + KV_SCALE_BYTES if fp8 else self.head_dim * value_bytes
        return 2 * self.kv_heads * row


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's state: for each sequence ``shape``, in ``dtype``.

    ``dtype``: the name of a torch dtype (``STATE_DTYPE_BYTES``). ``saved``: a snapshot of the state has it,
    too; False for what only the next step needs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    saved: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes for one sequence."""
        return prod(self.shape) * STATE_DTYPE_BYTES[self.dtype]

    @property
    def snapshot_bytes(self) -> int:
        """Bytes in a snapshot, in which tensors start at multiples of ``ALIGNMENT``; 0: it is not in it."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT if self.saved else 0


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state for each sequence, whatever its length: named tensors of fixed shapes."""

    tensors: tuple[StateTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes for one sequence."""
        return sum(tensor.nbytes for tensor in self.tensors)


LayerCache = Paged | State
CacheSpec = Sequence[LayerCache]


def kv_bytes_per_token(spec: CacheSpec, value_bytes: int, *, fp8: bool = False) -> int:
    """Bytes of one token's keys and values in all paged layers.

    ``value_bytes``: of one value in the cache's dtype; ignored with ``fp8`` (codes and their scales).
    """
    return sum(layer.bytes_per_token(value_bytes, fp8=fp8) for layer in spec if isinstance(layer, Paged))


def state_bytes_per_sequence(spec: CacheSpec) -> int:
    """Bytes of one sequence's states in all layers that have one."""
    return sum(layer.nbytes for layer in spec if isinstance(layer, State))


def snapshot_bytes(spec: CacheSpec) -> int:
    """Bytes of a snapshot of one sequence's states, for the prefix cache; 0 without states."""
    states = (layer for layer in spec if isinstance(layer, State))
    return sum(tensor.snapshot_bytes for layer in states for tensor in layer.tensors)


def snapshot_ram_bytes(spec: CacheSpec, limit: int = SNAPSHOT_RAM_BYTES) -> int:
    """Bytes of RAM that snapshots take at most: as many whole ones as ``limit`` bytes hold."""
    each = snapshot_bytes(spec)
    return limit // each * each if each else 0


def paged_shapes(spec: CacheSpec) -> dict[tuple[int, int], list[int]]:
    """Layer indices of the paged layers, by their shape (kv_heads, head_dim).

    Layers of one shape share cache tensors, in the order of their list. Layers with a state are left out.
    """
    shapes: dict[tuple[int, int], list[int]] = {}
    for index, layer in enumerate(spec):
        if isinstance(layer, Paged):
            shapes.setdefault((layer.kv_heads, layer.head_dim), []).append(index)
    return shapes


def has_states(spec: CacheSpec) -> bool:
    """Whether any layer keeps a state, so that each running sequence needs a slot for it."""
    return any(isinstance(layer, State) for layer in spec)


def allows_prefix_cache(spec: CacheSpec) -> bool:
    """Whether a prefix can be reused from its blocks alone.

    With layers that keep a state it takes a snapshot of that, too (``engine/scheduling/snapshot_index.py``).
    """
    return all(isinstance(layer, Paged) for layer in spec)
