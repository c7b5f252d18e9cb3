"""Which device and which dtype an engine runs on. GPU or error: what was asked for is never swapped."""

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import DeviceError, UsageError
from vlfit.kernels.launch import check_toolchain
from vlfit.loading.readers import torch_dtype
from vlfit.machine.host import own_cores, whole_cores
from vlfit.machine.survey import BFLOAT16_FROM

logger = logging.getLogger(__name__)

# Bytes of stack for each thread that a GPU can hold, 1,024 if nobody says otherwise: on an H200 (132
# multiprocessors with 2,048 threads) 264 MiB of the context. The driver adds what a kernel is known to need,
# so this is for calls whose depth no compiler knows, and no kernel that the engine runs makes any.
STACK_BYTES = 256
_STACK_SIZE = 0  # CU_LIMIT_STACK_SIZE


def choose_device(wish: str) -> torch.device:
    """``auto`` is the first CUDA device, or the CPU where there is none. Raises ``DeviceError``.

    A GPU that kernels cannot be built for is refused here, before anything loads.
    """
    device = named_device(wish)
    if device.type == "cuda":
        check_toolchain()
        _lower_stacks(device)
    return device


def _lower_stacks(device: torch.device) -> None:
    """Starts CUDA on ``device``, with stacks of at most ``STACK_BYTES`` unless the driver refuses."""
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # CUDA is started, on this device
        driver = ctypes.CDLL("libcuda.so.1")
        now = ctypes.c_size_t()
        if not driver.cuCtxGetLimit(ctypes.byref(now), _STACK_SIZE) and now.value > STACK_BYTES:
            driver.cuCtxSetLimit(_STACK_SIZE, ctypes.c_size_t(STACK_BYTES))


def named_device(wish: str) -> torch.device:
    """As ``choose_device``, for whoever needs no kernels of ours."""
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wish)
    except RuntimeError:
        raise UsageError(f"unknown device {wish!r}", "use auto, cpu, cuda, cuda:1, ...") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise DeviceError(
                f"{wish} was asked for; this torch ({torch.__version__}) sees {count} CUDA device(s)",
                "install a CUDA build of torch and a driver, or use --device cpu",
            )
    elif device.type != "cpu":
        raise UsageError(f"vlfit does not run on {wish!r}", "use auto, cpu or cuda")
    return device


def choose_dtype(wish: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """``dtype_for`` a checkpoint whose embedding (or last norm, if that is in 8 bits) tells what it is in."""
    tensors, prefix = checkpoint.tensors, checkpoint.config.text.prefix
    told_by = tensors.get(f"{prefix}.embed_tokens.weight")
    if told_by is None or told_by.dtype == "I8":
        told_by = tensors[f"{prefix}.norm.weight"]
    return dtype_for(wish, torch_dtype(told_by), device)


def dtype_for(wish: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """``auto`` is float32 on a CPU, on a GPU the dtype that weights are ``stored`` in; float16 for a bfloat16
    that the GPU lacks, which is said. Raises ``UsageError`` where that was asked for.
    """
    if wish != "auto":
        dtype: torch.dtype = getattr(torch, wish)  # one of `options.DTYPES`, checked when they were built
        if dtype == torch.bfloat16 and (lack := _lack_of_bfloat16(device)):
            raise UsageError(f"--dtype bfloat16 was asked for; {lack}", "leave --dtype out, or use float16")
        return dtype
    if device.type == "cpu":
        return torch.float32
    if stored == torch.bfloat16 and (lack := _lack_of_bfloat16(device)):
        logger.warning("warning: %s: computing in float16, whose numbers are exact but not as large", lack)
        return torch.float16
    return stored


def _lack_of_bfloat16(device: torch.device) -> str:
    """Says that ``device`` has no bfloat16, "" if it has: torch has no attention in it for such cards."""
    if device.type != "cuda":
        return ""
    have = torch.cuda.get_device_capability(device)
    if have >= BFLOAT16_FROM:
        return ""
    return f"{torch.cuda.get_device_name(device)} (compute capability {have[0]}.{have[1]}) has no bfloat16"


def choose_kv_dtype(wish: str, dtype: torch.dtype) -> str:
    """Of the KV cache: fp8, or bf16, which stands for whatever is computed in. Raises ``UsageError``."""
    if wish == BF16 and dtype != torch.bfloat16:
        raise UsageError(
            f"--kv-dtype is {BF16}; without fp8 the KV cache is in what is computed in, which is "
            f"{str(dtype).removeprefix('torch.')}",
            "leave it out, or add --dtype bfloat16",
            param="kv_dtype",
        )
    return FP8 if wish == FP8 else BF16


# How many of the CPU's threads there are for torch, and how many a forward pass is worth. Knows nothing of
# what is computed.


# Multiplications that one core does in a millisecond or two. A pass with fewer ends sooner alone: waking the
# other threads for each of its hundreds of operations takes longer than what they would take over.
WORTH_SHARING = 25_000_000


def keep_to_own_cores() -> None:
    """Let torch compute on no more threads here than this process has cores; what the user set stands.

    torch knows ``taskset``, and not that a container has a share of the cores' time: its threads then wait
    for one another. That two processors may be one core it knows where MKL tells it. To be called by the
    thread that computes.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), own_cores(), whole_cores()))


@contextmanager
def threads_for(device: torch.device, multiplications: int) -> Iterator[None]:
    """Within the block torch computes on one thread if the work is small, else on as many as it had."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or multiplications > WORTH_SHARING or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
