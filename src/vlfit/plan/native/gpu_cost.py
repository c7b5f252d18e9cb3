"""How long the native engine's passes take on a GPU, by its memory, its multiprocessors and the layers.

The constants were fitted to Qwen3-VL 2B and 4B (prompts: 8B, too) on an H200 and an H100, and with 30 of
their 132 multiprocessors (``benchmarks.small_card``), which tells what the memory bounds from what the
multiprocessors do. ``tests/plan/test_gpu_cost.py`` holds them to runs that were not fitted. No other card was
measured: the same formula, fitted to llama.cpp on that H200, gives what owners of smaller cards published.
"""

import re
from dataclasses import dataclass

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8, INT4, INT5, INT6, INT8
from vlfit.machine.model import Gpu
from vlfit.plan.calibration import MEASURED, MODELLED, Constant, Constants
from vlfit.plan.native.tiles import CUBLAS_MIN_MACS
from vlfit.plan.shapes import Matrix, Model
from vlfit.plan.speed import tower_work

_H200 = "one H200, whole and with 30 of 132 multiprocessors, 2026-11-22"
_ONE_ROW = "an H200, whole and with 30 of 132 multiprocessors, 2026-11-29"
_CHAIN = "an H200, whole, and a chain of a step's kernels with 30 of 132 multiprocessors, 2026-11-29"
_PRODUCTS = "a layer's products of 4B with 30 of an H200's multiprocessors, 2026-11-28"

# --- decoding ---

# Of the memory's nominal bandwidth, what a kernel that only reads gets: 4,555 of 4,814 GB/s on an H200, 3,155
# of 3,352 on an H100. Of a calibrated card, what a copy gets, and as much more as there.
READ_SHARE_OF_HBM = Constant(0.945, MEASURED, "a kernel that only reads, H200 and H100")
READ_SHARE = Constant(0.92, MODELLED, "GDDR; a choice between HBM's share and the best published of decoding")
READ_OVER_COPY = Constant(4555 / 4270, MEASURED, "a kernel that only reads beside a copy, one H200")
# Cycles of one multiprocessor for a weight in a product of one row, by the form in which it is stored.
CYCLES = {
    BF16: Constant(0.005, MEASURED, f"2B; {_CHAIN}"),
    FP8: Constant(0.024, MEASURED, f"2B and 4B; {_ONE_ROW}"),
    INT8: Constant(0.025, MEASURED, f"Q8_0; {_PRODUCTS}"),
    INT4: Constant(0.018, MEASURED, f"4B; {_CHAIN}"),
}
# The same of GGUF files.
CYCLES_OF_GGUF = {
    INT4: Constant(0.024, MEASURED, f"Q4_K; {_PRODUCTS}"),
    INT5: Constant(0.027, MODELLED, "between those of 4 and 6 bits"),
    INT6: Constant(0.034, MEASURED, f"Q6_K; {_PRODUCTS}"),
    INT8: Constant(0.025, MEASURED, f"Q8_0; {_PRODUCTS}"),
}
CYCLES_OF_CODEBOOK = Constant(0.032, MEASURED, f"IQ4_XS; {_PRODUCTS}")
_WITH_CODEBOOK = ("IQ4_NL", "IQ4_XS")  # types of models
# Reading r and computing c overlap in part: together (r ** p + c ** p) ** (1 / p) with this p. With 1 they
# would follow each other; the larger it is, the more the longer counts alone.
OVERLAP = 1.5
LAYER_CYCLES = Constant(9.1e-6 * 1.98e9, MEASURED, f"attention, and what kernels wait in a layer; {_ONE_ROW}")

# --- prompts and pictures ---

