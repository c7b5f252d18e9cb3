"""NVIDIA GPUs as the driver's management library (NVML) sees them.

Knows: name, memory and compute capability of each GPU that this process may use.
Does not know: CUDA. Asking NVML takes milliseconds and no GPU memory; a CUDA context takes hundreds of MB.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. ``total`` and ``free`` are bytes now; ``compute_capability`` is (major, minor)."""

    index: int
    name: str
    uuid: str
    total: int
    free: int
    compute_capability: tuple[int, int]


def read_gpus(environment: Mapping[str, str] = os.environ) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs in the driver's order, and why there is none (empty when there is one). Never fails.

    ``CUDA_VISIBLE_DEVICES`` hides GPUs here as it does from CUDA.
    """
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError as error:
        return (), f"nvidia-ml-py cannot be imported: {error}"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return (), "no NVIDIA driver is installed"
    except pynvml.NVMLError as error:
        return (), f"the NVIDIA driver does not answer: {error}"
    try:
        gpus = tuple(_read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        return (), f"the NVIDIA driver does not describe its GPUs: {error}"
    finally:
        pynvml.nvmlShutdown()
    if not gpus:
        return (), "the NVIDIA driver finds no GPU"
    visible = _visible(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    return visible, "" if visible else "CUDA_VISIBLE_DEVICES hides every GPU"


def _read_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        total=int(memory.total),
        free=int(memory.free),
        compute_capability=(int(major), int(minor)),
    )


def _text(value: str | bytes) -> str:
    """Old bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _visible(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` names, in its order; as in CUDA, a wrong name ends the list."""
    if setting is None:
        return gpus
    chosen: list[Gpu] = []
    for word in (part.strip() for part in setting.split(",")):
        found = [gpu for gpu in gpus if word == str(gpu.index) or (word and gpu.uuid.startswith(word))]
        if not found or found[0] in chosen:
            break
        chosen.append(found[0])
    return tuple(chosen)
