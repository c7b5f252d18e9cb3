"""Checkpoints as compressed-tensors stores them, written from the definition of its forms, in numpy.

Knows nothing of vlfit's own packing or reading. ``compress`` writes the files and, beside them, a plain
float32 checkpoint with the very values that they stand for.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8_MAX = 448.0
EMBEDDING = "model.language_model.embed_tokens"


@dataclass(frozen=True)
class Group:
    """One of ``config_groups``: how, and by which ``targets`` config.json says so."""

    kind: str = "pack-quantized"
    bits: int = 8
    strategy: str = "channel"
    group_size: int | None = None
    block: tuple[int, int] | None = None
    targets: tuple[str, ...] = ("Linear",)
    activations: dict[str, Any] | None = None

    @property
    def config(self) -> dict[str, Any]:
        weights = {
            "actorder": None,
            "block_structure": None if self.block is None else list(self.block),
            "dynamic": False,
            "group_size": self.group_size,
            "num_bits": self.bits,
            "observer": "minmax",
            "strategy": self.strategy,
            "symmetric": True,
            "type": "float" if self.kind == "float-quantized" else "int",
        }
        return {
            "format": self.kind,
            "input_activations": self.activations,
            "output_activations": None,
            "targets": list(self.targets),
            "weights": weights,
        }


def compress(
    source: Path, target: Path, groups: dict[str, Group], choose: Callable[[str], str | None]
) -> tuple[Path, Path]:
    """The checkpoint ``source`` with each module in the group that ``choose`` names (None: as it is).

    ``choose`` is asked of every matrix. Gives the folder of the new checkpoint, and of its values in float32.
    """
    narrow, wide = target / "narrow", target / "wide"
    for folder in (narrow, wide):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            module = name.removesuffix(".weight")
            named = choose(module) if name.endswith(".weight") and tensor.ndim == 2 else None
            if named is None:
                stored[name], plain[name] = tensor, tensor.float()
            else:
                parts, plain[name] = _stored(groups[named], tensor.float())
                stored |= {f"{module}.{part}": value for part, value in parts.items()}
    save_file(stored, narrow / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, wide / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (wide / "config.json").write_text(json.dumps(config), encoding="utf-8")
    kinds = {group.kind for group in groups.values()}
    config["quantization_config"] = {
        "config_groups": {name: group.config for name, group in groups.items()},
        "format": kinds.pop() if len(groups) == 1 else "mixed-precision",
        "ignore": ["re:model\\.visual\\.patch_embed", "model.visual.pos_embed"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    (narrow / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return narrow, wide


def _stored(group: Group, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What stands for ``weight`` [rows, columns], and its values in float32."""
    rows, columns = weight.shape
    height, width = group.block or (1, group.group_size or columns)
    down, across = -(-rows // height), -(-columns // width)
    values = weight.numpy()
    scale = np.zeros((down, across), np.float32)
    for i in range(down):
        for j in range(across):
            part = values[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scale[i, j] = np.abs(part).max() / (FP8_MAX if group.block or _floats(group) else _most(group))
    rounded = torch.from_numpy(np.maximum(scale, 1e-6)).to(torch.bfloat16)
    full = np.repeat(np.repeat(rounded.float().numpy(), height, 0)[:rows], width, 1)[:, :columns]
    if _floats(group):
        codes = torch.from_numpy(np.clip(values / full, -FP8_MAX, FP8_MAX)).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": rounded}, codes.float() * torch.from_numpy(full)
    numbers = np.clip(np.rint(values / full), -_most(group) - 1, _most(group)).astype(np.int64)
    wide = torch.from_numpy(numbers.astype(np.float32) * full)
    if group.kind == "int-quantized":
        return {"weight": torch.from_numpy(numbers.astype(np.int8)), "weight_scale": rounded}, wide
    each = 32 // group.bits
    words = np.zeros((rows, -(-columns // each)), np.int64)
    for column in range(columns):
        words[:, column // each] |= (numbers[:, column] + _most(group) + 1) << group.bits * (column % each)
    packed = torch.from_numpy(words.astype(np.uint32).view(np.int32))
    return {
        "weight_packed": packed,
        "weight_scale": rounded,
        "weight_shape": torch.tensor([rows, columns]),
    }, wide


def _floats(group: Group) -> bool:
    return group.kind == "float-quantized"


def _most(group: Group) -> int:
    return (1 << (group.bits - 1)) - 1
