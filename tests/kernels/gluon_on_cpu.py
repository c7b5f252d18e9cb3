"""Gluon kernels on a CPU: as much of the language as vlfit's kernels use, in numpy.

Triton's interpreter runs no Gluon. Here the modules of a kernel are imported once more with a language whose
tensors are arrays (``kernel_modules``), and a launch runs its programs one after the other (``OnCpu``). Where
registers lie is not followed (but for matrix units, whose warp is two rows of sixteen lanes), nor what runs
at the same time: this finds wrong numbers, reads out of bounds and tiles that are left out. Whether layouts
fit, the compiler says (``test_small_cards.py``).
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


@dataclass(frozen=True)
class Kind:
    """A type of numbers: ``stored`` in memory as bits, ``computed`` as numpy does it."""

    name: str
    primitive_bitwidth: int
    stored: type
    computed: type

    @property
    def is_float(self) -> bool:
        return np.issubdtype(self.computed, np.floating)


INT1 = Kind("int1", 1, np.bool_, np.bool_)
INT32 = Kind("int32", 32, np.uint32, np.int32)
INT64 = Kind("int64", 64, np.uint64, np.int64)
FLOAT16 = Kind("float16", 16, np.uint16, np.float16)
BFLOAT16 = Kind("bfloat16", 16, np.uint16, np.float32)  # rounded to a bfloat16
FLOAT32 = Kind("float32", 32, np.uint32, np.float32)
KINDS = {
    kind.name: kind
    for kind in (
        INT1,
        INT32,
        INT64,
        FLOAT16,
        BFLOAT16,
        FLOAT32,
        Kind("int8", 8, np.uint8, np.int8),
        Kind("int16", 16, np.uint16, np.int16),
        Kind("uint8", 8, np.uint8, np.uint8),
        Kind("uint16", 16, np.uint16, np.uint16),
    )
}
OF_TORCH = {
    torch.bfloat16: BFLOAT16,
    torch.float16: FLOAT16,
    torch.float32: FLOAT32,
    torch.int32: INT32,
    torch.int16: KINDS["int16"],
    torch.int8: KINDS["int8"],
    torch.uint8: KINDS["uint8"],
    torch.float8_e4m3fn: KINDS["uint8"],
}


def _rounded(values: Array) -> Array:
    """Float32 to the nearest bfloat16, ties to even, still float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(values), rounded, values).astype(np.float32)


def _from_bits(bits: Array, kind: Kind) -> Array:
    if kind is BFLOAT16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(bits).view(kind.computed)


class Values:
    """A tensor of the language: ``array``, numbers of ``kind``."""

    def __init__(self, array: Any, kind: Kind) -> None:
        # Not copied: no operation changes an array.
        self.array: Array = np.asarray(array, kind.computed)
        self.kind = self.dtype = kind

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=Layout())

    def bits(self) -> Array:
        array = np.ascontiguousarray(self.array).reshape(self.shape)  # also of no dimension
        if self.kind is BFLOAT16:
            return (array.view(np.uint32) >> 16).astype(np.uint16)
        return array.view(self.kind.stored)

    def to(self, kind: Kind, bitcast: bool = False) -> "Values":
        if bitcast:
            assert kind.primitive_bitwidth == self.kind.primitive_bitwidth
            return Values(_from_bits(self.bits(), kind), kind)
        return Values(_rounded(self.array) if kind is BFLOAT16 else self.array, kind)

    def __getitem__(self, places: Any) -> "Values":
        return Values(self.array[places], self.kind)

    def _with(self, other: Any, operation: Callable[[Any, Any], Any], turned: bool = False) -> "Values":
        kind, number = self.kind, other
        if isinstance(other, Values):
            number = other.array
            if (other.kind.is_float, other.kind.primitive_bitwidth) > (
                kind.is_float,
                kind.primitive_bitwidth,
            ):
                kind = other.kind
        elif isinstance(other, float) and not kind.is_float:
            kind = FLOAT32
        if kind is not INT1 and not isinstance(number, bool):
            number = np.asarray(number, kind.computed)
        mine: Array = self.array.astype(kind.computed, copy=False)
        found = operation(number, mine) if turned else operation(mine, number)
        return Values(found, INT1 if found.dtype == np.bool_ else kind)

    def __add__(self, other: Any) -> Any:
        return other.__radd__(self) if isinstance(other, Pointers) else self._with(other, np.add)

    def __radd__(self, other: Any) -> "Values":
        return self._with(other, np.add)

    def __sub__(self, other: Any) -> "Values":
        return self._with(other, np.subtract)

    def __rsub__(self, other: Any) -> "Values":
        return self._with(other, np.subtract, turned=True)

    def __mul__(self, other: Any) -> "Values":
        return self._with(other, np.multiply)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "Values":
        return self._with(other, np.divide)

    def __rtruediv__(self, other: Any) -> "Values":
        return self._with(other, np.divide, turned=True)

    def __floordiv__(self, other: Any) -> "Values":
        return self._with(other, np.floor_divide)

    def __mod__(self, other: Any) -> "Values":
        return self._with(other, np.remainder)

    def __and__(self, other: Any) -> "Values":
        return self._with(other, np.bitwise_and)

    def __or__(self, other: Any) -> "Values":
        return self._with(other, np.bitwise_or)

    def __lshift__(self, other: Any) -> "Values":
        return self._with(other, np.left_shift)

    def __rshift__(self, other: Any) -> "Values":
        return self._with(other, np.right_shift)

    def __neg__(self) -> "Values":
        return Values(-self.array, self.kind)

    def __lt__(self, other: Any) -> "Values":
        return self._with(other, np.less)

    def __eq__(self, other: object) -> Any:
        return self._with(other, np.equal)

    __hash__ = None  # type: ignore[assignment]


