"""GPU memory of a CUDA context and its libraries, step by step, by the size of thread stacks.

    python -m benchmarks.context          a few seconds for each size; the GPU must be idle

CUDA reserves a stack for every thread that the GPU can hold, 1,024 bytes each by default; the engine lowers
that (``engine/device.py``). Each size is measured in a process of its own, in MiB less free on the whole GPU.
"""

import argparse
import json
import sys

from benchmarks.harness import MIB, argument_parser, card, commit, print_table, require_gpu, run_worker
from vlfit.engine.device import STACK_BYTES

SIZES = (1024, 512, STACK_BYTES, 128, 0)
STEPS = ("context", "stacks", "first kernel", "sum", "sorting", "attention", "matrix product")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    stack = parser.parse_args().worker
    if stack is not None:
        print(json.dumps(measure(stack)))
        return
    require_gpu("context")
    print(f"commit {commit()}; {card()}")
    rows = [["stack", *STEPS, "together"]]
    for size in SIZES:
        taken = run_worker("benchmarks.context", "--worker", str(size))
        rows.append(
            [f"{size} bytes", *(f"{taken[step]:.1f}" for step in STEPS), f"{sum(taken.values()):.1f}"]
        )
    print_table(rows)


def measure(stack: int) -> dict[str, float]:
    """MiB of the device that each of ``STEPS`` takes, one after the other, with stacks of ``stack`` bytes."""
    import ctypes

    import torch
    import torch.nn.functional as F

    free, total = torch.cuda.mem_get_info()
    taken = {"context": (total - free) / MIB}

    def step(name: str) -> None:
        nonlocal free
        torch.cuda.synchronize()
        now = torch.cuda.mem_get_info()[0]
        taken[name] = (free - now) / MIB
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
    return taken


if __name__ == "__main__":
    main()
