"""Made-up weights at the true shapes of Qwen3-VL's text layers, as many of each as no cache holds."""

import torch
from torch import Tensor

from benchmarks.kernel_timing import copies_beyond_caches
from vlfit.kernels.gemm.quantized import QuantizedWeight

FORMS = ("fp8", "int8", "int4 of 32", "int4 of 128")
# Outputs and inputs of the matrices of a layer; those that share an input are one. Then the output heads.
LAYERS = {
    "2B": {"qkv": (4096, 2048), "o": (2048, 2048), "gate_up": (12288, 2048), "down": (2048, 6144)},
    "4B": {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)},
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "4B's head": {"head": (151936, 2560)},
    "8B's head": {"head": (151936, 4096)},
}


def random_quantized_weights(form: str, outputs: int, inputs: int) -> list[QuantizedWeight]:
    if form == "fp8":
        count = copies_beyond_caches(outputs * inputs)
        codes = torch.randint(0, 256, (count, outputs, inputs), dtype=torch.uint8, device="cuda")
        codes &= 0xF7  # no NaN
        scale = torch.rand(count, -(-outputs // 128), -(-inputs // 128), device="cuda")
        return [
            QuantizedWeight(codes[i].view(torch.float8_e4m3fn), scale[i], None, (128, 128))
            for i in range(count)
        ]
    if form == "int8":
        count = copies_beyond_caches(outputs * inputs)
        signed = torch.randint(-128, 128, (count, outputs, inputs), dtype=torch.int8, device="cuda")
        scale = torch.rand(count, outputs, 1, dtype=torch.bfloat16, device="cuda")
        return [QuantizedWeight(signed[i], scale[i], None, (1, inputs)) for i in range(count)]
    group = int(form.split()[-1])
    count = copies_beyond_caches(outputs * inputs // 2)
    words = torch.randint(-(2**31), 2**31, (count, outputs, inputs // 8), device="cuda", dtype=torch.int32)
    scale = torch.rand(count, outputs, inputs // group, dtype=torch.bfloat16, device="cuda")
    return [QuantizedWeight(words[i], scale[i], None, (1, group)) for i in range(count)]


def random_dense_weights(outputs: int, inputs: int) -> list[Tensor]:
    count = copies_beyond_caches(2 * outputs * inputs)
    weights = torch.randn(count, outputs, inputs, dtype=torch.bfloat16, device="cuda")
    return list(weights.unbind(0))