class Pointers:
    """Addresses in ``memory`` [bytes] uint8 of numbers of ``kind``: ``offsets`` in bytes."""

    def __init__(self, memory: Array, kind: Kind, offsets: Any = 0) -> None:
        self.memory, self.kind, self.offsets = memory, kind, np.asarray(offsets, np.int64)
        self.dtype = SimpleNamespace(element_ty=kind)

    def to(self, kind: Any, bitcast: bool) -> "Pointers":
        assert bitcast
        return Pointers(self.memory, kind, self.offsets)

    def __add__(self, other: Any) -> "Pointers":
        steps = other.array.astype(np.int64) if isinstance(other, Values) else other
        return Pointers(self.memory, self.kind, self.offsets + steps * (self.kind.primitive_bitwidth // 8))

    __radd__ = __add__

    def numbers(self, mask: Any) -> tuple[Array, Array]:
        """Memory as numbers' bits, and the places in it where ``mask`` is true; all of them exist."""
        size = self.kind.primitive_bitwidth // 8
        numbers: Array = self.memory[: len(self.memory) // size * size].view(self.kind.stored)
        assert not (self.offsets[mask] % size).any(), "not aligned"
        places = self.offsets[mask] // size
        assert ((places >= 0) & (places < len(numbers))).all(), "out of bounds"
        return numbers, places


@dataclass
class Layout:
    """Stands for any layout: none is followed."""

    warps_per_cta: tuple[int, ...] = (1, 1)


class Shared:
    """Shared memory: ``bits`` of numbers of ``kind``."""

    def __init__(self, bits: Array, kind: Kind) -> None:
        self.bits, self.kind = bits, kind

    def index(self, place: Any) -> "Shared":
        return Shared(self.bits[place], self.kind)

    def store(self, values: Values) -> None:
        self.bits[:] = values.bits()

    def load(self, layout: object) -> Values:
        return Values(_from_bits(self.bits.copy(), self.kind), self.kind)

    def _reinterpret(self, kind: Kind, shape: Sequence[int], layout: object) -> "Shared":
        assert kind is self.kind
        return Shared(self.bits.reshape(shape), kind)


def language(program: SimpleNamespace) -> ModuleType:
    """The module ``triton.experimental.gluon.language``; ``program`` says which one runs."""
    gl: Any = ModuleType("triton.experimental.gluon.language")
    for name, kind in KINDS.items():
        setattr(gl, name, kind)
    gl.constexpr = lambda value: value
    gl.static_range = range
    gl.pointer_type = lambda kind: kind
    gl.barrier = lambda: None
    gl.program_id = lambda axis: program.id
    gl.num_programs = lambda axis: program.count
    gl.num_warps = lambda: program.warps
    gl.BlockedLayout = lambda size, threads, warps, order: Layout(tuple(warps))
    gl.SliceLayout = gl.SwizzledSharedLayout = lambda *parts: Layout()
    gl.arange = lambda start, end, layout: Values(np.arange(start, end), INT32)
    gl.zeros = lambda shape, kind, layout: Values(np.zeros(shape), kind)
    gl.full = lambda shape, value, kind, layout: Values(np.broadcast_to(_plain(value), shape), kind)
    gl.zeros_like = lambda values: Values(np.zeros(values.shape), values.kind)
    gl.full_like = lambda values, value: Values(np.full(values.shape, value), values.kind)
    gl.convert_layout = lambda values, layout, assert_trivial: values
    gl.max_contiguous = lambda values, count: values
    gl.expand_dims = lambda values, axis: Values(np.expand_dims(values.array, axis), values.kind)
    gl.reshape = lambda values, shape: Values(values.array.reshape(shape), values.kind)
    gl.permute = lambda values, order: Values(values.array.transpose(order), values.kind)
    gl.split = lambda values: tuple(Values(values.array[..., i], values.kind) for i in range(2))
    gl.sum = lambda values, axis: Values(values.array.sum(axis, dtype=values.kind.computed), values.kind)
    gl.max = lambda values, axis: Values(values.array.max(axis), values.kind)
    gl.maximum = lambda values, other: values._with(other, np.maximum)
    gl.exp = lambda values: Values(np.exp(values.array), values.kind)
    gl.rsqrt = lambda values: Values(1 / np.sqrt(values.array), values.kind)
    gl.fma = lambda a, b, c: Values(a.array.astype(np.float64) * b.array + c.array, FLOAT32)
    gl.where, gl.store = _where, _store

    def load(pointers: Pointers, mask: Any = None, other: Any = 0, eviction_policy: str = "") -> Values:
        values = _load(pointers, mask, other)
        loaded = values.array.size if mask is None else np.broadcast_to(mask.array, values.shape).sum()
        address = pointers.memory.ctypes.data
        size = pointers.kind.primitive_bitwidth // 8
        program.loaded[address] = program.loaded.get(address, 0) + int(loaded) * size
        return values

    gl.load = load
    gl.allocate_shared_memory = lambda kind, shape, layout: Shared(np.zeros(shape, kind.stored), kind)
    gl.inline_asm_elementwise = _inline_ptx
    return gl  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    return value.array if isinstance(value, Values) else value


def _where(condition: Values, first: Any, second: Any) -> Values:
    kind = first.kind if isinstance(first, Values) else second.kind
    return Values(np.where(condition.array, _plain(first), _plain(second)), kind)


def _load(pointers: Pointers, mask: Any, other: Any) -> Values:
    shape = pointers.offsets.shape
    inside = np.broadcast_to(True if mask is None else mask.array, shape)
    bits: Array = np.zeros(shape, pointers.kind.stored)
    assert not other
    numbers, places = pointers.numbers(inside)
    bits[inside] = numbers[places]
    return Values(_from_bits(bits, pointers.kind), pointers.kind)


def _store(pointers: Pointers, values: Values, mask: Any = None) -> None:
    inside = np.broadcast_to(True if mask is None else mask.array, pointers.offsets.shape)
    numbers, places = pointers.numbers(inside)
    numbers[places] = np.broadcast_to(values.to(pointers.kind).bits(), inside.shape)[inside]


def _inline_ptx(
    ptx: str, constraints: str, arguments: Sequence[Values], kinds: Any, is_pure: bool, pack: int
) -> Any:
    several = isinstance(kinds, tuple)
    results = kinds if several else (kinds,)
    arrays = np.broadcast_arrays(*(each.array for each in arguments))
    words = [Values(array, each.kind).bits() for array, each in zip(arrays, arguments, strict=True)]
    found = run_ptx(ptx, {f"${number}": each for number, each in enumerate(words, len(results))})
    values = [Values(_from_bits(found[f"${i}"], kind), kind) for i, kind in enumerate(results)]
    return tuple(values) if several else values[0]


# --- PTX ---------------------------------------------------------------------------------------------------

WORD = 0xFFFFFFFF
_E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).half().view(torch.int16).numpy()


@cache
def _statements(ptx: str) -> list[tuple[str, list[str], list[list[str]]]]:
    """Operation, results and operands of each; several registers of one are in braces."""
    found = []
    for statement in ptx.split(";"):
        line = statement.strip()
        line = line[1:].strip() if line.startswith("{") else line
        if not line or line.startswith((".reg", "}")):
            continue
        operation, _, rest = line.partition(" ")
        out, *names = (re.findall(r"[^{},\s]+", each) for each in re.findall(r"\{[^}]*\}|[^,\s]+", rest))
        found.append((operation, out, names))
    return found


def run_ptx(ptx: str, arguments: dict[str, Array]) -> dict[str, Array]:
    """Registers uint32 after ``ptx``, of the few instructions that products are made of.

    They are [n], for matrix units [rows, lanes]. ``arguments``: ``$1`` and so on.
    """
    registers: dict[str, Array] = dict(arguments)
    registers |= {"%lanemask_lt": np.asarray(5, np.uint32), "%lanemask_gt": np.asarray(0xFFFFFFF8, np.uint32)}

    def value(name: str) -> Array:
        return np.asarray(registers[name] if name in registers else int(name, 0), np.uint32)

    for operation, outs, names in _statements(ptx):
        if operation.startswith("mma.sync"):
            matrices = [[value(each) for each in matrix] for matrix in names]
            registers |= zip(outs, _mma(operation, *matrices), strict=True)
            continue
        inputs = [value(each) for [each] in names]
        if len(outs) == 2:  # a word's halves
            low, high = outs
            registers[low], registers[high] = inputs[0] & 0xFFFF, inputs[0] >> 16
        else:
            registers[outs[0]] = _instruction(operation, inputs)
    return registers


def _instruction(operation: str, inputs: list[Array]) -> Any:
    name, *modes = operation.split(".")
    if name == "mov":
        return inputs[0]
    if name in ("xor", "and", "or"):
        return {"xor": np.bitwise_xor, "and": np.bitwise_and, "or": np.bitwise_or}[name](*inputs)
    if name == "shr":
        return inputs[0] >> inputs[1]
    if name == "prmt":
        return _permuted(*inputs)
    if name == "dp2a":
        return _dp2a(modes[0], modes[2], *inputs)
    if operation == "cvt.rn.f16x2.e4m3x2":
        low, high = (_E4M3[inputs[0] >> shift & 0xFF].view(np.uint16).astype(np.uint32) for shift in (0, 8))
        return low | high << 16
    if operation == "cvt.f32.f16":
        return inputs[0].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    if operation == "fma.rn.f32":
        a, b, c = (np.ascontiguousarray(each).view(np.float32).astype(np.float64) for each in inputs)
        return (a * b + c).astype(np.float32).view(np.uint32)
    raise ValueError(operation)


def _permuted(low: Array, high: Array, selector: Array) -> Array:
    """prmt: bytes of ``high:low``, or their signs, by four nibbles of ``selector``."""
    source = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    result: Array = np.zeros(1, np.uint64)
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = source >> ((nibble & 7) * 8).astype(np.uint64) & np.uint64(0xFF)
        byte = np.where(nibble & 8, np.where(byte & np.uint64(0x80), 0xFF, 0), byte).astype(np.uint64)
        result = result | byte << np.uint64(8 * place)
    return result.astype(np.uint32)


def _mma(operation: str, a: list[Array], b: list[Array], c: list[Array]) -> list[Array]:
    """mma.sync.m16n8k16 of registers [rows, lanes]: a warp's lanes are two rows of sixteen."""
    assert operation.startswith("mma.sync.aligned.m16n8k16.row.col.f32.")
    kind = {"bf16": BFLOAT16, "f16": FLOAT16}[operation.split(".")[7]]
    rows, lanes = c[0].shape

    def by_warp(array: Array) -> Array:
        """[warps, warps, 8, 4]: lanes of a warp as eight groups of four."""
        array = array.reshape(rows // 2, 2, lanes // 16, 4, 4).transpose(0, 2, 1, 3, 4)
        return array.reshape(rows // 2, lanes // 16, 8, 4)

    def words(registers: list[Array]) -> list[Array]:
        """Two numbers of each word, neighbours: [warps, warps, 8, 8]."""
        found = []
        for each in registers:
            halves = [(by_warp(each) >> shift & 0xFFFF).astype(np.uint16) for shift in (0, 16)]
            wide = np.stack([_from_bits(half, kind).astype(np.float64) for half in halves], -1)
            found.append(wide.reshape(*wide.shape[:3], 8))
        return found

    a0, a1, a2, a3 = words(a)  # upper and lower rows, by the first inputs; the same by the others
    first = np.concatenate((np.concatenate((a0, a2), -1), np.concatenate((a1, a3), -1)), -2)  # [16, 16]
    second = np.concatenate(words(b), -1)  # [8, 16]: of each column all inputs
    sums = first @ second.swapaxes(-1, -2)
    parts = [sums[..., :8, 0::2], sums[..., :8, 1::2], sums[..., 8:, 0::2], sums[..., 8:, 1::2]]
    results = []
    for part, before in zip(parts, c, strict=True):
        array = part + _from_bits(by_warp(before), FLOAT32)
        array = array.reshape(rows // 2, lanes // 16, 2, 16).transpose(0, 2, 1, 3).reshape(rows, lanes)
        results.append(array.astype(np.float32).view(np.uint32))
    return results


def _dp2a(mode: str, kind: str, pair: Array, word: Array, total: Array) -> Array:
    """Two signed 16-bit integers times two of a word's bytes, plus ``total``."""
    result = total.astype(np.int64)
    for i, place in enumerate((0, 1) if mode == "lo" else (2, 3)):
        byte = (word >> 8 * place & 0xFF).astype(np.uint8)
        number = (pair >> 16 * i & 0xFFFF).astype(np.uint16).view(np.int16).astype(np.int64)
        result = result + number * (byte.view(np.int8) if kind == "s32" else byte)
    return (result & WORD).astype(np.uint32)


# --- kernels -----------------------------------------------------------------------------------------------


@contextmanager
def kernel_modules(*names: str) -> Iterator[dict[str, ModuleType]]:
    """The modules ``names``, each imported anew after those that it imports, with the language above.

    Within the block ``import`` finds them, too. ``OnCpu`` runs their functions.
    """
    program = SimpleNamespace(id=0, count=1, warps=1, loaded={})
    gluon: Any = ModuleType("triton.experimental.gluon")
    gluon.language = language(program)
    gluon.jit = lambda function=None, **_: (lambda f: f) if function is None else function
    gluon.program = program
    replaced = {
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gluon.language,
    }
    before = {name: sys.modules.get(name) for name in (*replaced, *names)}
    experimental: Any = importlib.import_module("triton.experimental")
    found = getattr(experimental, "gluon", None)  # what ``from triton.experimental import gluon`` looks at
    made = {}
    try:
        sys.modules.update(replaced)
        experimental.gluon = gluon
        for name in names:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.loader is not None
            made[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(made[name])
        yield made
    finally:
        if found is None:
            del experimental.gluon
        else:
            experimental.gluon = found
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


class OnCpu:
    """A kernel of ``kernel_modules`` that is launched as one of Triton's: ``kernel[grid](...)``.

    ``launches``: grids and constants. ``loaded``: bytes of each tensor in the last one, by its address.
    """

    def __init__(self, module: ModuleType, name: str) -> None:
        self._function = getattr(module, name)
        self._program = sys.modules["triton.experimental.gluon"].program
        self.launches: list[tuple[int, dict[str, Any]]] = []
        self.loaded: dict[int, int] = {}

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.launches.append((grid[0], dict(constants)))
            self._program.count, self._program.warps = grid[0], constants.pop("num_warps")
            constants.pop("maxnreg", None)
            self.loaded = self._program.loaded = {}
            passed = [_pointer(each) if isinstance(each, Tensor) else each for each in arguments]
            with np.errstate(all="ignore"):
                for number in range(grid[0]):
                    self._program.id = number
                    self._function(*passed, **constants)

        return launch


def _pointer(tensor: Tensor) -> Pointers:
    assert tensor.is_contiguous()
    return Pointers(tensor.view(-1).view(torch.uint8).numpy(), OF_TORCH[tensor.dtype])