# Floating-point operations of matrix units in a cycle of one multiprocessor: 16-bit inputs, sums in float32,
# by NVIDIA's data sheets (an RTX 4090: 165 TFLOP/s with 128 multiprocessors at 2.52 GHz). Half as many in
# GeForce cards, and in the A10G (70 TFLOP/s with 80 at 1.71 GHz), as in the same generation's others.
_MATRIX_FLOPS = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192}
_MATRIX_FLOPS_ELSEWHERE = {True: 512, False: 1024}  # half as many or not
_HALF_AS_MANY = re.compile(r"\b(GeForce|A10G)\b")
# Of these, what a large product reaches.
LARGE_PRODUCT_OF_9 = Constant(750e12 / (132 * 1.98e9 * 4096), MEASURED, "8192^3 in bf16, one H200")
LARGE_PRODUCT = Constant(0.90, MODELLED, "a choice: smaller units are easier to keep busy")
# Of a large product's rate, what the text model's products and the tower reach.
TEXT_SHARE = Constant(0.95, MEASURED, f"prompts of 787 tokens; {_H200}")
TOWER_SHARE = Constant(0.70, MEASURED, f"1024x768; {_H200}")
# What cuBLAS takes for FP8 on Hopper, of bfloat16's time; it dequantizes nothing.
FP8_BY_CUBLAS = Constant(581 / 794, MEASURED, "a layer of 4B, 787 rows, 30 of an H200's multiprocessors")
# Cycles of one multiprocessor to dequantize a weight, once a pass.
DEQUANTIZE_CYCLES = Constant(0.10, MEASURED, "128 rows of 4B with 30 multiprocessors, 2026-11-23")
PASS_CYCLES = Constant(150e-6 * 1.98e9, MEASURED, f"a layer of a pass beside its products; {_H200}")
# Seconds of the host before the card begins: chat template and tokens.
PREPARING_SECONDS = Constant(1.2e-3, MEASURED, "a question about a picture, 1.2 to 1.7 ms; hosts of H200s")
# Seconds in which the host asks for a layer's kernels, and for those that dequantize its weights besides.
HOST_SECONDS = Constant(0.28e-3, MEASURED, "2B in bf16, 787 tokens: 7.8 ms for 28 layers; one H200")
HOST_TO_DEQUANTIZE = Constant(0.20e-3, MEASURED, "0.43 to 0.54 ms a layer in all, FP8 and int4; one H200")


@dataclass(frozen=True, slots=True)
class PromptSeconds:
    """Expected seconds of a prompt: ``tower`` of its picture, ``text`` of all the rest.

    The rest is preparing the prompt on the host, and all passes of the text model.
    """

    text: float
    tower: float


def is_known(gpu: Gpu) -> bool:
    """Whether bandwidth, number and clock of ``gpu``'s multiprocessors are known, from which all follows."""
    return bool(gpu.bandwidth and gpu.multiprocessors and gpu.clock_mhz)


def step_seconds(model: Model, gpu: Gpu, constants: Constants, moved: float) -> float:
    """Expected seconds of a decode step of one request that reads and writes ``moved`` bytes.

    ``gpu`` must be known (``is_known``).
    """
    cycles = _cycles(gpu)
    computing = sum(
        _cycles_of(model, matrix.form) * matrix.num_weights * count for matrix, count in _matrices(model)
    )
    computing /= cycles
    reading = moved / ((gpu.bandwidth or 0) * _read_share(gpu, constants))
    layers = model.text.num_hidden_layers * LAYER_CYCLES.value / _clock(gpu)
    return float((reading**OVERLAP + computing**OVERLAP) ** (1 / OVERLAP) + layers)


def _cycles_of(model: Model, form: str) -> float:
    """Cycles of one multiprocessor for a weight of ``model`` in ``form``, in a product of one row."""
    if not model.gguf_type:
        return CYCLES.get(form, CYCLES[BF16]).value
    kind = model.gguf_type.removeprefix("UD-").removeprefix("i1-")
    if form == INT4 and kind.startswith(_WITH_CODEBOOK):
        return CYCLES_OF_CODEBOOK.value
    return CYCLES_OF_GGUF.get(form, CYCLES[BF16]).value


def least_seconds(gpu: Gpu, moved: float) -> float:
    """Seconds in which ``gpu`` could read ``moved`` bytes, if it got as much of its memory as HBM gives."""
    return moved / ((gpu.bandwidth or 0) * READ_SHARE_OF_HBM.value)


