"""What CUDA and its libraries hold on this GPU before any tensor does, step by step, by the size of stacks.

    python -m benchmarks.context          a few seconds for each size; the GPU must be idle

CUDA reserves a stack for every thread that the card can hold, 1,024 bytes unless it is told otherwise; the
engine lowers that (``engine/device.py``). Each size is tried in a process of its own. MiB are what is less
free on the whole card.
"""

import json
import sys

from benchmarks.facts import card, commit, output_of
from benchmarks.measure import MIB
from benchmarks.report import print_rows
from vlfit.engine.device import STACK_BYTES

SIZES = (1024, 512, STACK_BYTES, 128, 0)
STEPS = ("context", "stacks", "first kernel", "sum", "sorting", "attention", "matrix product")


def main() -> None:
    if sys.argv[1:2] == ["--steps"]:
        print(json.dumps(steps(int(sys.argv[2]))))
        return
    print(f"commit {commit()}; {card()}")
    rows = [["stack", *STEPS, "together"]]
    for size in SIZES:
        found = json.loads(output_of(sys.executable, "-m", "benchmarks.context", "--steps", str(size)))
        rows.append(
            [f"{size} bytes", *(f"{found[step]:.1f}" for step in STEPS), f"{sum(found.values()):.1f}"]
        )
    print_rows(rows)


def steps(stack: int) -> dict[str, float]:
    """MiB of the device that each of ``STEPS`` takes, one after the other, with stacks of ``stack`` bytes."""
    import ctypes

    import torch
    import torch.nn.functional as F

    free, total = torch.cuda.mem_get_info()
    found = {"context": (total - free) / MIB}

    def step(name: str) -> None:
        nonlocal free
        torch.cuda.synchronize()
        now = torch.cuda.mem_get_info()[0]
        found[name] = (free - now) / MIB
        free = now

    error = ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(0, ctypes.c_size_t(stack))
    if error:
        sys.exit(f"the driver refuses stacks of {stack} bytes (error {error})")
    step("stacks")
    values = torch.zeros(1024, 1024, dtype=torch.bfloat16, device="cuda")
    step("first kernel")
    values.sum(dim=-1).argmax()
    step("sum")
    values.sort(dim=-1)
    step("sorting")
    heads = values.view(1, 8, 2048, 64)
    F.scaled_dot_product_attention(heads, heads, heads)
    step("attention")
    F.linear(values, values)
    step("matrix product")
    return found


if __name__ == "__main__":
    main()
