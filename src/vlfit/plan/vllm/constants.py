"""What only measurement can give of vLLM's memory, each number with its source.

Knows numbers. Does not know formulas (``costs.py``). "Measured" is vLLM 0.22.0, whose runner was the older
one, and 0.26.0, with the newer one (``costs.has_newer_runner``), with random weights at the true shapes of
Qwen3-VL and some 7 GiB for it. Nothing here was measured on a small card.
"""

from vlfit.plan.calibration import MEASURED, MODELLED, Constant
from vlfit.units import GIB, MIB

MEASURED_WITH = "0.22.0"
NEWER_MEASURED_WITH = "0.26.0"
_H100 = f"vLLM {NEWER_MEASURED_WITH} on one H100, driver 580.159.04, torch 2.11.0, benchmarks.vllm_beside"
_TWO_H200 = f"vLLM {NEWER_MEASURED_WITH} on two H200, by hand"
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
# With the newer runner: 4B in FP8 without graphs, two at once, 270 MiB at most (138 in the end); 2B in FP8
# with graphs, eight at once, 154.
GROWTH_OF_NEWER = Constant(0.265 * GIB, MEASURED, f"154-270 MiB more at the first requests; {_H100}")
# CUDA graphs: vLLM captures batches of 1, 2, 4, 8, 16, ... up to twice the requests at once.
GRAPHS_OF_FEW = Constant(72 * MIB, MEASURED, f"0.01-0.07 GiB for 2 to 8 sequences; {_H200}")
GRAPHS_OF_MANY = Constant(0.39 * GIB, MEASURED, f"0.37-0.39 GiB for 256 sequences, 86 graphs; {_H200}")
FEW_GRAPHS, MANY_GRAPHS = 8, 256  # sequences for which these two were measured
# What compiling takes at the peak of a first start, beside what the pass itself holds: 0.40-0.45 GiB in all;
# with the newer runner nothing of it was seen, at a first start of 2B in FP8 (47 s of compiling, 0.26.0).
COMPILING = Constant(290 * MIB, MEASURED, f"peaks of 0.40-0.45 GiB less 136-264 MiB by shapes; {_H200}")
# The trial run of two pictures of 1024 tokens peaked at 0.27 GiB without graphs, where shapes say 256 MiB.
BESIDE_PICTURES = Constant(36 * MIB, MEASURED, f"0.27 GiB against 256 MiB by shapes, 2B; {_H200}")
# Seconds for each layer of one pass whose kernels lie in a CUDA graph, from pass to pass.
LAUNCH_OF_GRAPHS = Constant(2.17e-3 / 28, MEASURED, f"Qwen3-VL 2B in bf16: 2.17 ms for 28 layers; {_H200}")
LAUNCH_OF_GRAPHS_LOW = Constant(
    (2.17e-3 - 1.295e-3) / 28, MEASURED, f"the same, less 1.295 ms of matrix products alone; {_H200}"
)
# What NCCL holds on each card of a group that shares layers, before vLLM's first look. Linear in its
# channels, of which fast links have more (NCCL's issue 864).
NCCL = Constant(
    688 * MIB,
    MODELLED,
    "4 A100 with NVLink, one all-reduce of 4 MiB in groups of more than two: NCCL issue 964",
)
# Without multicast over NVLink (NVLS) 953 MiB more than one card's context were gone at vLLM's first look,
# some of them CUDA's libraries, which are counted apart; at the end 592 (2B in bf16) to 711 MiB (mini) were
# missing in the other lines, of which 96 are ``ALL_REDUCE`` and ``SYMMETRIC``. NVLS takes 288 on each card.
NCCL_OF_HOPPER = Constant(
    0.92 * GIB, MODELLED, f"496-615 MiB without NVLS, {_TWO_H200}; NVLS's 288 MiB: NCCL issue 1410"
)
# vLLM's own all-reduce (0.32): a buffer of 8 MiB and one of 16 that the others read, 8 MiB of addresses; and
# from compute capability 9.0 on up to 64 MiB of symmetric memory.
ALL_REDUCE = Constant(32 * MIB, MODELLED, "custom_all_reduce.py of vLLM 0.32, by its source")
SYMMETRIC = Constant(64 * MIB, MODELLED, "SYMM_MEM_ALL_REDUCE_MAX_SIZES of vLLM 0.32, by its source")
# Seconds of one all-reduce of a token's row, some KiB, inside a CUDA graph.
ALL_REDUCE_LOW = Constant(4e-6, MODELLED, "one-shot kernels, 4 KiB, 4 cards: sglang-V100 PR 2; 6 us by NVLS")
ALL_REDUCE_SECONDS = Constant(20e-6, MODELLED, "NCCL over PCIe, 4-8 KiB, 4 cards: 19-20 us, sglang-V100 PR 2")
ALL_REDUCE_HIGH = Constant(
    52e-6, MODELLED, "the same with 128 KiB; cards that cannot read each other: a guess"
)
# RAM of processes that serve, measured by hand with vLLM 0.32 on a processor: 0.84 GB (1.16 at most) for one
# that takes requests, 0.64 for an engine, 1.0 for each worker. A worker of a GPU was not measured.
FRONT_RAM = Constant(1.16e9, MEASURED, "resident memory of vLLM 0.32's API server at most, on a processor")
ENGINE_RAM = Constant(0.64e9, MEASURED, "resident memory of vLLM 0.32's EngineCore, on a processor")
WORKER_RAM = Constant(1.0e9, MEASURED, "resident memory of vLLM 0.32's worker, mini on a processor")
