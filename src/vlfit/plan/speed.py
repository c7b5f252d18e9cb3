"""How fast it will be, from bytes moved, the card's bandwidth and measured efficiencies: always a range.

Knows: what the native engine reads and writes for one token, counted from its code. Does not know: the card's
arithmetic, which drivers do not tell; time to the first token rests on a guess and says so by its width.
"""

from dataclasses import dataclass, replace

from vlfit.checkpoint.config import VisionConfig
from vlfit.checkpoint.quantization import FP8, INT4, INT8
from vlfit.machine.model import Gpu
from vlfit.plan import calibration
from vlfit.plan.calibration import Constants
from vlfit.plan.ledger import NATIVE, VLLM, Settings, kv_bytes
from vlfit.plan.native.ram import copy_seconds, offload_of
from vlfit.plan.shapes import HALF, Matrix, Model
from vlfit.plan.vllm.cost import (
    ALL_REDUCE_HIGH,
    ALL_REDUCE_LOW,
    ALL_REDUCE_SECONDS,
    LAUNCH_OF_GRAPHS,
    LAUNCH_OF_GRAPHS_LOW,
    all_reduces,
)
from vlfit.plan.vllm.flags import FLOAT32

TEXT_TOKENS = 40  # of the prompt beside the picture: a question and the chat template
_NONE = (0.0, 0.0, 0.0)  # no layer waits in RAM, so none is copied
# Bytes read for each weight in one pass, scales included; every backend reads weights as they are stored.
_STORED = {FP8: 1.0, INT8: 1.0, INT4: 0.5 + HALF / 32}


