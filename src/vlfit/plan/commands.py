"""From a plan's settings to the command that starts its backend.

Knows: the options of ``vlfit serve``; those of ``vllm serve`` are in ``vllm/command.py``. A backend that has
no command (a library, or one whose settings no option carries) has none here.
"""

from vlfit.checkpoint.catalog import BF16
from vlfit.machine.model import Gpu, Machine
from vlfit.plan.ledger import NATIVE, TRANSFORMERS, VLLM, Line, Settings, pool_tokens
from vlfit.plan.native.ram import offload_of
from vlfit.plan.shapes import Model
from vlfit.plan.vllm import command as vllm
from vlfit.plan.vllm.command import Start
from vlfit.plan.vllm.flags import Version
from vlfit.units import MIB

SERVE_CHUNK = 1024  # tokens of a pass when `vlfit serve` is not told otherwise


def start_of(
    model: Model,
    backend: str,
    settings: Settings,
    lines: tuple[Line, ...],
    machine: Machine,
    gpu: Gpu,
    version: Version | None,
    gpus: tuple[Gpu, ...] = (),
) -> Start | None:
    """The command's words and the environment that it needs; None where no command starts this plan.

    ``gpus``: all that a plan for vLLM takes, if there are more than ``gpu``, whose ledger it is.
    """
    if backend == VLLM and version is not None:
        # One that is not the first has to be named, too: others may be hidden from this process.
        several = len(machine.gpus) > 1 or gpu.index > 0
        taken = (gpu, *(each for each in gpus if each.index != gpu.index))
        return vllm.start(model, settings, lines, taken, version, wsl2=machine.host.wsl2, several=several)
    if backend == TRANSFORMERS:
        return _transformers(model, settings, machine, gpu)
    return _native(model, settings, machine, gpu) if backend == NATIVE else None


def _transformers(model: Model, settings: Settings, machine: Machine, gpu: Gpu) -> Start | None:
    """None for a model without eyes, which that backend does not load."""
    if model.vision is None:
        return None
    words = ["vlfit", "serve", model.place, "--backend", TRANSFORMERS, "--context", str(settings.context)]
    words += ["--image-tokens", str(settings.image_tokens)]
    return _on_card(words, machine, gpu)


def _native(model: Model, settings: Settings, machine: Machine, gpu: Gpu) -> Start:
    words = ["vlfit", "serve", model.place, "--context", str(settings.context)]
    words += ["--sequences", str(settings.sequences)]
    if settings.image_tokens:
        words += ["--image-tokens", str(settings.image_tokens)]
    if settings.tight:
        words += ["--kv", str(pool_tokens(NATIVE, settings))]
    if settings.kv_dtype != BF16:
        words += ["--kv-dtype", settings.kv_dtype]
    if settings.chunk != SERVE_CHUNK:
        words += ["--chunk", str(settings.chunk)]
    if settings.offload:
        frees = offload_of(model, settings.offload).frees
        # Whole MiB below what leaves the card: as many layers are needed for it.
        words += ["--offload", f"{frees // MIB}MiB" if frees >= MIB else f"{frees}B"]
    return _on_card(words, machine, gpu)


def _on_card(words: list[str], machine: Machine, gpu: Gpu) -> Start:
    """Where there are several GPUs the command names the one that was planned for.

    torch counts the fastest first unless it is told to count as the driver does, by place on the bus.
    """
    if len(machine.gpus) < 2:
        return Start(tuple(words))
    words += ["--device", f"cuda:{gpu.index}"]
    return Start(tuple(words), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
