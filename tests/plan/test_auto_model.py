"""The model that ``auto`` chooses, on typical machines and caches."""

from pathlib import Path

import pytest

from vlfit.checkpoint.cache import LocalModel
from vlfit.machine.model import Gpu, Host, Machine
from vlfit.plan.model_lookup import GPU_MARGIN, SUGGESTION, choose_checkpoint
from vlfit.units import GIB, MIB


def model(name: str, billions: float, gib: float, form: str, complete: bool = True) -> LocalModel:
    size = int(gib * GIB)
    return LocalModel(name, Path("/x"), size, form, complete, size, int(billions * 1e9))


MINI = model("mini", 0.012, 0.02, "bf16")
TWO, TWO_WIDE = model("org/2B-FP8", 2.128, 2.65, "fp8"), model("org/2B", 2.128, 3.96, "bf16")
FOUR, EIGHT = model("org/4B-FP8", 4.438, 4.88, "fp8"), model("org/8B-FP8", 8.767, 9.86, "fp8")

EIGHT_INT4 = model("org/8B-INT4", 8.767, 7.03, "int4")


def machine(*free_mib: int, ram: int = 16) -> Machine:
    total = 24576 * MIB
    gpus = tuple(
        Gpu(
            index, "NVIDIA", total, free * MIB, total - free * MIB, (), "", "", (12, 0), None, "unknown", None
        )
        for index, free in enumerate(free_mib)
    )
    host = Host(32 * GIB, ram * GIB, 0, None, False, False, "none", 8, "Linux")
    return Machine(gpus, host, () if gpus else ("No NVIDIA driver is installed.",))


# The card of the documents: 8151 MiB, of which a desktop holds 951.
DESKTOP = machine(7200)


@pytest.mark.parametrize(
    ("computer", "models", "chosen"),
    [
        (DESKTOP, [MINI, TWO, FOUR, EIGHT], "org/4B-FP8"),
        (DESKTOP, [MINI, EIGHT, TWO], "org/2B-FP8"),
        (DESKTOP, [TWO_WIDE, TWO, MINI], "org/2B-FP8"),  # FP8 leaves room
        (machine(24000), [TWO, FOUR, EIGHT], "org/8B-FP8"),
        (machine(24000), [EIGHT_INT4, EIGHT], "org/8B-FP8"),  # int4 is less exact: where FP8 fits, that
        (machine(9500), [EIGHT_INT4, EIGHT, FOUR], "org/8B-INT4"),  # but more parameters go first
        (machine(2000, 24000), [TWO, FOUR, EIGHT], "org/8B-FP8"),  # the emptier of two GPUs
        (machine(7000, 7000), [EIGHT, FOUR], "org/4B-FP8"),  # two GPUs are not one
        (machine(3000), [TWO, FOUR], "mini"),
        (machine(0), [TWO], "mini"),
        (machine(), [TWO, FOUR, MINI], "org/2B-FP8"),  # no GPU: 2B in float32 is 8 GiB
        (machine(ram=8), [TWO, MINI], "mini"),
        (machine(ram=64), [FOUR], "mini"),  # fits, but a CPU would take seconds per word
        (DESKTOP, [MINI], "mini"),
        (DESKTOP, [], "mini"),
        (DESKTOP, [model("org/part", 0, 0, "fp8", complete=False)], "mini"),
    ],
)
def test_choice(computer: Machine, models: list[LocalModel], chosen: str) -> None:
    choice = choose_checkpoint(computer, models)
    assert choice.model == chosen
    assert choice.reason.startswith(f"using {chosen}")
    assert "\n" not in choice.reason


def test_exactly_enough_memory_suffices() -> None:
    need = (TWO.weight_bytes + GPU_MARGIN + MIB - 1) // MIB
    assert choose_checkpoint(machine(need), [TWO]).model == "org/2B-FP8"
    assert choose_checkpoint(machine(need - 1), [TWO]).model == "mini"


@pytest.mark.parametrize(
    ("computer", "models", "words"),
    [
        (DESKTOP, [TWO], "needs about 4.51 GiB and 7.03 GiB of the GPU are free"),
        (machine(), [TWO], "without a GPU it is slow"),
        (DESKTOP, [], f"vlfit pull {SUGGESTION}"),
        (DESKTOP, [EIGHT], "org/8B-FP8 is here but needs about 11.72 GiB; 7.03 GiB on the GPU are free"),
        (machine(ram=4), [TWO], "4.00 GiB of RAM are free"),
        (machine(ram=64), [FOUR], "too slow without a GPU (--model org/4B-FP8 runs it anyway)"),
        (DESKTOP, [model("org/part", 0, 0, "fp8", complete=False)], "vlfit pull org/part goes on"),
    ],
)
def test_reason_names_sizes_and_commands(computer: Machine, models: list[LocalModel], words: str) -> None:
    assert words in choose_checkpoint(computer, models).reason
