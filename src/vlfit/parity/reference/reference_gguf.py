"""Tensors of GGUF files in float32: read and dequantized by the ``gguf`` package, in the checkpoint's order.

What llama.cpp changes is undone here a second time, from its ``conversion/`` (``llama.py``, ``qwen.py``):
rows of heads permuted for its rotary embedding, Qwen3.5's value heads, norms and decay, and the two frames
of a patch embedding. The engine's way is ``loading/block_tensors.py``.
"""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vlfit.checkpoint.gguf.gguf_tensors import names_in_files
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import plain_tensor_shapes
from vlfit.errors import CheckpointError

_PATCHES = "patch_embed.proj"


class GgufSource:
    """The weights of the GGUF files of ``checkpoint``, by their names in safetensors.

    Raises ``CheckpointError`` for a vision tower inside the model's own file.
    """

    is_slow = True

    def __init__(self, checkpoint: Checkpoint, config: dict[str, Any]) -> None:
        paths = sorted({info.file for info in checkpoint.tensors.values()})
        self._readers = [gguf.GGUFReader(path) for path in paths]
        self._tensors = {tensor.name: tensor for reader in self._readers for tensor in reader.tensors}
        shapes = plain_tensor_shapes(checkpoint.config)
        self._names = {
            name: stored
            for name, stored in names_in_files(checkpoint.config, shapes).items()
            if stored in self._tensors
        }
        missing = [name for name in shapes if "visual" in name and name not in self._names]
        if missing:
            raise CheckpointError(
                f"{paths[0].name} has its vision tower inside ({missing[0]} lies in it otherwise)",
                "There is no reference for such files yet; verify one with an mmproj file of its own.",
            )
        self._text: dict[str, Any] = config.get("text_config") or config
        self._is_llama = checkpoint.config.model_type == "llama"
        self._is_qwen3_5 = checkpoint.config.model_type.startswith("qwen3_5")

    def has(self, name: str) -> bool:
        """As ``WeightSource.has``."""
        return name in self._names or f"{name}.weight" in self._names

    def vector(self, name: str) -> Tensor:
        """As ``WeightSource.vector``."""
        values = _numbers(self._stored(name))
        if self._is_qwen3_5 and "visual" not in name:
            if name.endswith("A_log"):
                values = values.neg().log()
            elif name.endswith("norm.weight") and ".linear_attn." not in name:
                values = values - 1.0
        order = self._row_order(name, len(values))
        return values if order is None else values[torch.from_numpy(order)]

    def _stored(self, name: str) -> Any:
        if name not in self._names:
            raise CheckpointError(f"the GGUF files have no tensor {name}")
        return self._tensors[self._names[name]]

    def rows(self, module: str, start: int, stop: int, shape: tuple[int, int]) -> Tensor:
        """As ``WeightSource.rows``."""
        tensor = self._stored(f"{module}.weight")
        if module.endswith(_PATCHES):
            second = self._tensors.get(f"{self._names[f'{module}.weight']}.1")
            frames = [_numbers(each, slice(start, stop)) for each in (tensor, second) if each is not None]
            return torch.stack(frames, dim=2).flatten(1) if len(frames) > 1 else frames[0].flatten(1)
        order = self._row_order(f"{module}.weight", shape[0])
        which: Any = slice(start, stop) if order is None else order[start:stop]
        values = _numbers(tensor, which)
        if self._is_qwen3_5 and module.endswith("linear_attn.out_proj"):
            columns = self._value_heads(shape[1], 0, int(self._text["linear_value_head_dim"]))
            values = values[:, torch.from_numpy(columns)]
        return values

    def _row_order(self, name: str, rows: int) -> NDArray[np.int64] | None:
        """The row in the file of each row of the checkpoint; None: as they are."""
        if self._is_llama and (".q_proj." in name or ".k_proj." in name):
            kind = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            heads = int(self._text.get(kind) or self._text["num_attention_heads"])
            return np.arange(rows).reshape(heads, -1, 2).transpose(0, 2, 1).flatten()
        if not self._is_qwen3_5 or ".linear_attn." not in name:
            return None
        width = int(self._text["linear_value_head_dim"])
        keys = 2 * int(self._text["linear_num_key_heads"]) * int(self._text["linear_key_head_dim"])
        part = name.partition(".linear_attn.")[2].removesuffix(".weight")
        begins = {"in_proj_qkv": (keys, width), "conv1d": (keys, width), "in_proj_z": (0, width)}
        begins |= dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), (0, 1))
        return self._value_heads(rows, *begins[part]) if part in begins else None

    def _value_heads(self, count: int, first: int, width: int) -> NDArray[np.int64]:
        """Value heads of a key head are neighbours in the checkpoint; files have all first ones first."""
        keys = int(self._text["linear_num_key_heads"])
        places = np.arange(first, count).reshape(-1, keys, width).transpose(1, 0, 2).flatten()
        return np.concatenate((np.arange(first), places))


def _numbers(tensor: Any, rows: Any = slice(None)) -> Tensor:
    """The numbers of ``tensor``, of ``rows`` alone, in float32."""
    widen: Callable[..., NDArray[np.float32]] = gguf.quants.dequantize
    return torch.from_numpy(
        np.array(widen(np.ascontiguousarray(tensor.data[rows]), tensor.tensor_type), np.float32)
    )
