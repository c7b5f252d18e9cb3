"""Where kernels are tested: on a GPU if there is one, else by Triton's interpreter on the CPU.

The interpreter multiplies bfloat16 matrices as if their bits were integers (Triton 3.7), so bfloat16 is
tested on a GPU alone; float16 takes the same path through the kernels.
"""

import importlib.util

import pytest
import torch

from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.layers.linear import pack_codes

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


def two_level(
    bits: int, outputs: int, inputs: int, group: int, block: int, *, affine: bool, codebook: str | None = None
) -> QuantizedWeight:
    """As GGUF's K-quants: sub-scales of ``group`` inputs, times d (and minima times dmin) of ``block``."""
    if bits < 8:
        codes = pack_codes(torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8), bits)
    else:
        codes = torch.randint(-128, 128, (outputs, inputs)).to(torch.int8)
    shape, blocks = (outputs, inputs // group), (outputs, inputs // block)
    d = (torch.rand(blocks) * 0.001 + 0.0001).to(torch.float16)
    if not affine:
        sub = torch.randint(-128, 128, shape).to(torch.int8)
        return QuantizedWeight(codes, sub, None, (1, group), d, bits, codebook)
    sub = torch.randint(0, 256, shape) | torch.randint(0, 256, shape) << 8
    dmin = (torch.rand(blocks) * 0.001 - 0.0005).to(torch.float16)
    supers = torch.stack((d, dmin), dim=2).view(torch.int32).squeeze(2)
    return QuantizedWeight(codes, sub.to(torch.int16), None, (1, group), supers, bits)