def prompt_seconds(
    model: Model,
    gpu: Gpu,
    constants: Constants,
    image_tokens: int,
    text_tokens: int,
    chunk: int,
    *,
    captured: bool = False,
) -> PromptSeconds:
    """Expected seconds of a prompt with a picture of ``image_tokens``, in passes of ``chunk`` tokens.

    ``gpu`` must be known (``is_known``). ``captured``: its pass is a CUDA graph, for which no layer waits for
    the host, as of a length that has come before on a card with room for such graphs.
    """
    rate = _large_product_flops(gpu, constants)
    prompt = image_tokens + text_tokens
    passes = -(-prompt // chunk)
    rows = min(prompt, chunk)
    narrow, spared = 0, 0.0  # weights to dequantize, and those whose products cuBLAS spares
    for matrix, count in model.text_matrices:
        weights = matrix.num_weights * count
        if matrix.form == FP8 and not model.gguf_type and gpu.compute_capability == (9, 0):
            # Matrices of a layer that share an input are multiplied together.
            macs = rows * weights / model.text.num_hidden_layers
            by_cublas = macs >= CUBLAS_MIN_MACS * (gpu.multiprocessors or 0)
            spared += weights * (1 - FP8_BY_CUBLAS.value) * by_cublas
        elif matrix.form != BF16 or model.gguf_type:
            narrow += weights
    layer_weights = model.num_weights_per_token - model.head.num_weights
    computing = 2.0 * (layer_weights - spared) * prompt / (rate * TEXT_SHARE.value)
    computing += passes * narrow * DEQUANTIZE_CYCLES.value / _cycles(gpu)
    layers = passes * model.text.num_hidden_layers
    # Rows are quantized where weights are not dequantized: both ask the host for more kernels.
    asks_more = bool(model.gguf_type) or any(matrix.form != BF16 for matrix, _ in model.text_matrices)
    asking = layers * _host_seconds(constants, dequantizes=asks_more)
    computing += layers * PASS_CYCLES.value / _clock(gpu)
    text = PREPARING_SECONDS.value + (computing if captured else max(computing, asking))
    return PromptSeconds(text, tower_work(model.vision, image_tokens) / (rate * TOWER_SHARE.value))


def _host_seconds(constants: Constants, *, dequantizes: bool) -> float:
    """Seconds in which the host asks for a layer's kernels, as measured on this machine or elsewhere."""
    measured = constants.multiplications is not None
    launch = constants.launch.value if measured else HOST_SECONDS.value
    return launch + (HOST_TO_DEQUANTIZE.value if dequantizes else 0.0)


def _matrices(model: Model) -> tuple[tuple[Matrix, int], ...]:
    return (*model.text_matrices, (model.head, 1))


def _clock(gpu: Gpu) -> float:
    return (gpu.clock_mhz or 0) * 1e6


def _cycles(gpu: Gpu) -> float:
    """Cycles of all multiprocessors in a second."""
    return (gpu.multiprocessors or 0) * _clock(gpu)


def _read_share(gpu: Gpu, constants: Constants) -> float:
    if constants.copy_bandwidth is not None:
        copied = constants.copy_bandwidth.value * READ_OVER_COPY.value
        return min(copied / (gpu.bandwidth or copied), 1.0)
    of_hbm = gpu.compute_capability in _MATRIX_FLOPS
    return READ_SHARE_OF_HBM.value if of_hbm else READ_SHARE.value


def _large_product_flops(gpu: Gpu, constants: Constants) -> float:
    """Floating-point operations per second of a large product of 16-bit matrices, measured here or not."""
    if constants.multiplications is not None:
        return constants.multiplications.value
    elsewhere = _MATRIX_FLOPS_ELSEWHERE[bool(_HALF_AS_MANY.search(gpu.name))]
    per_cycle = _MATRIX_FLOPS.get(gpu.compute_capability, elsewhere)
    share = LARGE_PRODUCT_OF_9 if gpu.compute_capability == (9, 0) else LARGE_PRODUCT
    return per_cycle * _cycles(gpu) * share.value
