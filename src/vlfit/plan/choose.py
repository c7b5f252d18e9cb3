"""What ``--model auto`` means: the best checkpoint that is already here and fits this machine, else mini.

Knows: sizes of checkpoints and of memory. Does not know: how to load or download anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vlfit.checkpoint.cache import LocalModel
from vlfit.checkpoint.quantization import INT4
from vlfit.machine.survey import Machine
from vlfit.units import GIB, MIB, format_bytes

MINI = "mini"
SUGGESTION = "Qwen/Qwen3-VL-2B-Instruct-FP8"

# What a GPU holds beside the weights: about 0.5 GiB of CUDA context, 1.1 GiB of KV cache for 8192 tokens of
# 4B or 8B, and 0.3 GiB of workspace. The ledger will count this; until then it is a stated margin.
GPU_MARGIN = 1900 * MIB
# On a CPU a weight takes at most what float32 does (large matrices half of it, where the CPU multiplies with
# them), and the system wants some air.
CPU_BYTES_PER_PARAMETER = 4
CPU_MARGIN = 2 * GIB
# Each token reads every weight. Above the 2B model (2.13 G) that takes a desktop CPU seconds per token.
CPU_MOST_PARAMETERS = 2_500_000_000


@dataclass(frozen=True, slots=True)
class Choice:
    """``model`` is what to open; ``reason`` is one line for the person."""

    model: str
    reason: str


def choose_checkpoint(machine: Machine, models: Sequence[LocalModel]) -> Choice:
    """The checkpoint of ``models`` with the most parameters that fits ``machine``, else mini.

    On a GPU, weights and ``GPU_MARGIN`` must be free on one GPU. Without one, weights in float32 and
    ``CPU_MARGIN`` must be available RAM, and the model must be of a size that a CPU answers with.
    Of equals the smaller file wins: FP8 answers as well as bf16, faster, and leaves room. Only int4, which is
    less exact, comes after all others.
    """
    real = [model for model in models if model.name != MINI and model.sees]
    whole = sorted(
        (model for model in real if model.complete),
        key=lambda model: (-model.parameters, model.format == INT4, model.weight_bytes, model.name),
    )
    for model in whole:
        if _need(machine, model) <= _room(machine) and not _too_slow(machine, model):
            return Choice(model.name, f"using {model.name}: {_why_it_fits(machine, model)}")
    return Choice(MINI, f"using mini, the small model that ships with vlfit; {_way_on(machine, real, whole)}")


def _room(machine: Machine) -> int:
    return max((gpu.free for gpu in machine.gpus), default=machine.host.ram_available)


def _need(machine: Machine, model: LocalModel) -> int:
    if machine.gpus:
        return model.weight_bytes + GPU_MARGIN
    return model.parameters * CPU_BYTES_PER_PARAMETER + CPU_MARGIN


def _too_slow(machine: Machine, model: LocalModel) -> bool:
    return not machine.gpus and model.parameters > CPU_MOST_PARAMETERS


def _why_it_fits(machine: Machine, model: LocalModel) -> str:
    need, room = format_bytes(_need(machine, model)), format_bytes(_room(machine))
    if machine.gpus:
        return f"needs about {need} and {room} of the GPU are free"
    return f"needs about {need} and {room} of RAM are free; without a GPU it is slow"


def _way_on(machine: Machine, real: Sequence[LocalModel], whole: Sequence[LocalModel]) -> str:
    """Why none of the real models was taken, and what to do."""
    if whole:
        smallest = min(whole, key=lambda model: _need(machine, model))
        if _too_slow(machine, smallest):
            return (
                f"{smallest.name} is here but too slow without a GPU (--model {smallest.name} runs it anyway)"
            )
        need, room = format_bytes(_need(machine, smallest)), format_bytes(_room(machine))
        where = "on the GPU" if machine.gpus else "of RAM"
        return f"{smallest.name} is here but needs about {need}; {room} {where} are free"
    if real:
        return f"{real[0].name} is only partly downloaded: vlfit pull {real[0].name} goes on"
    return f"for a real one: vlfit pull {SUGGESTION}"
