"""What a person should know about this machine, in plain sentences: WSL2, a container, memory that is short.

Knows what WSL2 hides and what limits mean. Does not know models: whether anything fits is the plan's matter.
"""

from collections.abc import Sequence

from vlfit.machine.model import Gpu, Host
from vlfit.units import format_bytes

# Turing. Older GPUs lack what the engine and current builds of torch need.
OLDEST = (7, 5)
# Ampere. What is older computes in float16 instead.
BFLOAT16_FROM = (8, 0)


def remarks(gpus: Sequence[Gpu], host: Host) -> tuple[str, ...]:
    """Sentences about ``gpus`` in ``host``; empty where there is nothing to say."""
    return (
        *_about_wsl2(gpus, host),
        *_about_limits(host),
        *(note for gpu in gpus for note in _about_gpu(gpu)),
    )


def _about_wsl2(gpus: Sequence[Gpu], host: Host) -> list[str]:
    if not host.wsl2:
        return []
    notes = [
        f"WSL2 has {format_bytes(host.ram_total)} of the computer's RAM: half of it, unless memory= in"
        r" %UserProfile%\.wslconfig says otherwise (then `wsl --shutdown`)."
    ]
    if gpus:
        notes.append(
            "WSL2 does not tell which Windows programs hold GPU memory: Task Manager in Windows shows it"
            " (Details, column Dedicated GPU memory)."
        )
        notes.append(
            "Under WSL2 memory beyond the card's spills into RAM without an error, and everything becomes"
            " several times slower: starting is no proof of fitting."
        )
    return notes


def _about_limits(host: Host) -> list[str]:
    if host.memory_limit is None:
        return []
    limit = format_bytes(host.memory_limit)
    return [f"A control group limits RAM to {limit}; beyond it the kernel ends the process."]


def _about_gpu(gpu: Gpu) -> list[str]:
    notes = []
    if gpu.compute_capability < OLDEST:
        have, want = (".".join(map(str, each)) for each in (gpu.compute_capability, OLDEST))
        notes.append(
            f"GPU {gpu.index} has compute capability {have}; current builds of torch want {want} or newer."
        )
    elif gpu.compute_capability < BFLOAT16_FROM:
        notes.append(
            f"GPU {gpu.index} has no units for bfloat16: vlfit computes in float16 there, which nobody has "
            "tried on such a card."
        )
    if gpu.bandwidth is None:
        notes.append(
            f"The memory bandwidth of GPU {gpu.index} is not known, so its speed cannot be predicted."
        )
    return notes
