"""Errors that end a check as findings: of the device, which may not answer any more, and all others."""

import re

from vlfit.errors import DeviceError, OutOfMemory, VlfitError
from vlfit.parity.findings import Component, Finding, Likely

# Codes of findings: of a device, of any other error, and of NaN or infinity.
DEVICE_FAILED, CHECK_FAILED, NOT_FINITE = "device_failed", "check_failed", "not_finite"
LOST = "the device no longer answers"
# What torch, Triton and the libraries of CUDA write; an error that only names another has its class.
_OF_DEVICES = re.compile(
    r"\b(?:CUDA|HIP)(?: driver)? error\b|\bAcceleratorError\b|Triton Error \["
    r"|\b(?:CUBLAS|CUDNN)_STATUS_"
)
# Errors that a kernel makes by itself, whatever the driver is.
_OF_KERNELS = re.compile(
    r"illegal (?:memory access|instruction)|misaligned address|device-side assert"
    r"|invalid (?:program counter|configuration|device function)|too many resources|no kernel image"
)


def is_device_failure(error: BaseException) -> bool:
    """Whether ``error`` is of a GPU or its driver; a lack of memory is none."""
    if isinstance(error, OutOfMemory) or "out of memory" in str(error):
        return False
    said = f"{type(error).__name__}: {error}"
    return isinstance(error, DeviceError) or _OF_DEVICES.search(said) is not None


def device_answers(device: str) -> bool:
    """Whether ``device`` (torch's name) still computes: after some errors every call of CUDA fails."""
    if not device.startswith("cuda"):
        return True
    import torch

    try:
        return torch.ones(1, device=device).item() == 1.0
    except Exception:  # that is the answer
        return False


def failure(
    error: BaseException,
    component: Component,
    stage: str,
    condition: str = "",
    likely: Likely = Likely.ENGINE,
) -> Finding:
    """The finding that ``error`` ended a check; ``component``, ``likely``: unless the device failed.

    ``condition``: ``stage`` if it is "". Of an error of several lines the first is the note.
    """
    message = error.message if isinstance(error, VlfitError) else str(error)
    lines = message.strip().splitlines()
    note = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    condition = condition or stage
    if is_device_failure(error):
        at_fault = Likely.KERNEL if _OF_KERNELS.search(message) else Likely.DRIVER
        return Finding(DEVICE_FAILED, Component.DEVICE, stage, condition, at_fault, note)
    if isinstance(error, OutOfMemory):
        component = Component.MEMORY
    return Finding(CHECK_FAILED, component, stage, condition, likely, note)
