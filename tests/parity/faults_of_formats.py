"""Faults of formats: weights of AWQ, GPTQ, compressed-tensors, FP8 and GGUF read otherwise than defined.

The engine's copy of a file is changed as if it were read wrongly; the reference reads the file as it is.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.fault_table import C, fault
from tests.parity.faults_of_files import tensor_bytes

DOWN = "model.language_model.layers.1.mlp.down_proj."
GATE = "model.language_model.layers.1.mlp.gate_proj."
QUERY = "model.language_model.layers.1.self_attn.q_proj."
Bytes = np.ndarray[Any, Any]


def _rewrite(folder: Path, name: str, alter: Callable[[Bytes], None], dtype: Any = np.uint8) -> None:
    """Change the bytes of one safetensors tensor in place, seen as a flat array of ``dtype``."""
    path, begin, end = tensor_bytes(folder, name)
    data = bytearray(path.read_bytes())
    values = np.frombuffer(bytes(data[begin:end]), dtype).copy()
    before = values.copy()
    alter(values)
    assert (values != before).any(), "nothing changed"
    data[begin:end] = values.tobytes()
    path.write_bytes(data)


def _swap_nibbles(values: Bytes) -> None:
    values[:] = (values >> 4) | (values << 4)


def _one_more(values: Bytes) -> None:
    """One more in the lowest nibble of every word of 32 bits, without a carry."""
    low = values & 0xF
    values[:] = (values & np.uint32(0xFFFFFFF0)) | ((low + 1) & 0xF)


@fault("GPTQ: a zero point of each eight one off", C.MLP, how="edit", spec="gptq, zero points")
def gptq_zero(folder: Path) -> None:
    _rewrite(folder, f"{DOWN}qzeros", _one_more, np.uint32)


@fault("GPTQ: two codes to a byte in the other order", C.MLP, how="edit", spec="gptq")
def gptq_codes(folder: Path) -> None:
    _rewrite(folder, f"{DOWN}qweight", _swap_nibbles)


@fault("GPTQ: the order of inputs is ignored", C.MLP, how="edit", spec="gptq in order")
def gptq_order(folder: Path) -> None:
    _rewrite(folder, f"{DOWN}g_idx", lambda values: values.sort(), np.int32)


@fault("GPTQ: 8 bits, scales of two groups swapped", C.MLP, how="edit", spec="gptq, 8 bits")
def gptq_scales(folder: Path) -> None:
    _rewrite(folder, f"{DOWN}scales", _swap_halves, np.uint16)


def _swap_halves(values: Bytes) -> None:
    values[:] = np.roll(values, len(values) // 2)


@fault("AWQ: codes in plain order", C.MLP, how="edit", spec="awq")
def awq_order(folder: Path) -> None:
    def alter(values: Bytes) -> None:
        nibbles = np.stack([(values >> (4 * at)) & 0xF for at in range(8)])
        plain = nibbles[[0, 4, 1, 5, 2, 6, 3, 7]]
        values[:] = sum((plain[at].astype(np.uint32) << np.uint32(4 * at) for at in range(8)), np.uint32(0))

    _rewrite(folder, f"{DOWN}qweight", alter, np.uint32)


@fault("AWQ: zero points one more", C.MLP, how="edit", spec="awq")
def awq_zero(folder: Path) -> None:
    _rewrite(folder, f"{GATE}qzeros", _one_more, np.uint32)


@fault("AWQ: scales of the next group", C.ATTENTION, how="edit", spec="awq")
def awq_scale(folder: Path) -> None:
    _rewrite(folder, f"{QUERY}scales", _swap_halves, np.uint16)


@fault("8 bits in groups: scales one group on", C.MLP, how="edit", spec="8 bits in groups")
def int8_groups(folder: Path) -> None:
    _rewrite(
        folder, f"{DOWN}weight_scale", lambda values: values.__setitem__(slice(None), np.roll(values, 1)),
        np.uint16,
    )  # fmt: skip


@fault("8 bits by row: one code off by one", C.MLP, how="edit", spec="8 bits by row")
def int8_code(folder: Path) -> None:
    def alter(values: Bytes) -> None:
        at = int(np.argmin(np.abs(values.astype(int) - 128)))  # no overflow there
        values[at] += 20

    _rewrite(folder, f"{DOWN}weight_packed", alter)


@fault("FP8 by row: scales of two rows swapped", C.MLP, how="edit", spec="FP8 by row")
def fp8_rows(folder: Path) -> None:
    def alter(values: Bytes) -> None:
        low, high = int(values.argmin()), int(values.argmax())
        values[[low, high]] = values[[high, low]]

    _rewrite(folder, f"{DOWN}weight_scale", alter, np.uint16)


@fault("FP8 read with three bits of mantissa as two", C.MLP, how="edit", spec="fp8")
def fp8_kind(folder: Path) -> None:
    import torch

    def alter(values: Bytes) -> None:
        numbers = torch.from_numpy(values.copy()).view(torch.float8_e5m2).float()
        narrow = numbers.nan_to_num(0.0).clamp(-448, 448).to(torch.float8_e4m3fn)
        values[:] = narrow.view(torch.uint8).numpy()

    _rewrite(folder, f"{DOWN}weight", alter)


@fault("FP8: denormal numbers become 0", C.MLP, C.ATTENTION, how="edit", spec="fp8")
def fp8_denormal(folder: Path) -> None:
    def alter(values: Bytes) -> None:
        values[(values & 0x78) == 0] = 0

    _rewrite(folder, f"{GATE}weight", alter)


# GGUF: blocks of the engine's copy are changed in the file -------------------------------------------------


def _blocks(model: Path, name: str, alter: Callable[[Bytes], None]) -> None:
    """Change the blocks [rows, bytes] of one tensor in place."""
    import gguf

    tensor = next(each for each in gguf.GGUFReader(model).tensors if each.name == name)
    data = bytearray(model.read_bytes())
    begin, count = int(tensor.data_offset), int(tensor.n_bytes)
    size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
    blocks = np.frombuffer(bytes(data[begin : begin + count]), np.uint8).copy().reshape(-1, size)
    before = blocks.copy()
    alter(blocks)
    assert (blocks != before).any(), "nothing changed"
    data[begin : begin + count] = blocks.tobytes()
    model.write_bytes(data)


@fault("GGUF Q4_0: the two halves of a block swapped", C.MLP, how="edit", spec="gguf q4_0 tied")
def q4_0_halves(model: Path) -> None:
    _blocks(model, "blk.1.ffn_down.weight", lambda blocks: _swap_nibbles(blocks[:, 2:]))


@fault("GGUF Q4_0: one block in the place of the next", C.MLP, how="edit", spec="gguf q4_0 tied")
def q4_0_order(model: Path) -> None:
    def alter(blocks: Bytes) -> None:
        blocks[[4, 5]] = blocks[[5, 4]]

    _blocks(model, "blk.1.ffn_down.weight", alter)


@fault("GGUF Q4_1: minima with the wrong sign", C.MLP, how="edit", spec="gguf q4_1 tied")
def q4_1_minima(model: Path) -> None:
    def alter(blocks: Bytes) -> None:
        blocks[:, 3] ^= 0x80

    _blocks(model, "blk.1.ffn_down.weight", alter)


@fault("GGUF Q5_0: fifth bits of a block left out", C.MLP, how="edit", spec="gguf q5_0 tied")
def q5_0_bits(model: Path) -> None:
    def alter(blocks: Bytes) -> None:
        blocks[7, 2:6] = 0

    _blocks(model, "blk.0.ffn_down.weight", alter)


@fault("GGUF Q8_0: a scale one bit off", C.MLP, how="edit", spec="gguf q8_0 tied")
def q8_0_scale(model: Path) -> None:
    def alter(blocks: Bytes) -> None:
        blocks[3, 0] ^= 0x10

    _blocks(model, "blk.1.ffn_down.weight", alter)


@fault(
    "GGUF: rows of Llama's keys stay permuted",
    C.ATTENTION,
    C.ROPE,
    how="edit",
    spec="gguf f16 llama_biased_stretched",
)
def llama_rows(model: Path) -> None:
    def alter(blocks: Bytes) -> None:
        heads, pairs = 2, 10
        blocks[:] = blocks.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(blocks.shape)

    _blocks(model, "blk.1.attn_k.weight", alter)
