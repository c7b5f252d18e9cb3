"""Where kernels are tested: on a GPU if there is one, else by Triton's interpreter on the CPU.

The interpreter multiplies bfloat16 matrices as if their bits were integers (Triton 3.7), so bfloat16 is
tested on a GPU alone; float16 takes the same path through the kernels.
"""

import importlib.util

import pytest
import torch

ON_GPU = torch.cuda.is_available()
# Half precision takes the same way through the interpreter once more.
DTYPES = [
    torch.float32,
    pytest.param(torch.float16, marks=pytest.mark.slow),
    *([torch.bfloat16] if ON_GPU else []),
]

# Relative error allowed, |out - exact| / |exact| over all elements. float32: the order of some thousand
# additions, and a score's last bits, which exp2 makes an error of its weight. Half precision: the result is
# rounded once, and so are weights that are not exact numbers of that dtype (int4, attention's); an error of
# rounding is at most half a unit in the last place, 2^-11 or 2^-8 of the number, and two of them come to
# less on average.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture
def device() -> torch.device:
    if ON_GPU:
        return torch.device("cuda")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed (torch's CPU build comes without it)")
    from triton import knobs

    if not knobs.runtime.interpret:
        pytest.skip("there is a GPU that this torch cannot use, so the interpreter was not asked for")
    return torch.device("cpu")


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """NaN where ``out`` has one."""
    return float((out.double() - exact).norm() / exact.norm())
