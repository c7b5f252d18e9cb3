"""Speed predicted from bytes moved, the card's bandwidth and measured efficiencies: always a range.

Drivers do not report a card's FLOPS, so time to the first token is an estimate with a wide range.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from vlfit.checkpoint.config import VisionConfig
from vlfit.checkpoint.quantization import FP8, INT4, INT5, INT6, INT8
from vlfit.machine.model import Gpu
from vlfit.plan.calibration import Constants
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.shapes import HALF, Matrix, Model, tower_cost

TEXT_TOKENS = 40  # of the prompt beside the picture: a question and the chat template
Seconds = tuple[float, float, float]  # at best, expected, at worst
NO_TIME: Seconds = (0.0, 0.0, 0.0)
# For the likely time to the first token, arithmetic is the expected one divided and multiplied by this. A
# choice: data sheets of GeForce cards from the RTX 3060 to the 5090 have 71 to 164 operations a byte in 16
# bits, of which GEMMs of this size reach about two thirds: 47 to 109; 85 / 1.35 to 85 * 1.35 is 63 to 115.
LIKELY_FACTOR = 1.35
_NO_TENSOR_CORES = "GTX"  # in the names of Turing cards that have none
# Of a backend's own fit: low and high are this factor away from what is expected, 1.5 from one to the other.
FITTED_FACTOR = 1.5**0.5
# Bytes read for each weight in one pass, scales included; every backend reads weights as they are stored.
BYTES_PER_WEIGHT = {
    FP8: 1.0,
    INT8: 1.0,
    INT6: 0.75 + HALF / 32,
    INT5: 0.625 + HALF / 32,
    INT4: 0.5 + HALF / 32,
}


@dataclass(frozen=True, slots=True)
class Range:
    """A prediction (``expected``) with its lower and upper bound, in the unit of the field that has it."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicted speed of one request alone.

    - ``decode``: tokens per second.
    - ``first_token``: seconds from the decoded picture to the first token, between outer bounds.
    - ``likely_first_token``: the same with a narrower range (low to high less than a factor of 2), which is a
      choice, not a measurement.
    - ``roof``: tokens per second at peak bandwidth, an upper limit that decoding does not reach.
    - ``bytes_per_token``: bytes of weights, keys, values and recurrent states that a decode step reads or
      writes, on all cards.
    - ``offloaded_bytes``: for a plan that does not fit, the bytes by which it is too large, if they can be
      weights; else 0. ``offload_tokens_per_s``: the most tokens per second with these in RAM; None without
      such bytes, or if the PCIe bandwidth is not known. Not for layers that the settings themselves offload:
      these are part of ``decode`` and ``first_token``.
    - ``small_picture``: on a CPU, seconds to the first token of a picture of 512x512 pixels; else None.
    - ``measured``: the day on which ``vlfit verify`` measured this model here, which the speeds follow; "" if
      they are predicted alone.
    """

    decode: Range
    first_token: Range
    roof: float
    bytes_per_token: int
    offload_tokens_per_s: float | None = None
    offloaded_bytes: int = 0
    likely_first_token: Range | None = None
    small_picture: Range | None = None
    measured: str = ""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a backend's passes cost beside reading weights.

    - ``constants``: of the card: efficiencies, and the seconds to launch a layer's kernels for a prompt.
    - ``launch_low``, ``launch``: seconds to launch a layer's kernels in a decode step, at best and expected.
    - ``kv_bytes``: bytes of keys and values of one token in all layers, on one card. ``state_bytes``: bytes
      of recurrent states that a decode step reads and writes.
    - ``cards``: how many cards share each layer; ``tower_cards``: how many share the vision tower.
    - ``decode_all_reduce``, ``prompt_all_reduce``: seconds that all-reduces between cards take for one token,
      and for a prompt.
    - ``offload_copies``: seconds to copy all offloaded layers from RAM once, which each pass does.
    - ``fitted``: what a backend's own fit gives in place of bandwidth and launches; None: it has none for the
      card.
    """

    constants: Constants
    launch_low: float
    launch: float
    kv_bytes: int
    cards: int = 1
    tower_cards: int = 1
    decode_all_reduce: Seconds = NO_TIME
    prompt_all_reduce: Seconds = NO_TIME
    offload_copies: Seconds = NO_TIME
    state_bytes: int = 0
    fitted: "FittedSeconds | None" = None


