"""Device, dtypes and CPU threads of an engine.

A GPU that was asked for and cannot be used is an error: only ``auto`` takes the CPU, and only where torch
sees no GPU.
"""

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
from vlfit.machine.cards import KERNEL_CAPABILITY
from vlfit.machine.host import physical_cores, usable_cores
from vlfit.machine.survey import BFLOAT16_CAPABILITY
from vlfit.plan.gpus import kernels_need_newer_card

logger = logging.getLogger(__name__)

# Stack bytes for each thread that a GPU can hold. The default of 1,024 costs 264 MiB of the context on an
# H200 (132 multiprocessors with 2,048 threads). The driver adds what a kernel is known to need; this is for
# call depths that the compiler cannot know, which no kernel of the engine has.
STACK_BYTES = 256
_STACK_SIZE = 0  # CU_LIMIT_STACK_SIZE


def choose_device(device_name: str, *, compiles: bool = True) -> torch.device:
    """The device for ``auto``, ``cpu``, ``cuda`` or ``cuda:1``, ready to run kernels.

    ``compiles``: kernels will be compiled.

    ``auto``: the current CUDA device, or the CPU if torch sees no GPU. On a GPU this initializes CUDA, with
    stacks of at most ``STACK_BYTES``. Raises ``UsageError`` for any other name, and ``DeviceError`` for a GPU
    that torch does not see, or if Triton or its C compiler is missing.
    """
    device = parse_device(device_name)
    if device.type == "cuda":
        if compiles:
            check_toolchain()
        _lower_stacks(device)
    return device


def _lower_stacks(device: torch.device) -> None:
    """Initialize CUDA on ``device`` with stacks of at most ``STACK_BYTES``, unless the driver refuses."""
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # initializes CUDA on this device
        driver = ctypes.CDLL("libcuda.so.1")
        now = ctypes.c_size_t()
        if not driver.cuCtxGetLimit(ctypes.byref(now), _STACK_SIZE) and now.value > STACK_BYTES:
            driver.cuCtxSetLimit(_STACK_SIZE, ctypes.c_size_t(STACK_BYTES))


def check_kernel_capability(device: torch.device) -> None:
    """Raise ``DeviceError`` if ``device`` is a GPU that is older than the kernels are made for."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < KERNEL_CAPABILITY:
            raise kernels_need_newer_card(torch.cuda.get_device_name(device), capability)


def parse_device(device_name: str) -> torch.device:
    """The device for a name, as in ``choose_device``, but without initializing CUDA or checking for Triton.

    Raises ``UsageError`` for an unknown name, and ``DeviceError`` for a GPU that torch does not see.
    """
    if device_name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device_name)
    except RuntimeError:
        raise UsageError(
            f"unknown device {device_name!r}", "Use auto, cpu, cuda, or one card such as cuda:1."
        ) from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise DeviceError(
                f"{device_name} was requested; this torch ({torch.__version__}) sees {count} CUDA device(s)",
                "Install a CUDA build of torch and a driver, or use --device cpu.",
            )
    elif device.type != "cpu":
        raise UsageError(f"vlfit does not run on {device_name!r}", "Use auto, cpu or cuda.")
    return device


def choose_dtype(dtype_name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Compute dtype of a checkpoint on ``device``: ``dtype_for`` with the dtype of the checkpoint's tensors.

    That is the embedding's dtype or, if the embedding is quantized, the last norm's; but bfloat16 if that
    norm is float32, which says nothing of the weights: GGUF files keep all norms in float32. Raises
    ``UsageError`` as ``dtype_for``.
    """
    tensors, prefix = checkpoint.tensors, checkpoint.config.text.prefix
    reference = tensors.get(f"{prefix}.embed_tokens.weight")
    if reference is not None and reference.dtype != "I8":
        return dtype_for(dtype_name, torch_dtype(reference), device)
    stored = torch_dtype(tensors[f"{prefix}.norm.weight"])
    return dtype_for(dtype_name, torch.bfloat16 if stored == torch.float32 else stored, device)


def dtype_for(dtype_name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Compute dtype for ``dtype_name``: "auto", "float32", "bfloat16" or "float16".

    "auto" is float32 on a CPU, and on a GPU the dtype ``stored`` in the checkpoint. If ``stored`` is bfloat16
    and the GPU does not support it, "auto" is float16, with a logged warning; "bfloat16" raises
    ``UsageError`` on such a GPU.
    """
    if dtype_name != "auto":
        dtype: torch.dtype = getattr(
            torch, dtype_name
        )  # one of `options.DTYPES`, checked when they were built
        if dtype == torch.bfloat16 and (missing := _missing_bfloat16(device)):
            raise UsageError(
                f"--dtype bfloat16 was requested; {missing}", "Leave --dtype out, or use float16."
            )
        return dtype
    if device.type == "cpu":
        return torch.float32
    if stored == torch.bfloat16 and (missing := _missing_bfloat16(device)):
        logger.warning("warning: %s: computing in float16, which has a smaller range", missing)
        return torch.float16
    return stored


def _missing_bfloat16(device: torch.device) -> str:
    """Message that ``device`` has no bfloat16; "" if it has. torch has no bfloat16 attention for such
    cards.
    """
    if device.type != "cuda":
        return ""
    capability = torch.cuda.get_device_capability(device)
    if capability >= BFLOAT16_CAPABILITY:
        return ""
    version = ".".join(map(str, capability))
    return f"{torch.cuda.get_device_name(device)} (compute capability {version}) has no bfloat16"


def choose_kv_dtype(kv_dtype: str, dtype: torch.dtype) -> str:
    """Format of the KV cache for an option ``kv_dtype`` of "auto", "bf16" or "fp8".

    Returns "fp8" if requested, else "bf16", which stands for the compute dtype ``dtype``, whatever that is.
    Raises ``UsageError`` if ``kv_dtype`` is "bf16" and ``dtype`` is not bfloat16.
    """
    if kv_dtype == BF16 and dtype != torch.bfloat16:
        raise UsageError(
            f"--kv-dtype is {BF16}; without fp8 the KV cache has the compute dtype, which is "
            f"{str(dtype).removeprefix('torch.')}",
            "Leave it out, or add --dtype bfloat16.",
            param="kv_dtype",
        )
    return FP8 if kv_dtype == FP8 else BF16


# A core does these in a millisecond or two. A smaller pass ends sooner on one thread: waking the others for
# each of its hundreds of operations takes longer than the work they take over.
MULTITHREADING_MIN_MULTIPLICATIONS = 25_000_000


def limit_threads_to_cores() -> None:
    """Limit torch's threads to the physical cores this process may use, unless ``OMP_NUM_THREADS`` is set.

    Call it on the thread that computes. It never raises the number. By itself torch respects ``taskset`` but
    not a container's CPU quota, and leaves out hyper-threads only with MKL.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores(), physical_cores()))


@contextmanager
def threads_for_work(device: torch.device, multiplications: int) -> Iterator[None]:
    """Limit torch to one thread within the block if ``device`` is a CPU and the work is small.

    Small: at most ``MULTITHREADING_MIN_MULTIPLICATIONS``. On a GPU, and for more ``multiplications``, nothing
    changes.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or multiplications > MULTITHREADING_MIN_MULTIPLICATIONS or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
