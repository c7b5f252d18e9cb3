"""Faults of the compiled code of a CPU: products with stored weights, rows between them, decoding steps.

It multiplies large matrices alone; here it takes the small ones, too.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.fault_table import C, Patch, fault
from vlfit.kernels.cpu import decode_layers, products, row_functions
from vlfit.plan.native import ram

_Alter = Callable[..., Any]  # of the inner function, then its arguments


def _compiled(
    name: str, *names: C, owner: Any, function: str, spec: str = "half_with_biases"
) -> Callable[[Any], Any]:
    """Add a fault that calls the decorated function in place of ``function`` of ``owner``."""

    def add(alter: _Alter) -> _Alter:
        def change(patch: Patch) -> None:
            if not products.available():
                pytest.skip("no C compiler")
            patch.setattr(ram, "LEAST_WEIGHTS", 1)
            patch.setattr(ram, "LEAST_INPUTS", 1)
            inner = getattr(owner, function)
            patch.setattr(owner, function, lambda *given: alter(inner, *given))

        fault(f"compiled: {name}", *names, how="patch", spec=spec)(change)
        return alter

    return add


@_compiled("queries 1 % too long", C.ATTENTION, owner=row_functions, function="rotate")
def long_queries(inner: _Alter, *given: Any) -> Any:
    query, keys = inner(*given)
    return query.mul_(1.01), keys


@_compiled("a norm's last 16 columns as they were", C.NORM, owner=row_functions, function="add_rms_norm")
def short_norm(inner: _Alter, hidden: Any, delta: Any, weight: Any, eps: float) -> Any:
    normed = inner(hidden, delta, weight, eps)
    normed[:, -16:] = hidden[:, -16:]
    return normed


@_compiled("gate and up swapped", C.MLP, owner=row_functions, function="silu_mul")
def swapped_gates(inner: _Alter, gate_up: Any) -> Any:
    return inner(gate_up.roll(gate_up.shape[1] // 2, 1))


@_compiled(
    "the last input of products left out", C.ATTENTION, owner=products, function="multiply", spec="qwen3_fp8"
)
def last_input(inner: _Alter, parts: Any, x: Any, bias: Any) -> Any:
    x = x.clone()
    x[:, -1] = 0
    return inner(parts, x, bias)


@_compiled(
    "inputs of prompts in 8 bits", C.ATTENTION, owner=products, function="multiply", spec="gguf q8_0 qwen3"
)
def coarse_inputs(inner: _Alter, parts: Any, x: Any, bias: Any) -> Any:
    if len(x) > products.FEW_ROWS:
        step = x.abs().amax(1, keepdim=True) / 127
        x = (x / step).round() * step
    return inner(parts, x, bias)


@_compiled(
    "a decoding step forgets its first token",
    C.KV_CACHE,
    owner=decode_layers.DecodeLayers,
    function="__call__",
)
def forgotten_token(inner: _Alter, layers: Any, hidden: Any, tables: Any, cache: Any, *slots: Any) -> Any:
    new, every, lengths = slots
    return inner(layers, hidden, tables, cache, new, every[:, 1:], lengths - 1)


@_compiled(
    "a decoding step writes one slot further",
    C.KV_CACHE,
    owner=decode_layers.DecodeLayers,
    function="__call__",
)
def further_slot(inner: _Alter, layers: Any, hidden: Any, tables: Any, cache: Any, *slots: Any) -> Any:
    new, every, lengths = slots
    return inner(layers, hidden, tables, cache, (new + 1) % cache[0].shape[1], every, lengths)