@dataclass(frozen=True, slots=True)
class FittedSeconds:
    """Expected seconds of a decode step, and of a first token's ``text`` and ``tower``.

    ``text`` begins with preparing the prompt on the host; the rest is on the card. ``least_step``: seconds in
    which a step's bytes could be read at best.
    """

    step: float
    least_step: float
    text: float
    tower: float


def bytes_per_step(model: Model, settings: PlanSettings, costs: StepCosts) -> float:
    """Bytes that a decode step after a picture and a question reads or writes, on all cards."""
    cached = settings.image_tokens + TEXT_TOKENS
    return weight_bytes_per_pass(model) + costs.cards * cached * costs.kv_bytes + costs.state_bytes


def predict_speed(
    model: Model, gpu: Gpu, settings: PlanSettings, costs: StepCosts, deficit: int = 0
) -> Speed | None:
    """The speed of one request: a picture of ``settings.image_tokens`` and a question of 40 tokens.

    None if ``gpu.bandwidth`` is None. ``deficit``: bytes by which the plan is too large, from which
    ``Speed.offload_tokens_per_s`` follows; 0: it fits.
    """
    if gpu.bandwidth is None:
        return None
    copies = costs.offload_copies
    # Cards that share each layer read their parts of it at once, and then wait for each other.
    bandwidth = gpu.bandwidth * costs.cards
    moved = bytes_per_step(model, settings, costs)
    fast, expected, slow = _step_seconds(model, bandwidth, moved, costs)
    sums = costs.decode_all_reduce
    fast, expected, slow = fast + sums[0], expected + sums[1], slow + sums[2]
    # A layer is copied while others compute; at worst nothing overlaps here either.
    fast, expected, slow = max(fast, copies[0]), max(expected, copies[1]), slow + copies[2]
    # Only weights can wait in RAM: a KV cache that is too large cannot.
    stored = model.text_bytes + model.vision_bytes + model.embedding_bytes
    offloaded = deficit if 0 < deficit <= stored else 0
    offload = gpu.pcie_bandwidth / offloaded if offloaded and gpu.pcie_bandwidth else None
    first_token, likely_first_token = (
        _first_token(model, gpu, settings, costs)
        if costs.fitted is None
        else _fitted_first_token(costs.fitted, settings, copies)
    )
    return Speed(
        decode=Range(1 / slow, 1 / expected, 1 / fast),
        first_token=first_token,
        roof=bandwidth / moved,
        bytes_per_token=round(moved),
        offload_tokens_per_s=offload,
        offloaded_bytes=offloaded,
        likely_first_token=likely_first_token,
    )


def _step_seconds(model: Model, bandwidth: float, moved: float, costs: StepCosts) -> Seconds:
    if costs.fitted is not None:
        step = costs.fitted.step
        return max(step / FITTED_FACTOR, costs.fitted.least_step), step, step * FITTED_FACTOR
    constants, layers = costs.constants, model.text.num_hidden_layers
    # Kernels are launched ahead of the GPU, so the longer of the two counts; at worst nothing overlaps.
    return (
        max(moved / (bandwidth * constants.efficiency_high.value), layers * costs.launch_low),
        max(moved / (bandwidth * constants.efficiency.value), layers * costs.launch),
        moved / (bandwidth * constants.efficiency_low.value) + layers * costs.launch,
    )


def rounded(value: float) -> float:
    """Three digits: a prediction is no better than that."""
    return float(f"{value:.3g}")


def rounded_bounds(low: float, high: float, digits: int = 3) -> tuple[float, float]:
    """``low`` and ``high`` in so many digits, to be shown: no wider than 1.5 if they are not themselves."""
    return _no_wider(low, high, lambda value: digits - 1 - math.floor(math.log10(value)) if value > 0 else 0)


def decode_bounds(low: float, high: float) -> tuple[str, str]:
    """Tokens per second from ``low`` to ``high`` as they are shown; as ``rounded_bounds``."""
    usual = 0 if high >= 10 else 1
    bounds = _no_wider(low, high, lambda _: usual)
    digits = usual if all(round(each, usual) == each for each in bounds) else usual + 1
    return f"{bounds[0]:.{digits}f}", f"{bounds[1]:.{digits}f}"


