"""Dequantization of converted checkpoints in numpy, written from the definition of the formats.

Independent of vlfit's own packing.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the files of ``folder``."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def dequantized(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the model in ``folder`` (FP8 or int4) as float32."""
    tensors = stored(folder)
    plain = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            scale = tensors[f"{module}.weight_scale"].float().numpy()
            rows, columns = tensors[f"{module}.weight_shape"].tolist()
            zero = tensors.get(f"{module}.weight_zero_point")
            bits = 32 * tensor.shape[1] // columns
            values = (
                int4(tensor, scale, zero, rows, columns) if bits == 4 else int8(tensor, scale, rows, columns)
            )
            plain[f"{module}.weight"] = torch.from_numpy(values)
        elif part == "weight" and tensor.dtype == torch.float8_e4m3fn:
            scales = [tensors[key] for key in (f"{name}_scale_inv", f"{name}_scale") if key in tensors]
            plain[name] = fp8(tensor, scales[0])
        elif part in ("weight", "bias"):
            plain[name] = tensor.float()
    return plain


def int4(
    packed: Tensor, scale: np.ndarray[Any, Any], zero: Tensor | None, rows: int, columns: int
) -> np.ndarray[Any, Any]:
    """Element by element: code ``column`` is in bits ``4 * (column % 8)`` of word ``column // 8``."""
    words = packed.numpy().astype(np.int64) & 0xFFFFFFFF
    group = columns // scale.shape[1]
    result = np.empty((rows, columns), np.float32)
    for column in range(columns):
        codes = words[:, column // 8] >> (4 * (column % 8)) & 15
        of = column // group
        offset = np.full(rows, 8) if zero is None else zero_points(zero, rows)[:, of]
        result[:, column] = (codes - offset).astype(np.float32) * scale[:, of]
    return result


def int8(packed: Tensor, scale: np.ndarray[Any, Any], rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Element by element: a value plus 128 is in bits ``8 * (column % 4)`` of word ``column // 4``."""
    words = packed.numpy().astype(np.int64) & 0xFFFFFFFF
    group = columns // scale.shape[1]
    result = np.empty((rows, columns), np.float32)
    for column in range(columns):
        codes = words[:, column // 4] >> (8 * (column % 4)) & 255
        result[:, column] = (codes - 128).astype(np.float32) * scale[:, column // group]
    return result


def zero_points(packed: Tensor, rows: int) -> np.ndarray[Any, Any]:
    """Zero points are packed down the rows: row ``r`` is in bits ``4 * (r % 8)`` of word ``r // 8``."""
    words = packed.numpy().astype(np.int64) & 0xFFFFFFFF
    return np.stack([words[row // 8] >> (4 * (row % 8)) & 15 for row in range(rows)])


def fp8(weight: Tensor, scale: Tensor, block: int = 128) -> Tensor:
    """Each value times the scale of its block."""
    result = weight.float()
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            part = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
            result[part] *= scale[row, column].float()
    return result


def dequantized_copy(folder: Path, target: Path) -> Path:
    """A plain float32 checkpoint with the values of the converted one in ``folder``."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dequantized(folder), target / "model.safetensors", metadata={"format": "pt"})
    return target
