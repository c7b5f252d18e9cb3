"""All layers of a decoding step on a CPU in one call of compiled code (``decode_layers.c``).

The same functions as ``products.py`` and ``row_functions.py`` call one by one, with the same results to the
bit.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlfit.kernels.cpu.library import load_library
from vlfit.kernels.cpu.products import FEW_ROWS_WITH_TILES, StoredWeight, stored_forms
from vlfit.kernels.cpu.row_functions import float_address, takes_attention

MAX_ROWS = FEW_ROWS_WITH_TILES  # more are multiplied in another way on some CPUs


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a decoder layer: matrices side by side, biases in float32 or None, norms in float32."""

    qkv: Sequence[StoredWeight]
    output: Sequence[StoredWeight]
    gate_up: Sequence[StoredWeight]
    down: Sequence[StoredWeight]
    biases: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    input_norm: Tensor
    post_attention_norm: Tensor
    query_key_norm: Tensor | None

    @property
    def matrices(self) -> tuple[Sequence[StoredWeight], ...]:
        """``qkv``, ``output``, ``gate_up``, ``down``."""
        return self.qkv, self.output, self.gate_up, self.down


class _Layer(ctypes.Structure):
    """``Layer`` of ``decode_layers.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((f"{name}_count", ctypes.c_int64) for name in ("qkv", "output", "gate_up", "down")),
        *((f"{name}_bias", ctypes.c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_attention_norm", "query_key_norm")),
    )


class _Cache(ctypes.Structure):
    """``Cache`` of ``decode_layers.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "new_slots", "slots", "lengths")),
        *((name, ctypes.c_int64) for name in ("slot_count", "longest", "heads", "kv_heads", "head_dim")),
    )


class DecodeLayers:
    """Decoder layers with grouped-query attention, for up to ``MAX_ROWS`` sequences with one token each.

    ``heads``: of queries. Raises ``ValueError`` for norms or biases that are not contiguous float32, and
    where the compiled code is not available.
    """

    def __init__(self, layers: Sequence[LayerWeights], heads: int, eps: float) -> None:
        library = load_library()
        if library is None:
            raise ValueError("the compiled code is not available")
        self._run = library.vlfit_decode_layers
        self._heads, self._eps = heads, eps
        self._weights = tuple(layers)
        self._forms = [[stored_forms(parts) for parts in layer.matrices] for layer in layers]
        self._layers = (_Layer * len(layers))(*map(_described, layers, self._forms))

    @property
    def is_current(self) -> bool:
        """Whether no matrix was freed or read anew since; if one was, this object must not be called."""
        last = self._weights[-1]
        return self._weights[0].qkv[0].is_loaded and last.down[-1].is_loaded

    def __call__(
        self,
        hidden: Tensor,
        tables: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        new_slots: Tensor,
        slots: Tensor,
        lengths: Tensor,
    ) -> None:
        """Run all layers on ``hidden`` [rows, width] float32, in place.

        ``tables``: cosines and sines [rows, 1, rotary_dim]; ``cache``: keys and values [layers, all slots,
        kv_heads, head_dim], all float32. ``new_slots`` [rows]: where the rows' keys and values are stored;
        ``slots`` [rows, longest], of which the first ``lengths`` [rows] count: each sequence's tokens, the
        new one included. Raises ``IndexError`` for a slot that the cache does not have or layers that do not
        fit it, ``MemoryError`` without memory for the rows between the products.
        """
        keys, values = cache
        new_slots, slots, lengths = (each.contiguous() for each in (new_slots, slots, lengths))
        cosines, sines = (table.contiguous() for table in tables)
        described = _Cache(
            float_address(keys),
            float_address(values),
            *(each.data_ptr() for each in (new_slots, slots, lengths)),
            keys.shape[1],
            slots.shape[1],
            self._heads,
            *keys.shape[2:],
        )
        if len(keys) != len(self._layers) or any(
            each.dtype != torch.int64 for each in (new_slots, slots, lengths)
        ):
            raise IndexError(
                f"{len(keys)} layers in the cache for {len(self._layers)}, or slots not in int64"
            )
        failed = self._run(
            self._layers,
            ctypes.c_int64(len(self._layers)),
            ctypes.c_void_p(float_address(hidden)),
            ctypes.c_int64(len(hidden)),
            ctypes.c_int64(hidden.shape[1]),
            ctypes.c_void_p(float_address(cosines)),
            ctypes.c_void_p(float_address(sines)),
            ctypes.c_int64(cosines.shape[-1]),
            ctypes.byref(described),
            ctypes.c_float(self._eps),
            torch.get_num_threads(),
        )
        if failed == 1:
            raise MemoryError("no memory for a decoding step")
        if failed:
            raise IndexError(f"a slot outside of 0 to {keys.shape[1] - 1}, or layers of other sizes")


def takes_cache(keys: Tensor) -> bool:
    """Whether ``DecodeLayers`` takes ``keys`` and values [layers, slots, kv_heads, head_dim] of this kind."""
    return takes_attention(keys.shape[-1], keys)


def _described(layer: LayerWeights, forms: Sequence["ctypes.Array[Any]"]) -> _Layer:
    def address(tensor: Tensor | None) -> int | None:
        return None if tensor is None else float_address(tensor)

    return _Layer(
        *map(ctypes.addressof, forms),
        *map(len, forms),
        *map(address, layer.biases),
        *map(address, (layer.input_norm, layer.post_attention_norm, layer.query_key_norm)),
    )
