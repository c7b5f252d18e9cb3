"""How fast it will be, from bytes moved, the card's bandwidth and measured efficiencies: always a range.

Drivers do not report a card's FLOPS, so time to the first token is an estimate with a wide range.
"""

from dataclasses import dataclass

from vlfit.checkpoint.config import VisionConfig
from vlfit.checkpoint.quantization import FP8, INT4, INT8
from vlfit.machine.model import Gpu
from vlfit.plan.calibration import Constants
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.shapes import HALF, Matrix, Model, tower_cost

TEXT_TOKENS = 40  # of the prompt beside the picture: a question and the chat template
Seconds = tuple[float, float, float]  # at best, expected, at worst
NO_TIME: Seconds = (0.0, 0.0, 0.0)
# Bytes read for each weight in one pass, scales included; every backend reads weights as they are stored.
BYTES_PER_WEIGHT = {FP8: 1.0, INT8: 1.0, INT4: 0.5 + HALF / 32}


@dataclass(frozen=True, slots=True)
class Range:
    """A prediction between two bounds."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True)
class Speed:
    """``decode``: tokens per second of one request alone. ``first_token``: seconds, picture decoded.

    - ``roof``: the limit of the card, or of those that share each layer: tokens per second if every weight
      were read once as it is stored, at peak bandwidth.
    - ``offload``: tokens per second at most if ``offloaded`` bytes of weights, which are too much, came from
      RAM over PCIe for each token; None where the plan fits or the link is not known. Layers that the plan
      lets wait in RAM are in ``decode`` and ``first_token`` already.
    """

    decode: Range
    first_token: Range
    roof: float
    bytes_per_token: int
    offload: float | None = None
    offloaded: int = 0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a backend's passes cost beside reading weights.

    - ``constants``: efficiencies, and the seconds to launch a layer's kernels for a prompt.
    - ``launch_low``, ``launch``: seconds to launch a layer's kernels in a decode step.
    - ``kv_bytes``: keys and values of one token on one card.
    - ``cards``: how many share each layer; ``tower_cards``: how many share the vision tower.
    - ``decode_sums``, ``prompt_sums``: seconds in which cards add up their parts, for a token and for a
      prompt.
    - ``copies``: seconds in which the layers that wait in RAM are copied once, as each pass needs them.
    """

    constants: Constants
    launch_low: float
    launch: float
    kv_bytes: int
    cards: int = 1
    tower_cards: int = 1
    decode_sums: Seconds = NO_TIME
    prompt_sums: Seconds = NO_TIME
    copies: Seconds = NO_TIME


def predict(
    model: Model, gpu: Gpu, settings: PlanSettings, costs: StepCosts, deficit: int = 0
) -> Speed | None:
    """The speed of one request with a picture of ``settings.image_tokens``; None without a bandwidth."""
    if gpu.bandwidth is None:
        return None
    constants, copies = costs.constants, costs.copies
    # Cards that share each layer read their parts of it at once, and then wait for each other.
    bandwidth = gpu.bandwidth * costs.cards
    cached = settings.image_tokens + TEXT_TOKENS
    weights = pass_bytes(model)
    moved = weights + costs.cards * cached * costs.kv_bytes
    layers = model.text.num_hidden_layers
    # Kernels are launched ahead of the GPU, so the longer of the two counts; at worst nothing overlaps.
    fast = max(moved / (bandwidth * constants.efficiency_high.value), layers * costs.launch_low)
    expected = max(moved / (bandwidth * constants.efficiency.value), layers * costs.launch)
    slow = moved / (bandwidth * constants.efficiency_low.value) + layers * costs.launch
    sums = costs.decode_sums
    fast, expected, slow = fast + sums[0], expected + sums[1], slow + sums[2]
    # A layer is copied while others compute; at worst nothing overlaps here either.
    fast, expected, slow = max(fast, copies[0]), max(expected, copies[1]), slow + copies[2]
    # Only weights can wait in RAM: a KV cache that is too large cannot.
    stored = model.text_bytes + model.vision_bytes + model.embedding_bytes
    offloaded = deficit if 0 < deficit <= stored else 0
    offload = gpu.pcie_bandwidth / offloaded if offloaded and gpu.pcie_bandwidth else None
    return Speed(
        decode=Range(1 / slow, 1 / expected, 1 / fast),
        first_token=_first_token(model, bandwidth, weights, settings, costs),
        roof=bandwidth / moved,
        bytes_per_token=round(moved),
        offload=offload,
        offloaded=offloaded,
    )


def _matrices(model: Model) -> list[Matrix]:
    return [*(list(model.layer.values()) * model.text.num_hidden_layers), model.head]


def pass_bytes(model: Model) -> float:
    """Bytes that one pass of the text model reads for its weights, however few tokens are in it."""
    return float(sum(BYTES_PER_WEIGHT.get(matrix.form, HALF) * matrix.weights for matrix in _matrices(model)))


def _first_token(
    model: Model, bandwidth: int, weights: float, settings: PlanSettings, costs: StepCosts
) -> Range:
    """Seconds of encoding a picture and of the prompt's passes."""
    constants, copies, sums = costs.constants, costs.copies, costs.prompt_sums
    prompt = settings.image_tokens + TEXT_TOKENS
    passes = -(-prompt // settings.chunk)
    # A picture is encoded on one card, unless they share the tower out.
    encoding = costs.cards // costs.tower_cards * _tower_work(model.vision, settings.image_tokens)
    work = 2.0 * model.head_and_layer_weights * prompt + encoding
    layers = model.text.num_hidden_layers * passes + (model.vision.depth if model.vision else 0)

    def seconds(flops_per_byte: float, efficiency: float, launch: float, copy: float) -> float:
        computing = work / (bandwidth * flops_per_byte)
        all_here = max(computing + passes * weights / (bandwidth * efficiency), layers * launch)
        # No layer is copied while the tower runs.
        return max(all_here, encoding / (bandwidth * flops_per_byte) + passes * copy)

    return Range(
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


def _tower_work(vision: VisionConfig | None, image_tokens: int) -> float:
    """Floating-point operations of the tower for one picture."""
    return 0.0 if vision is None else tower_cost(vision).flops(vision, image_tokens)
