"""The memory ledger: lines with bytes, how they are known, and why; and the lines that backends share."""

from collections.abc import Iterable
from dataclasses import dataclass

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8
from vlfit.machine.model import Gpu
from vlfit.models.cache_spec import CacheSpec, State, snapshot_bytes, state_bytes_per_sequence
from vlfit.plan import calibration
from vlfit.plan.calibration import EXACT, MEASURED, MODELLED, Constant, Constants
from vlfit.plan.shapes import Model
from vlfit.units import MIB, counted

DEFAULT_CONTEXT = 8192  # where none is asked for and the model has as much
TYPICAL_REQUEST = (
    2048  # tokens of the KV cache for each request at once: a picture, a question, a long answer
)


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a backend is started with.

    - ``weights``: the weights format. ``context``: most tokens of a request, prompt and answer together.
    - ``image_tokens``: most tokens of a picture; 0 for a text-only model.
    - ``sequences``: most concurrent requests (vLLM's ``max_num_seqs``), of each copy of the model.
    - ``chunk``: prefill chunk in tokens (vLLM's ``max_num_batched_tokens``).
    - ``graphs``: vLLM compiles the model and captures CUDA graphs. Always False for the native engine, which
      captures its own wherever it can.
    - ``offloaded_layers``: how many text layers are kept in RAM. Native engine only.
    - ``tight_kv_cache``: the KV cache has fewer tokens for each request than by default. Native engine only.
    - ``kv_dtype``: of the KV cache: fp8, or bf16, which stands for any 16 bits.
    - ``speculate``: decode steps with draft tokens have CUDA graphs, too. ``draft_model``: with it, layers of
      the checkpoint that draft tokens (multi-token prediction) are loaded. Native engine only.
    - ``state_snapshots``: copies of recurrent states that the prefix cache keeps on the card; others are in
      RAM. Native engine only.
    - ``table_in_ram``: the table of tokens of a model with an output head of its own is in RAM, from which
      the card reads rows. Native engine only.
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
    table_in_ram: bool = True
    state_snapshots: int = 0
    draft_model: bool = True

    @property
    def uses_draft_model(self) -> bool:
        """Whether layers that draft tokens are loaded, where the checkpoint has them."""
        return self.speculate and self.draft_model


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the ledger: its name (``line``), and the ``bytes`` that it takes.

    ``how`` the bytes are known: exact, measured or modelled. ``note``: what they consist of, in words.
    """

    line: str
    bytes: int
    how: str
    note: str


@dataclass(frozen=True, slots=True)
class VisionPeak:
    """Bytes that encoding a picture of ``image_tokens`` takes.

    - ``peak``: while the vision tower runs. ``counted_elsewhere``: the part of it in ``kept`` or other lines.
    - ``kept``: still allocated while the text model runs; ``kept_note`` says for what.
    """

    image_tokens: int
    kept: int
    peak: int
    counted_elsewhere: int
    kept_note: str


def shown_name(line: str) -> str:
    """The name under which a ledger line is printed: ``runtime`` for ``context``, else ``line`` itself."""
    return "runtime" if line == "context" else line


def total_bytes(lines: Iterable[Line]) -> int:
    return sum(line.bytes for line in lines)


def held_by_others(gpu: Gpu) -> int:
    """Bytes of ``gpu`` that are not free, or ``gpu.desktop`` if that is more."""
    return max(gpu.total - gpu.free, gpu.desktop)


def desktop_line(gpu: Gpu, note: str = "what other programs and the driver hold") -> Line:
    """The ledger line ``desktop``: ``held_by_others``, measured."""
    return Line("desktop", held_by_others(gpu), MEASURED, note)


def cuda_context_line(context: Constant, constants: Constants) -> Line:
    """The ledger line ``context``: memory of CUDA itself.

    The note says why the calibration file is not used, if it is broken (``constants.broken``).
    """
    broken = f"; {constants.broken}" if constants.broken else ""
    return Line("context", context.bytes, context.how, f"CUDA and its libraries: {context.source}{broken}")


def weight_lines(model: Model) -> tuple[Line, Line, Line]:
    """The three ledger lines of weights (text, vision, embedding), with all of them on one card."""
    head = "table of tokens and output head" if model.own_head else "table of tokens"
    tower = "vision tower" if model.vision else "no vision tower"
    return (
        Line("weights.text", model.text_bytes, EXACT, f"text layers in {model.weights}, {model.known_by}"),
        Line("weights.vision", model.vision_bytes, EXACT, tower),
        Line("weights.embedding", model.embedding_bytes, EXACT, head),
    )


def shared_pool_tokens(context: int, sequences: int, tokens_per_request: int = TYPICAL_REQUEST) -> int:
    """How many tokens a KV cache shared by ``sequences`` concurrent requests gets by default.

    ``tokens_per_request`` for each request, but no more than a whole ``context`` each; and at least one
    context in all.
    """
    return max(sequences * min(context, tokens_per_request), context)


def kv_cache_line(
    model: Model, settings: PlanSettings, tokens: int, token_bytes: int, block: int | None = None
) -> Line:
    """The ledger line ``kv_cache``: ``tokens`` of ``token_bytes`` bytes each.

    ``block``: tokens of a block, for the note only; None: the cache has no blocks.
    """
    note = kv_cache_note(tokens, token_bytes, settings) + (f", in blocks of {block}" if block else "")
    return Line("kv_cache", tokens * token_bytes, EXACT, note)


def state_cache_lines(spec: CacheSpec, sequences: int, snapshots: int = 0) -> tuple[Line, ...]:
    """The ledger lines ``state_cache`` (recurrent states of ``sequences`` requests) and ``state_snapshots``.

    Neither for a model without states; the latter for ``snapshots`` on the device, if any.
    """
    each = state_bytes_per_sequence(spec)
    layers = sum(isinstance(layer, State) for layer in spec)
    note = (
        f"states of {counted(layers, 'layer')} for {counted(sequences, 'request')}, {each:,} bytes each "
        "whatever their context"
    )
    if not each:
        return ()
    copy = snapshot_bytes(spec)
    many = counted(snapshots, "copy", "copies")
    about = f"{many} of states of {copy:,} bytes each, with which prefixes are reused"
    copies = (Line("state_snapshots", snapshots * copy, EXACT, about),) if snapshots else ()
    return (Line("state_cache", sequences * each, EXACT, note), *copies)


def kv_cache_note(tokens: int, token_bytes: int, settings: PlanSettings) -> str:
    """The note of the ledger line ``kv_cache``: ``tokens`` of ``token_bytes`` bytes each, in words."""
    return f"{tokens} tokens of {token_bytes:,} bytes{' in FP8' if settings.kv_dtype == FP8 else ''}"


def reserve_line(rounding: int = 0) -> Line:
    """The ledger line ``reserve``: memory left free on purpose.

    ``rounding``: bytes to add, by which torch rounds up vLLM's large tensors.
    """
    note = f"{calibration.RESERVE.bytes // MIB} MiB of air (a choice)"
    if rounding:
        note += f"; {rounding / MIB:.0f} MiB by which large tensors are rounded up"
    return Line("reserve", calibration.RESERVE.bytes + rounding, MODELLED, note)


def workspace_lines(
    settings: PlanSettings, text_peak: int, vision: VisionPeak | None, pool: int, constants: Constants
) -> tuple[Line, Line]:
    """The ledger lines ``vision_workspace`` and ``text_workspace``.

    Tower and text model never run at the same time and share torch's pool, so only the larger of their peaks
    is counted, on its line. ``vision.kept`` is always counted, and so are ``pool`` (bytes that torch reserves
    beyond the tensors, on the text line) and cuBLAS's workspace. ``text_peak``: bytes of a text pass.
    ``vision``: None without pictures.
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
