"""The memory ledger: lines with bytes, how they are known, and why; and the lines that backends share."""

from collections.abc import Iterable
from dataclasses import dataclass

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8
from vlfit.machine.model import Gpu
from vlfit.plan import calibration
from vlfit.plan.calibration import EXACT, MEASURED, MODELLED, Constant, Constants
from vlfit.plan.shapes import Model
from vlfit.units import MIB

DEFAULT_CONTEXT = 8192  # where none is asked for and the model has as much
TYPICAL_REQUEST = (
    2048  # tokens of the KV cache for each request at once: a picture, a question, a long answer
)


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a backend is started with.

    - ``weights``: the weights format. ``context``: most tokens of a request, prompt and answer together.
    - ``image_tokens``: most tokens of a picture; 0 for a text-only model.
    - ``sequences``: concurrent requests. ``chunk``: prefill chunk in tokens (vLLM's
      ``max_num_batched_tokens``).
    - ``graphs``: vLLM compiles the model and captures CUDA graphs. Always False for the native engine, which
      captures its own wherever it can.
    - ``offloaded_layers``: how many text layers wait in RAM; ``tight_kv_cache``: concurrent requests share
      fewer tokens than by default. Both for the native engine only.
    - ``kv_dtype``: of the KV cache: bf16, which stands for any 16 bits, or fp8.
    - ``speculate``: the native engine also captures decode steps with draft tokens.
    """

    weights: str
    context: int
    image_tokens: int
    sequences: int
    chunk: int
    graphs: bool = False
    offloaded_layers: int = 0
    tight_kv_cache: bool = False
    kv_dtype: str = BF16
    speculate: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the ledger: its name (``line``), bytes, ``how`` they are known, and a ``note``.

    ``how``: exact, measured or modelled.
    """

    line: str
    bytes: int
    how: str
    note: str


@dataclass(frozen=True, slots=True)
class VisionPeak:
    """Bytes of encoding a picture: ``kept`` stay (``kept_note`` names them), ``peak`` while the tower runs.

    ``counted_elsewhere``: part of ``peak`` that ``kept`` or another line already has.
    """

    image_tokens: int
    kept: int
    peak: int
    counted_elsewhere: int
    kept_note: str


def shown_name(line: str) -> str:
    """The name of a ledger line on pages: ``context``, CUDA's own memory, is ``runtime`` there."""
    return "runtime" if line == "context" else line


def total_bytes(lines: Iterable[Line]) -> int:
    return sum(line.bytes for line in lines)


def held_by_others(gpu: Gpu) -> int:
    """Bytes of the card that are not free before the model is loaded; at least the known ``desktop``."""
    return max(gpu.total - gpu.free, gpu.desktop)


def desktop_line(gpu: Gpu, note: str = "what other programs and the driver hold") -> Line:
    """The line of memory that other programs hold (``held_by_others``)."""
    return Line("desktop", held_by_others(gpu), MEASURED, note)


def cuda_context_line(context: Constant, constants: Constants) -> Line:
    """The line of CUDA's own memory; its note includes why a calibration is not used, if so."""
    broken = f"; {constants.broken}" if constants.broken else ""
    return Line("context", context.bytes, context.how, f"CUDA and its libraries: {context.source}{broken}")


def weight_lines(model: Model) -> tuple[Line, Line, Line]:
    """Lines of text, vision and embedding weights, all on one card."""
    head = "table of tokens and output head" if model.own_head else "table of tokens"
    tower = "vision tower" if model.vision else "no vision tower"
    return (
        Line("weights.text", model.text_bytes, EXACT, f"text layers in {model.weights}, {model.known_by}"),
        Line("weights.vision", model.vision_bytes, EXACT, tower),
        Line("weights.embedding", model.embedding_bytes, EXACT, head),
    )


def shared_pool_tokens(context: int, sequences: int, tokens_per_request: int = TYPICAL_REQUEST) -> int:
    """Tokens of a KV cache that all requests share.

    ``tokens_per_request`` (at most a context) for each, and at least one whole context.
    """
    return max(sequences * min(context, tokens_per_request), context)


def kv_cache_line(
    model: Model, settings: PlanSettings, tokens: int, token_bytes: int, block: int | None = None
) -> Line:
    """The line of a KV cache of ``tokens``, each of ``token_bytes``, and of recurrent states, if any.

    ``block``: tokens of a block, for the note; None: it has no blocks.
    """
    note = kv_cache_note(tokens, token_bytes, settings) + (f", in blocks of {block}" if block else "")
    states = state_bytes(model, settings)
    if states:
        note += f"; states of {settings.sequences} requests, {model.state_bytes_per_sequence:,} bytes each"
    return Line("kv_cache", tokens * token_bytes + states, EXACT, note)


def state_bytes(model: Model, settings: PlanSettings) -> int:
    """Bytes of all requests' recurrent states, in layers that keep one in place of keys and values."""
    return settings.sequences * model.state_bytes_per_sequence


def kv_cache_note(tokens: int, token_bytes: int, settings: PlanSettings) -> str:
    """The size of a KV cache in words."""
    return f"{tokens} tokens of {token_bytes:,} bytes{' in FP8' if settings.kv_dtype == FP8 else ''}"


def reserve_line(rounding: int = 0) -> Line:
    """Memory left free on purpose, and ``rounding`` bytes by which vLLM's large tensors are rounded up."""
    note = f"{calibration.RESERVE.bytes // MIB} MiB of air (a choice)"
    if rounding:
        note += f"; {rounding / MIB:.0f} MiB by which large tensors are rounded up"
    return Line("reserve", calibration.RESERVE.bytes + rounding, MODELLED, note)


def workspace_lines(
    settings: PlanSettings, text_peak: int, vision: VisionPeak | None, pool: int, constants: Constants
) -> tuple[Line, Line]:
    """Lines of the vision tower's and the text model's workspaces, which share torch's pool.

    They never run at once, so only the larger peak is counted; of the other one only ``vision.kept``.
    ``pool``: bytes of torch's pool beside tensors, counted with the text model. ``vision`` None: no pictures.
    """
    beside = pool + constants.workspace.bytes
    begun = (
        f"; {beside / MIB:.0f} MiB that torch's pool takes beside weights and KV cache, "
        f"{constants.workspace.bytes / MIB:.0f} of them for matrix products"
    )
    text_note = f"{settings.chunk} tokens a pass at a context of {settings.context}, and logits"
    if vision is None:
        return (
            Line("vision_workspace", 0, EXACT, "no pictures"),
            Line("text_workspace", beside + text_peak, MODELLED, text_note + begun),
        )
    text_is_larger = vision.peak - vision.counted_elsewhere < text_peak
    stays = f"{vision.kept / MIB:.0f} MiB of {vision.kept_note} stay"
    peak = f"peak {vision.peak / MIB:.0f} MiB for {vision.image_tokens} image tokens"
    return (
        Line(
            "vision_workspace",
            vision.kept + (0 if text_is_larger else vision.peak - vision.counted_elsewhere),
            MODELLED,
            f"{stays}; {peak}{', which text_workspace lends' if text_is_larger else ''}",
        ),
        Line(
            "text_workspace",
            beside + (text_peak if text_is_larger else 0),
            MODELLED,
            f"{text_note}: peak {text_peak / MIB:.0f} MiB"
            f"{'' if text_is_larger else ', which vision_workspace lends'}{begun}",
        ),
    )