@dataclass(frozen=True, slots=True)
class Range:
    """A prediction between two bounds."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True)
class Speed:
    """``decode``: tokens per second of one request alone. ``first_token``: seconds, picture decoded.

    ``roof`` is the limit of the card, or of those that share each layer: tokens per second if every weight
    were read once as it is stored, at peak bandwidth. ``offload``: tokens per second at most if ``offloaded``
    bytes of weights came from RAM over PCIe for each token, as they are too much; None where the plan fits or
    the link is not known. Layers that the plan lets wait in RAM are in ``decode`` and ``first_token``
    already.
    """

    decode: Range
    first_token: Range
    roof: float
    bytes_per_token: int
    offload: float | None = None
    offloaded: int = 0


def predict(model: Model, gpu: Gpu, backend: str, settings: Settings, deficit: int = 0) -> Speed | None:
    """The speed of one request with a picture of ``settings.image_tokens``.

    None if the bandwidth of the card, or of its link where layers wait in RAM, is not known, and for float32,
    in which nothing was measured.
    """
    if gpu.bandwidth is None or settings.vllm.dtype == FLOAT32:
        return None
    # Cards that share each layer read their parts of it at once, and then wait for each other.
    cards = settings.vllm.tensor
    bandwidth = gpu.bandwidth * cards
    sums = _sums(model, cards)
    constants = calibration.constants_for(gpu)
    if backend != NATIVE:  # what was measured here is the native engine's
        constants = replace(constants, launch_low=calibration.LAUNCH_LOW, launch=calibration.LAUNCH)
    if backend == VLLM and settings.graphs:
        constants = replace(constants, launch_low=LAUNCH_OF_GRAPHS_LOW, launch=LAUNCH_OF_GRAPHS)
    launch_low, launch = constants.launch_low.value, constants.launch.value
    if backend == NATIVE and not settings.offload:  # a decode step is one graph; prompts are launched
        launch_low = min(launch_low, calibration.STEP_OF_GRAPH_LOW.value)
        launch = min(launch, calibration.STEP_OF_GRAPH.value)
    cached = settings.image_tokens + TEXT_TOKENS
    weights = _pass_bytes(model)
    moved = weights + cards * cached * kv_bytes(model, backend, settings)
    layers = model.text.num_hidden_layers
    # Kernels are launched ahead of the GPU, so the longer of the two counts; at worst nothing overlaps.
    fast = max(moved / (bandwidth * constants.efficiency_high.value), layers * launch_low)
    expected = max(moved / (bandwidth * constants.efficiency.value), layers * launch)
    slow = moved / (bandwidth * constants.efficiency_low.value) + layers * launch
    fast, expected, slow = fast + sums[0], expected + sums[1], slow + sums[2]
    copies = copy_seconds(offload_of(model, settings.offload), gpu, constants) if settings.offload else _NONE
    if copies is None:
        return None
    # A layer is copied while others compute (``offload.py``); at worst nothing overlaps here either.
    fast, expected, slow = max(fast, copies[0]), max(expected, copies[1]), slow + copies[2]
    # Only weights can wait in RAM: a KV cache that is too large cannot.
    stored = model.text_bytes + model.vision_bytes + model.embedding_bytes
    offloaded = deficit if 0 < deficit <= stored else 0
    offload = gpu.pcie_bandwidth / offloaded if offloaded and gpu.pcie_bandwidth else None
    return Speed(
        decode=Range(1 / slow, 1 / expected, 1 / fast),
        first_token=_first_token(
            model, bandwidth, weights, settings, constants, copies, _rows(model, gpu, settings)
        ),
        roof=bandwidth / moved,
        bytes_per_token=round(moved),
        offload=offload,
        offloaded=offloaded,
    )


def _sums(model: Model, cards: int) -> tuple[float, float, float]:
    """Seconds in which cards add up their parts for one token: little to send, so each sum takes its time."""
    if cards == 1:
        return _NONE
    times = all_reduces(model)
    return (
        times * ALL_REDUCE_LOW.value,
        times * ALL_REDUCE_SECONDS.value,
        times * ALL_REDUCE_HIGH.value,
    )


def _rows(model: Model, gpu: Gpu, settings: Settings) -> tuple[float, float, float]:
    """Seconds in which cards add up their parts for a prompt: rows that go over the link, once there and once
    back less a card's own part; nothing at best, as links between cards that no driver tells of may be fast.
    """
    cards = settings.vllm.tensor
    if cards == 1 or not gpu.pcie_bandwidth:
        return _NONE
    tokens = settings.image_tokens + TEXT_TOKENS
    sent = all_reduces(model) * tokens * model.text.hidden_size * HALF * 2 * (cards - 1) / cards
    return 0.0, sent / gpu.pcie_bandwidth, 2 * sent / gpu.pcie_bandwidth


def _matrices(model: Model) -> list[Matrix]:
    return [*(list(model.layer.values()) * model.text.num_hidden_layers), model.head]


def _pass_bytes(model: Model) -> float:
    """Bytes that one pass of the text model reads for its weights, however few tokens are in it."""
    return float(sum(_STORED.get(matrix.form, HALF) * matrix.weights for matrix in _matrices(model)))


def _first_token(
    model: Model,
    bandwidth: int,
    weights: float,
    settings: Settings,
    constants: Constants,
    copies: tuple[float, float, float],
    rows: tuple[float, float, float],
) -> Range:
    """``copies``: seconds in which the layers that wait in RAM are copied once, as each pass needs them;
    ``rows``: those in which cards add up their parts.
    """
    prompt = settings.image_tokens + TEXT_TOKENS
    passes = -(-prompt // settings.chunk)
    # A picture is one card's, unless they share the tower out.
    alone = 1 if settings.vllm.split_tower else settings.vllm.tensor
    looking = alone * _tower_work(model.vision, settings.image_tokens)
    work = 2.0 * model.head_and_layer_weights * prompt + looking
    layers = model.text.num_hidden_layers * passes + (model.vision.depth if model.vision else 0)

    def seconds(flops_per_byte: float, efficiency: float, launch: float, copy: float) -> float:
        computing = work / (bandwidth * flops_per_byte)
        all_here = max(computing + passes * weights / (bandwidth * efficiency), layers * launch)
        # While the tower looks no layer's turn comes.
        return max(all_here, looking / (bandwidth * flops_per_byte) + passes * copy)

    return Range(
        seconds(
            constants.flops_per_byte_high.value,
            constants.efficiency_high.value,
            constants.launch_low.value,
            copies[0],
        )
        + rows[0],
        seconds(constants.flops_per_byte.value, constants.efficiency.value, constants.launch.value, copies[1])
        + rows[1],
        seconds(
            constants.flops_per_byte_low.value, constants.efficiency_low.value, constants.launch.value, 0.0
        )
        + passes * copies[2]
        + rows[2],
    )


def _tower_work(vision: VisionConfig | None, image_tokens: int) -> float:
    """Floating-point operations of the tower: its matrices for each patch, and each patch with all others."""
    if vision is None:
        return 0.0
    patches = image_tokens * vision.spatial_merge_size**2
    in_block = vision.hidden_size * (4 * vision.hidden_size + 2 * vision.intermediate_size)
    merged = vision.hidden_size * vision.spatial_merge_size**2
    mergers = (1 + len(vision.deepstack_visual_indexes)) * merged * (merged + vision.out_hidden_size)
    linear = 2.0 * (patches * vision.depth * in_block + image_tokens * mergers)
    return linear + 4.0 * patches**2 * vision.hidden_size * vision.depth
