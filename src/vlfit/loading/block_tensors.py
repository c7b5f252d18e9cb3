"""Blocks of GGUF files to tensors: dequantized weights, or integer codes and scales that lose nothing.

A codec takes blocks [n, bytes] uint8 apart into codes and scales; a weight is code * scale, or code * scale -
minimum, computed in float32 like in the ``gguf`` package, whose numbers these are bit for bit. Its numpy
dequantizes the types that have no codec here. ``checkpoint/gguf/stored_blocks.py`` says which tensor becomes
what.

Works on slices of rows, on the device of the result: beside source and target it takes there one to eight
bytes for each of the weights that it takes at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from vlfit.checkpoint.gguf.stored_blocks import EXACT_FORMS, BlockPart, HeadOrder, NumberChange, StoredBlocks
from vlfit.checkpoint.quantization import CODEBOOKS
from vlfit.layers.linear import expand_scales, pack_codes

# On a GPU in 64 MiB, while nothing but weights is there.
_WEIGHTS_AT_ONCE, _WEIGHTS_AT_ONCE_ON_GPU = 2**21, 2**23
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Split = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Codec:
    """Takes blocks [n, ``block_bytes``] uint8 apart.

    ``codes``: [n, weights] int8, with ``codebook`` uint8 indices into it. ``scales``: [n, groups] float32; of
    two levels: int8, or int16 with minima.
    ``supers``: of two levels the super scales [n, supers]: float16, or int32 with minima; else None.
    """

    block_bytes: int
    codes: Split
    scales: Split
    supers: Split | None = None
    codebook: str | None = None

    def values(self, stored: Tensor) -> Tensor:
        """The integers [n, weights] int8 that the codes of ``stored`` blocks stand for."""
        codes = self.codes(stored)
        if self.codebook is None:
            return codes
        return torch.tensor(CODEBOOKS[self.codebook], dtype=torch.int8, device=codes.device)[codes.int()]


def fill_from_blocks(raw: Tensor, blocks: StoredBlocks, target: Tensor, second: Tensor | None = None) -> None:
    """Fill ``target`` with what ``blocks`` describes, converted to its dtype.

    ``raw``: uint8, the tensor's bytes in the file, flat; ``second``: those of ``blocks.second_half``.
    ``target``: weights in ``blocks.shape`` (with a third-last dimension of 2 for two halves), codes [rows,
    columns] int8 or [rows, ``packed_words``] int32, or scales [rows, groups], or super scales
    [rows, super groups], on any device. Codes and scales are of a type in ``EXACT_FORMS``.
    """
    rows, device = blocks.shape[0], target.device
    data = raw.view(rows, -1)
    if second is not None:
        halves = [dequantize_blocks(each.view(rows, -1).to(device), blocks.type) for each in (data, second)]
        stacked = [half.view(blocks.shape).unsqueeze(-3) for half in halves]
        target.copy_(torch.cat(stacked, dim=-3))
        return
    places, first = rows_in_tensor(blocks), 0
    for some in data.split(rows_at_once(blocks, device)):
        fill_rows(some.to(device), first, blocks, target, places)
        first += len(some)


def rows_at_once(blocks: StoredBlocks, device: torch.device) -> int:
    """How many rows of the file are taken apart at once on ``device``."""
    at_once = _WEIGHTS_AT_ONCE_ON_GPU if device.type == "cuda" else _WEIGHTS_AT_ONCE
    return max(at_once // max(prod(blocks.shape[1:]), 1), 1)


def fill_rows(raw: Tensor, first: int, blocks: StoredBlocks, target: Tensor, places: Tensor | None) -> None:
    """Fill what ``target`` has of the rows ``raw`` [n, bytes] uint8 of the file, from row ``first`` on.

    ``raw`` is on the device of ``target``, or in RAM if it has no codec; ``places``:
    ``rows_in_tensor(blocks)``. Otherwise as ``fill_from_blocks``; not for a tensor with a second half.
    """
    flat = target.view(blocks.shape[0], -1)
    rows = slice(first, first + len(raw))
    if places is None:
        flat[rows].copy_(_convert(raw, blocks, flat))
    else:
        converted = _convert(raw, blocks, flat).to(flat.device, flat.dtype)
        flat.index_copy_(0, places[rows].to(flat.device), converted)


def has_codec(block_type: str) -> bool:
    """Whether ``block_type`` is taken apart here, on any device: not by the ``gguf`` package, in RAM."""
    return block_type in _PLAIN or block_type in _CODECS


def rows_in_tensor(blocks: StoredBlocks) -> Tensor | None:
    """The row of the tensor at which each row of the file is, int64 [rows]; None: all are in order."""
    rows = rows_in_file(blocks)
    return None if rows is None else rows.argsort()


def rows_in_file(blocks: StoredBlocks) -> Tensor | None:
    """The row of the file in which each row of the tensor is, int32 [rows]; None: all are in order."""
    has_order = blocks.order is not None and blocks.order.axis == 0
    if not blocks.rope_heads and not has_order:
        return None
    rows = _in_order(torch.arange(blocks.shape[0], dtype=torch.int32).unsqueeze(1), blocks.rope_heads)
    return (put_back(rows, blocks.order) if has_order and blocks.order is not None else rows).flatten()


def _convert(rows: Tensor, blocks: StoredBlocks, target: Tensor) -> Tensor:
    """``rows`` [n, bytes] as rows of ``target`` [rows, ...]; its dtype is the caller's."""
    if blocks.part is BlockPart.WEIGHTS:
        return _changed_back(_columns(dequantize_blocks(rows, blocks.type), blocks), blocks.change)
    codec = _CODECS[blocks.type]
    stored = rows.reshape(-1, codec.block_bytes)
    if blocks.part is BlockPart.SCALES:
        return _columns(codec.scales(stored).view(len(rows), -1), blocks)
    if blocks.part is BlockPart.SUPER_SCALES:
        assert codec.supers is not None
        supers = codec.supers(stored).view(len(rows), -1)
        return _columns(supers.repeat_interleave(target.shape[1] // supers.shape[1], dim=1), blocks)
    if target.dtype != torch.int32:
        return _columns(codec.values(stored).view(len(rows), -1), blocks)
    form = EXACT_FORMS[blocks.type]
    codes = _columns(codec.codes(stored).view(len(rows), -1), blocks)
    if form.codebook is None and form.scale_dtype != "I16":
        codes = codes + (1 << form.bits - 1)
    return pack_codes(codes.view(torch.uint8), form.bits)


def dequantize_blocks(rows: Tensor, block_type: str) -> Tensor:
    """The weights [rows, columns] float32 of ``rows`` [rows, bytes] uint8, each of whole blocks."""
    if block_type in _PLAIN:
        return rows.contiguous().view(_PLAIN[block_type]).float()
    codec = _CODECS.get(block_type)
    if codec is None:
        return _by_package(rows, block_type)
    stored = rows.reshape(-1, codec.block_bytes)
    scales, minima = codec.scales(stored), None
    if codec.supers is not None:
        scales, minima = expand_scales(scales, codec.supers(stored))
    weights = codec.values(stored).view(*scales.shape, -1).float().mul_(scales.unsqueeze(2))
    if minima is not None:
        weights.sub_(minima.unsqueeze(2))
    return weights.view(len(rows), -1)


def _by_package(rows: Tensor, block_type: str) -> Tensor:
    """``dequantize_blocks`` by the ``gguf`` package."""
    import gguf

    with np.errstate(all="ignore"):  # whether weights are finite is checked where they are used
        values = gguf.dequantize(rows.cpu().contiguous().numpy(), gguf.GGMLQuantizationType[block_type])
    return torch.from_numpy(values).float().to(rows.device)


def _in_order(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's reordering of the rows of ``heads`` heads for its rotary embedding; 0: as they are."""
    if not heads:
        return rows
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _columns(values: Tensor, blocks: StoredBlocks) -> Tensor:
    """``values`` [n, columns, or groups of columns] with the heads of columns put back."""
    order = blocks.order
    if order is None or order.axis == 0:
        return values
    group = blocks.shape[1] // values.shape[1]
    ordered = put_back(values.T, replace(order, width=order.width // group))
    return ordered.T.clone(memory_format=torch.contiguous_format)  # also of one row, whose strides may be any


def put_back(rows: Tensor, order: HeadOrder) -> Tensor:
    """``rows`` [n, ...] of a file, with heads in the checkpoint's order, whatever ``order.axis``."""
    return _swapped(rows, order, (order.repeats, order.groups))


def as_in_files(rows: Tensor, order: HeadOrder) -> Tensor:
    """The inverse of ``put_back``."""
    return _swapped(rows, order, (order.groups, order.repeats))


def _swapped(rows: Tensor, order: HeadOrder, counts: tuple[int, int]) -> Tensor:
    heads = rows[order.start :].unflatten(0, (*counts, order.width)).transpose(0, 1)
    return torch.cat((rows[: order.start], heads.flatten(0, 2)))


def _changed_back(weights: Tensor, change: NumberChange | None) -> Tensor:
    if change is NumberChange.PLUS_ONE:
        return weights - 1
    return weights.neg().log() if change is NumberChange.MINUS_EXP else weights


# --- codecs ------------------------------------------------------------------------------------------------


def _nibbles(data: Tensor, run: int) -> Tensor:
    """Of every ``run`` bytes of [n, bytes] the low halves, then the high ones: [n, 2 * bytes] uint8."""
    parts = data.unflatten(1, (-1, run))
    both = torch.empty(len(data), parts.shape[1], 2, run, dtype=torch.uint8, device=data.device)
    torch.bitwise_and(parts, 15, out=both[:, :, 0])
    torch.bitwise_right_shift(parts, 4, out=both[:, :, 1])
    return both.view(len(data), -1)


def _shifts(step: int, like: Tensor) -> Tensor:
    """0, ``step``, 2 * ``step``, ... below 8, on the device of ``like``: [n, 1] uint8."""
    return torch.arange(0, 8, step, dtype=torch.uint8, device=like.device).unsqueeze(1)


def _fifth_bits(data: Tensor) -> Tensor:
    """The bits of [n, 4], lowest first, as 16: [n, 32] uint8."""
    shifts = _shifts(1, data).view(8)
    return ((data.unsqueeze(2) >> shifts & 1) << 4).view(len(data), 32)


def _bit_pairs(data: Tensor) -> Tensor:
    """Of every 32 bytes of [n, bytes] bits 0-1, then 2-3, 4-5, 6-7: [n, 4 * bytes] uint8."""
    shifts = _shifts(2, data)
    return (data.reshape(len(data), -1, 1, 32) >> shifts & 3).view(len(data), -1)


def _bits_of_bytes(data: Tensor) -> Tensor:
    """Of [n, 32] all lowest bits, then the next ones up to the highest: [n, 256] uint8."""
    return (data.unsqueeze(1) >> _shifts(1, data) & 1).view(len(data), -1)


def _less(codes: Tensor, middle: int) -> Tensor:
    """``codes`` (uint8 below 128) less ``middle``, int8."""
    return codes.view(torch.int8) - middle


def _paired(scales: Tensor, minima: Tensor) -> Tensor:
    """Scales and minima, both [n, groups] uint8, in the low and high bytes of int16."""
    return torch.stack((scales, minima), dim=2).view(torch.int16).squeeze(2)


def _six_bit_scales(blocks: Tensor) -> Tensor:
    """Eight scales and eight minima of 6 bits in the 12 bytes from 4 on (Q4_K, Q5_K): [n, 8] int16."""
    low, high, rest = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 63, rest & 15 | low >> 2 & 48), dim=1)
    return _paired(scales, torch.cat((high & 63, rest >> 4 | high >> 2 & 48), dim=1))


def _plain_scales(blocks: Tensor) -> Tensor:
    """1 for scale and minimum of a block that has one of each: [n, 1] int16."""
    return torch.full((len(blocks), 1), 0x0101, dtype=torch.int16, device=blocks.device)


def _negative_minimum(blocks: Tensor) -> Tensor:
    """Scale and negative minimum, two float16, at the start of each block: [n, 1] int32 without the minus."""
    return _word(blocks, 0) ^ (1 << 31) - 2**32


def _word(blocks: Tensor, start: int) -> Tensor:
    """The 32 bits at byte ``start`` of each block: [n, 1] int32."""
    return blocks[:, start : start + 4].contiguous().view(torch.int32)


def _stored_half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block: [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _q5_codes(blocks: Tensor, start: int) -> Tensor:
    """Codes of 5 bits: their fifth bits in 4 bytes from ``start`` on, the others in the 16 after."""
    return _nibbles(blocks[:, start + 4 :], 16) | _fifth_bits(blocks[:, start : start + 4])


def _q5_k_codes(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 48:], 32) | _bits_of_bytes(blocks[:, 16:48]) << 4).view(torch.int8)


def _q6_k_codes(blocks: Tensor) -> Tensor:
    return _less(_nibbles(blocks[:, :128], 64) | _bit_pairs(blocks[:, 128:192]) << 4, 32)


def _q3_k_codes(blocks: Tensor) -> Tensor:
    return _less(_bit_pairs(blocks[:, 32:96]) | _bits_of_bytes(blocks[:, :32]) << 2, 4)


def _q3_k_scales(blocks: Tensor) -> Tensor:
    packed = blocks[:, 96:108]
    low = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), dim=1)
    high = torch.cat([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    return _less(low | high << 4, 32)


def _iq4_xs_scales(blocks: Tensor) -> Tensor:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).view(-1, 8)
    high = torch.stack([blocks[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).view(-1, 8)
    return _less(low | high << 4, 32)


def _iq3_s_scales(blocks: Tensor) -> Tensor:
    """Odd numbers up to 31."""
    stored = blocks[:, 106:110]
    return (torch.stack((stored & 15, stored >> 4), dim=2).view(-1, 8) * 2 + 1).view(torch.int8)


def _iq3_s_codes(blocks: Tensor) -> Tensor:
    """Fours of a table of 512 odd numbers up to 15, found by 9 bits each, and a bit for each sign."""
    ninth = (blocks[:, 66:74].unsqueeze(2) >> _shifts(1, blocks).view(8) & 1).view(-1, 64)
    fours = blocks[:, 2:66].int() | ninth.int() << 8
    negative = (blocks[:, 74:106].unsqueeze(2) >> _shifts(1, blocks).view(8) & 1).view(-1, 256)
    magnitudes = _iq3_s_table().to(blocks.device)[fours].view(-1, 256)
    return (torch.where(negative.bool(), -magnitudes, magnitudes) + 15 >> 1).view(torch.uint8)


@cache
def _iq3_s_table() -> Tensor:
    """[512, 4] int8, from the ``gguf`` package."""
    from gguf.quants import IQ3_S

    IQ3_S.init_grid()  # type: ignore[no-untyped-call]
    assert IQ3_S.grid is not None
    return torch.from_numpy(IQ3_S.grid.reshape(512, 4)).to(torch.int8)


def _mxfp4_scales(blocks: Tensor) -> Tensor:
    """Half of 2 to the power of a byte less 127; the two smallest are subnormal."""
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), exponent - 1 << 23)
    return bits.view(torch.float32)


def _nvfp4_scales(blocks: Tensor) -> Tensor:
    """Half of an e4m3 without a sign; 127 counts as 0."""
    stored = blocks[:, :4].int()
    exponent, fraction = stored >> 3 & 15, (stored & 7).float()
    normal = (1 + fraction / 8) * (exponent + 120 << 23).view(torch.float32)  # times 2 ** (exponent - 7)
    value = torch.where(exponent == 0, fraction * 2**-9, normal) * 0.5
    return torch.where((stored == 0) | (stored == 127), torch.zeros_like(value), value)


def _first_half(blocks: Tensor) -> Tensor:
    return _stored_half(blocks, 0).float()


_CODECS = {
    "Q4_0": Codec(18, lambda b: _less(_nibbles(b[:, 2:], 16), 8), _first_half),
    "Q4_1": Codec(20, lambda b: _nibbles(b[:, 4:], 16).view(torch.int8), _plain_scales, _negative_minimum),
    "Q5_0": Codec(22, lambda b: _less(_q5_codes(b, 2), 16), _first_half),
    "Q5_1": Codec(24, lambda b: _q5_codes(b, 4).view(torch.int8), _plain_scales, _negative_minimum),
    "Q8_0": Codec(34, lambda b: b[:, 2:].contiguous().view(torch.int8), _first_half),
    "Q2_K": Codec(
        84,
        lambda b: _bit_pairs(b[:, 16:80]).view(torch.int8),
        lambda b: _paired(b[:, :16] & 15, b[:, :16] >> 4),
        lambda b: _word(b, 80),
    ),
    "Q3_K": Codec(110, _q3_k_codes, _q3_k_scales, lambda b: _stored_half(b, 108)),
    "Q4_K": Codec(
        144, lambda b: _nibbles(b[:, 16:], 32).view(torch.int8), _six_bit_scales, lambda b: _word(b, 0)
    ),
    "Q5_K": Codec(176, _q5_k_codes, _six_bit_scales, lambda b: _word(b, 0)),
    "Q6_K": Codec(
        210,
        _q6_k_codes,
        lambda b: b[:, 192:208].contiguous().view(torch.int8),
        lambda b: _stored_half(b, 208),
    ),
    "IQ3_S": Codec(110, _iq3_s_codes, _iq3_s_scales, lambda b: _stored_half(b, 0), "odd"),
    "IQ4_NL": Codec(18, lambda b: _nibbles(b[:, 2:], 16), _first_half, None, "iq4nl"),
    "IQ4_XS": Codec(
        136, lambda b: _nibbles(b[:, 8:], 16), _iq4_xs_scales, lambda b: _stored_half(b, 0), "iq4nl"
    ),
    "MXFP4": Codec(17, lambda b: _nibbles(b[:, 1:], 16), _mxfp4_scales, None, "e2m1"),
    "NVFP4": Codec(36, lambda b: _nibbles(b[:, 4:], 8), _nvfp4_scales, None, "e2m1"),
}
