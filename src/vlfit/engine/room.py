"""Whether a checkpoint and its KV cache fit the memory that is free, before a byte of them is loaded.

Knows the two parts whose size is exact before loading. Does not know workspaces: the ledger will.
"""

import torch

from vlfit.checkpoint.cache import count_weights
from vlfit.checkpoint.config import TextConfig
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import INT4_SUFFIXES, SCALE_SUFFIX
from vlfit.errors import DoesNotFit
from vlfit.machine.host import read_host
from vlfit.units import format_bytes


def kv_bytes_per_token(config: TextConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> int:
    """What the weights take once loaded: all in ``dtype``, except FP8, int4 and scales on a GPU."""
    return sum(_bytes_loaded(info, dtype, device) for info in checkpoint.tensors.values())


def _bytes_loaded(info: TensorInfo, dtype: torch.dtype, device: torch.device) -> int:
    if device.type == "cpu":
        return count_weights(info) * dtype.itemsize  # all is widened, scales are no longer needed
    if info.name.endswith(SCALE_SUFFIX):
        return info.count * torch.float32.itemsize
    if info.name.endswith(".weight_shape"):
        return 0  # says what other shapes say, and is not loaded
    if info.dtype == "F8_E4M3" or info.name.endswith(INT4_SUFFIXES):
        return info.bytes
    return info.count * dtype.itemsize


def check_room(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, kv_tokens: int) -> None:
    """Raises ``DoesNotFit`` with the sizes and what is missing."""
    weights = weight_bytes(checkpoint, dtype, device)
    cache = kv_tokens * kv_bytes_per_token(checkpoint.config.text, dtype)
    free = free_bytes(device)
    missing = weights + cache - free
    if missing <= 0:
        return
    half = " or --dtype bfloat16" if dtype == torch.float32 else ""
    raise DoesNotFit(
        f"{checkpoint.name} does not fit on {device}: {format_bytes(weights)} of weights and "
        f"{format_bytes(cache)} of KV cache for {kv_tokens} tokens; {format_bytes(free)} are free, "
        f"{format_bytes(missing)} too few",
        f"try a smaller --context{half}, a smaller checkpoint, FP8 or int4 weights, or close other programs",
    )


def free_bytes(device: torch.device) -> int:
    """Memory of ``device`` that is free now; on a CPU what may be had without swapping."""
    if device.type == "cpu":
        return read_host().ram_available
    free: int = torch.cuda.mem_get_info(device)[0]
    return free
