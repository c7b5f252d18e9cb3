"""The choice of a machine's GPU to plan for, GPUs that are too old, and the command that runs on one."""

import os
import re
from collections.abc import Sequence

from vlfit.api.engine_options import uses_kernels
from vlfit.errors import DeviceError
from vlfit.machine.cards import KERNEL_CAPABILITY
from vlfit.machine.gpu import read_gpus
from vlfit.machine.model import Gpu, Machine
from vlfit.machine.survey import OLDEST_CAPABILITY
from vlfit.machine.torch_build import driver_is_too_old, installed_torch, parse_cuda_version
from vlfit.plan.calibration import with_bandwidth
from vlfit.plan.plans import Command


def emptiest_gpu(machine: Machine, oldest: tuple[int, int] = OLDEST_CAPABILITY) -> Gpu:
    """The GPU with the most free memory of those from compute capability ``oldest`` on, or of all if none is.

    The default ``oldest``: the first that torch has kernels for. If the driver does not report its bandwidth,
    the calibration's is filled in. Raises ``DeviceError`` if ``machine`` has no GPU.
    """
    if not machine.gpus:
        raise DeviceError(
            f"there is no GPU to plan for: {machine.no_gpu_reason}",
            'A plan is for a GPU\'s memory. Name the card: --gpu "RTX 5060" --desktop 951MiB (vlfit machine '
            "--cards lists them), or --machine FILE. Without a GPU leave out --backend: vlfit's own engine "
            "runs on the processor, and is planned for it.",
        )
    usable = [gpu for gpu in machine.gpus if not _is_older(gpu, oldest)]
    return with_bandwidth(max(usable or machine.gpus, key=lambda gpu: gpu.free))


def runs_kernels(gpu: Gpu) -> bool:
    """Whether vlfit's own kernels run on ``gpu``, or its compute capability is unknown."""
    return not _is_older(gpu, KERNEL_CAPABILITY)


def check_kernel_capability(gpu: Gpu) -> None:
    """Raise ``DeviceError`` unless ``runs_kernels``."""
    if not runs_kernels(gpu):
        raise kernels_need_newer_card(gpu.name, gpu.compute_capability, is_here=bool(gpu.driver))


def check_gpus(device: str, kernels: str = "auto", gpus: Sequence[Gpu] | None = None) -> None:
    """Raise ``DeviceError`` if the GPU that the native engine would run on is too old for its kernels.

    Call it before a model is downloaded or loaded; ``device`` and ``kernels`` as in ``EngineOptions``.
    ``gpus``: of this computer; None: read now. Does nothing where no kernel would run on a GPU: with ``cpu``,
    with plain kernels, with a torch that is no CUDA build, and with ``auto`` where the driver is too old for
    torch. Of several GPUs, whose order CUDA chooses by speed, one is known only with
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``: otherwise all must be too old. The engine itself checks the one that it
    runs on.
    """
    named = re.fullmatch(r"auto|cuda(?::(\d+))?", device)
    torch = installed_torch()
    if named is None or not uses_kernels(kernels) or torch is None or torch.cuda is None:
        return
    found = read_gpus()[0] if gpus is None else gpus
    driver = parse_cuda_version(found[0].cuda) if found else None
    if device == "auto" and driver is not None and driver_is_too_old(torch.cuda, driver):
        return  # torch sees no GPU, and the engine takes the processor
    if len(found) > 1 and os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        found = found[int(named[1] or 0) :][:1]
    if found and not any(map(runs_kernels, found)):
        check_kernel_capability(found[0])


def check_capability(gpu: Gpu) -> None:
    """Raise ``DeviceError`` if torch has no kernels for ``gpu``; an unknown compute capability passes."""
    if _is_older(gpu, OLDEST_CAPABILITY):
        capability, oldest = (
            ".".join(map(str, each)) for each in (gpu.compute_capability, OLDEST_CAPABILITY)
        )
        raise DeviceError(
            f"{gpu.name} has compute capability {capability}; torch has kernels from {oldest} on",
            "Plan for another card: vlfit machine --cards lists them.",
        )


def kernels_need_newer_card(name: str, capability: tuple[int, int], *, is_here: bool = True) -> DeviceError:
    """The error of the native engine for a card ``name`` of compute ``capability`` (major, minor).

    ``is_here``: the card is of a machine, which has a processor too; False for one of the table (``--gpu``).
    """
    found, oldest = (".".join(map(str, each)) for each in (capability, KERNEL_CAPABILITY))
    ways = ["--device cpu"] if is_here else ["another card (vlfit machine --cards lists them)"]
    ways.append("llama.cpp, which has kernels for such cards")
    if capability >= OLDEST_CAPABILITY:
        ways.insert(0 if is_here else 1, "--backend transformers, which computes in float16 there")
    return DeviceError(
        f"{name} has compute capability {found}; the native engine runs from {oldest} on (RTX 30, A100)",
        f"Use {'; or '.join(ways)}.",
    )


def _is_older(gpu: Gpu, capability: tuple[int, int]) -> bool:
    # (0, 0): the driver does not say.
    return (0, 0) < gpu.compute_capability < capability


def command_on_gpu(words: list[str], gpu: Gpu, machine: Machine) -> Command:
    """A ``vlfit`` command of ``words``, with ``--device`` added if ``machine`` has several GPUs.

    The environment then sets ``CUDA_DEVICE_ORDER``, so that CUDA numbers GPUs as ``gpu.index`` does, not the
    fastest first.
    """
    if len(machine.gpus) < 2:
        return Command(tuple(words))
    return Command((*words, "--device", f"cuda:{gpu.index}"), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
