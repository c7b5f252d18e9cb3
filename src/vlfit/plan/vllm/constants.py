"""What only measurement can give of vLLM's memory, each number with its source.

Knows numbers. Does not know formulas (``costs.py``). "Measured" is vLLM 0.22.0 with random weights at the
true shapes of Qwen3-VL 2B, 4B and 8B, pictures of at most 1024 tokens, 2048 tokens a pass, a budget of 7.2
GiB. Nothing here was measured on a small card or on another version.
"""

from vlfit.plan.calibration import MEASURED, Constant
from vlfit.units import GIB, MIB

MEASURED_WITH = "0.22.0"
_H200 = f"vLLM {MEASURED_WITH} on one H200, driver 580.159.04, torch 2.11.0+cu130, 2026-11-21"

# What the process holds on the card before vLLM takes its first look: outside its budget, inside "used".
CONTEXT = Constant(
    0.53 * GIB, MEASURED, f"522-527 MiB; users of small cards report 0.4-0.6 GiB before it counts; {_H200}"
)
# What CUDA's libraries take during the trial run, beside torch's pool: inside the budget.
LIBRARIES = Constant(0.24 * GIB, MEASURED, f"0.22-0.24 GiB of non-torch memory; {_H200}")
# What a running process holds more than after its start. Two requests at once: 160-180 MiB; eight: 344-472.
GROWTH_OF_FEW = Constant(
    0.2 * GIB, MEASURED, f"160-180 MiB more after the first requests, two at once; {_H200}"
)
GROWTH = Constant(0.5 * GIB, MEASURED, f"344-472 MiB more after the first requests, eight at once; {_H200}")
FEW_SEQUENCES = 2  # up to which the smaller growth was measured
# CUDA graphs: vLLM captures batches of 1, 2, 4, 8, 16, ... up to twice the requests at once.
GRAPHS_OF_FEW = Constant(72 * MIB, MEASURED, f"0.01-0.07 GiB for 2 to 8 sequences; {_H200}")
GRAPHS_OF_MANY = Constant(0.39 * GIB, MEASURED, f"0.37-0.39 GiB for 256 sequences, 86 graphs; {_H200}")
FEW_GRAPHS, MANY_GRAPHS = 8, 256  # sequences for which these two were measured
# What compiling takes at the peak of a first start, beside what the pass itself holds: 0.40-0.45 GiB in all.
COMPILING = Constant(290 * MIB, MEASURED, f"peaks of 0.40-0.45 GiB less 136-264 MiB by shapes; {_H200}")
# The trial run of two pictures of 1024 tokens peaked at 0.27 GiB without graphs, where shapes say 256 MiB.
BESIDE_PICTURES = Constant(36 * MIB, MEASURED, f"0.27 GiB against 256 MiB by shapes, 2B; {_H200}")
# Seconds for each layer of one pass whose kernels lie in a CUDA graph, from pass to pass.
LAUNCH_OF_GRAPHS = Constant(2.17e-3 / 28, MEASURED, f"Qwen3-VL 2B in bf16: 2.17 ms for 28 layers; {_H200}")
LAUNCH_OF_GRAPHS_LOW = Constant(
    (2.17e-3 - 1.295e-3) / 28, MEASURED, f"the same, less 1.295 ms of matrix products alone; {_H200}"
)