def _no_wider(low: float, high: float, decimals: Callable[[float], int]) -> tuple[float, float]:
    """``low`` and ``high`` rounded to ``decimals`` of each, no wider than 1.5 if they are not themselves.

    Where the nearest are wider, they are rounded towards each other; if that takes more than 1 %, with one
    more decimal.
    """
    widest = FITTED_FACTOR**2 * (1 + 1e-9)
    shown = low, high
    for more in (0, 1):
        places = decimals(low) + more, decimals(high) + more
        shown = round(low, places[0]), round(high, places[1])
        if high > widest * low or shown[1] <= widest * shown[0]:
            break
        steps = 10.0 ** places[0], 10.0 ** places[1]
        shown = math.ceil(low * steps[0]) / steps[0], math.floor(high * steps[1]) / steps[1]
        if low * steps[0] >= 100:
            break
    return shown


def _matrices(model: Model) -> tuple[tuple[Matrix, int], ...]:
    return (*model.text_matrices, (model.head, 1))


def weight_bytes_per_pass(model: Model) -> float:
    """Bytes of weights that one pass of the text model reads, whatever its number of tokens.

    These are the matrices of all layers and the output head, as stored. Of a GGUF model, whose layers have
    several types, all bytes of its text layers and of its head.
    """
    if model.gguf_type:
        return float(model.text_bytes + model.head_bytes)
    return float(
        sum(
            BYTES_PER_WEIGHT.get(matrix.form, HALF) * matrix.num_weights * count
            for matrix, count in _matrices(model)
        )
    )


def _fitted_first_token(
    fitted: FittedSeconds, settings: PlanSettings, copies: Seconds
) -> tuple[Range, Range]:
    """Seconds of the picture and of the prompt's passes: outer bounds, and the likely range."""
    passes = -(-(settings.image_tokens + TEXT_TOKENS) // settings.chunk)

    def seconds(factor: float, copy: float, *, overlaps: bool = True) -> float:
        text, tower, copying = fitted.text * factor, fitted.tower * factor, passes * copy
        # No layer is copied while the tower runs.
        return tower + (max(text, copying) if overlaps else text + copying)

    expected, outer = seconds(1.0, copies[1]), FITTED_FACTOR**2
    return (
        Range(seconds(1 / outer, copies[0]), expected, seconds(outer, copies[2], overlaps=False)),
        Range(seconds(1 / FITTED_FACTOR, copies[1]), expected, seconds(FITTED_FACTOR, copies[1])),
    )


def _first_token(model: Model, gpu: Gpu, settings: PlanSettings, costs: StepCosts) -> tuple[Range, Range]:
    """Seconds of encoding a picture and of the prompt's passes: outer bounds, and the likely range."""
    bandwidth, weights = (gpu.bandwidth or 0) * costs.cards, weight_bytes_per_pass(model)
    constants, copies, sums = costs.constants, costs.offload_copies, costs.prompt_all_reduce
    prompt = settings.image_tokens + TEXT_TOKENS
    passes = -(-prompt // settings.chunk)
    # A picture is encoded on one card, unless they share the tower out.
    encoding = costs.cards // costs.tower_cards * tower_work(model.vision, settings.image_tokens)
    work = 2.0 * model.num_weights_per_token * prompt + encoding
    layers = model.text.num_hidden_layers * passes + (model.vision.depth if model.vision else 0)

    def seconds(flops_per_byte: float, efficiency: float, launch: float, copy: float) -> float:
        computing = work / (bandwidth * flops_per_byte)
        all_here = max(computing + passes * weights / (bandwidth * efficiency), layers * launch)
        # No layer is copied while the tower runs.
        return max(all_here, encoding / (bandwidth * flops_per_byte) + passes * copy)

    bounds = Range(
        seconds(
            constants.flops_per_byte_high.value,
            constants.efficiency_high.value,
            constants.launch_low.value,
            copies[0],
        )
        + sums[0],
        seconds(constants.flops_per_byte.value, constants.efficiency.value, constants.launch.value, copies[1])
        + sums[1],
        seconds(
            constants.flops_per_byte_low.value, constants.efficiency_low.value, constants.launch.value, 0.0
        )
        + passes * copies[2]
        + sums[2],
    )
    has_tensor_cores = _NO_TENSOR_CORES not in gpu.name
    likely = constants.flops_per_byte if has_tensor_cores else constants.flops_per_byte_low
    low, expected, high = (
        seconds(likely.value * factor, constants.efficiency.value, constants.launch.value, copies[1])
        + sums[1]
        for factor in (LIKELY_FACTOR, 1.0, 1 / LIKELY_FACTOR)
    )
    return bounds, Range(low, expected, high)


def tower_work(vision: VisionConfig | None, image_tokens: int) -> float:
    """Floating-point operations of the tower for one picture."""
    return 0.0 if vision is None else tower_cost(vision).flops(vision, image_tokens)
