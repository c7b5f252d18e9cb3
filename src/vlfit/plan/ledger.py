"""The ledger: the lines that GPU memory is spent on, each with bytes, how they are known, and why.

Knows: which formula or constant stands behind each line. Does not know: what to choose (``search.py`` does)
or how it is shown (``report.py``).
"""

from dataclasses import dataclass, replace

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.config import VisionConfig
from vlfit.checkpoint.quantization import FP8
from vlfit.machine.model import Gpu
from vlfit.plan import allocator, calibration
from vlfit.plan.calibration import EXACT, MEASURED, MODELLED, Constants
from vlfit.plan.native import cost as costs
from vlfit.plan.native import cost as graphs
from vlfit.plan.native import ram as offload
from vlfit.plan.native.tiles import Card, Means, Table, means_of, table_of
from vlfit.plan.shapes import HALF, SINGLE, Model, kv_bytes_per_token
from vlfit.plan.vllm import cost as vllm_costs
from vlfit.plan.vllm.flags import ALONE, OfVllm
from vlfit.units import MIB

NATIVE, VLLM, TRANSFORMERS = "native", "vllm", "transformers"
BACKENDS = (NATIVE, VLLM, TRANSFORMERS)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a backend is started with: tokens of a request, of a picture, requests at once, tokens of a pass.

    ``image_tokens`` is 0 for a model without eyes. ``graphs``: whether vLLM compiles the model and captures
    CUDA graphs; the native engine captures its own wherever it can. ``offload``: how many text layers wait in
    RAM, and ``tight``: whether requests share a smaller pool than the engine takes by itself; both of the
    native engine only. ``kv_dtype`` of the KV cache: bf16, which stands for any 16 bits, or fp8.
    ``speculate``: in the native engine a step of several rows of one request is recorded, too. ``vllm``: what
    only vLLM is told.
    """

    weights: str
    context: int
    image_tokens: int
    sequences: int
    chunk: int
    graphs: bool = False
    offload: int = 0
    tight: bool = False
    kv_dtype: str = BF16
    speculate: bool = True
    vllm: OfVllm = ALONE


@dataclass(frozen=True, slots=True)
class Line:
    """``how``: exact, measured or modelled."""

    line: str
    bytes: int
    how: str
    note: str


def ledger(
    model: Model, gpu: Gpu, backend: str, settings: Settings, means: Means | None = None
) -> tuple[Line, ...]:
    """Every line, in the order in which the memory is taken. ``means``: if not those of ``gpu``."""
    if backend == VLLM:
        from vlfit.plan.vllm.lines import of_vllm  # its lines are made of what stands here

        return of_vllm(model, gpu, settings)
    means = means or means_on(gpu)
    constants = calibration.constants_for(gpu)
    return (
        Line("desktop", held_by_others(gpu), MEASURED, "what other programs and the driver hold"),
        _context(backend, constants),
        *_weights(model, backend, settings),
        kv_cache(model, backend, settings),
        *_workspaces(model, backend, settings, constants, means, table_of(_card(gpu))),
        _graphs(model, backend, settings, constants, means),
        reserve(),
    )


def reserve(more: int = 0) -> Line:
    """Air. ``more``: what vLLM's large tensors are rounded up by."""
    note = f"{calibration.RESERVE.bytes // MIB} MiB of air (a choice)"
    if more:
        note += f"; {more / MIB:.0f} MiB by which large tensors are rounded up"
    return Line("reserve", calibration.RESERVE.bytes + more, MODELLED, note)


def _context(backend: str, constants: Constants) -> Line:
    known = constants.transformers_context if backend == TRANSFORMERS else constants.context
    broken = f"; {constants.broken}" if constants.broken else ""
    return Line("context", known.bytes, known.how, f"CUDA and its libraries: {known.source}{broken}")


def held_by_others(gpu: Gpu) -> int:
    """All that is not free."""
    return max(gpu.total - gpu.free, gpu.desktop)


def _card(gpu: Gpu) -> Card:
    """What tiles are kept for: what was measured on such a card counts on any of its kind."""
    return Card(gpu.name, gpu.compute_capability)


def means_on(gpu: Gpu) -> Means:
    """What the engine has on ``gpu`` for prompts and pictures."""
    return means_of(gpu.total - held_by_others(gpu), gpu.compute_capability)


def _weights(model: Model, backend: str, settings: Settings) -> tuple[Line, ...]:
    """As ``backend`` holds them: transformers has one row of a norm of queries or keys for all heads."""
    lines = weight_lines(model, settings.offload)
    text = model.text
    if backend != TRANSFORMERS or not text.query_key_norm:
        return lines
    heads = text.num_attention_heads - 1 + text.num_key_value_heads - 1
    less = text.num_hidden_layers * heads * text.head_dim * HALF
    return replace(lines[0], bytes=lines[0].bytes - less), *lines[1:]


def weight_lines(model: Model, waiting: int = 0) -> tuple[Line, ...]:
    """``waiting`` layers are in RAM: their line is of the two slots that they take turns in."""
    head = "table of tokens and output head" if model.own_head else "table of tokens"
    apart = offload.offload_of(model, waiting)
    here = f"text layers in {model.weights}, {model.known_by}"
    if waiting:
        here = f"{model.text.num_hidden_layers - waiting} of {model.text.num_hidden_layers} {here}"
    lines = (
        Line("weights.text", model.text_bytes - apart.weights, EXACT, here),
        Line(
            "weights.vision", model.vision_bytes, EXACT, "vision tower" if model.vision else "no vision tower"
        ),
        Line("weights.embedding", model.embedding_bytes, EXACT, head),
    )
    if not waiting:
        return lines
    note = f"{apart.words} and come through {offload.SLOTS} slots of {apart.slot / MIB:.0f} MiB"
    return *lines, Line("weights.offload", apart.slots, EXACT, note)


def pool_tokens(backend: str, settings: Settings) -> int:
    """Tokens that the KV cache holds: the engine's pool, or in transformers every request at full length."""
    if backend == VLLM:
        return vllm_costs.pool_tokens(settings)
    if backend == NATIVE:
        each = costs.TIGHT_REQUEST if settings.tight else costs.TYPICAL_REQUEST
        return costs.kv_tokens(settings.context, settings.sequences, each)
    return settings.context * settings.sequences


def kv_cache(model: Model, backend: str, settings: Settings) -> Line:
    tokens = pool_tokens(backend, settings)
    size = {NATIVE: costs.BLOCK_SIZE, VLLM: vllm_costs.LARGEST_BLOCK}.get(backend)
    blocks = f", in blocks of {size}" if size else ""
    each = kv_bytes(model, backend, settings)
    return Line("kv_cache", tokens * each, EXACT, f"{kv_words(tokens, each, settings)}{blocks}")


def kv_words(tokens: int, each: int, settings: Settings) -> str:
    """A pool in words: ``tokens`` of ``each`` so many bytes."""
    return f"{tokens} tokens of {each:,} bytes{' in FP8' if settings.kv_dtype == FP8 else ''}"


def kv_bytes(model: Model, backend: str, settings: Settings) -> int:
    """Keys and values of one token in all layers, on one card; in FP8 vLLM has one scale for all, the engine
    many.
    """
    if backend == VLLM:
        return vllm_costs.kv_bytes(model, settings.kv_dtype, settings.vllm)
    return kv_bytes_per_token(model.text, settings.kv_dtype)


def _workspaces(
    model: Model, backend: str, settings: Settings, constants: Constants, means: Means, table: Table
) -> tuple[Line, Line]:
    """Tower and text model never run at once and take their workspace from one pool.

    So only the larger peak is counted; of the other only what stays when it is done. What the pool has
    beside tensors stands with the text model, as nothing tells it from a workspace.
    """
    text = round(_text_slack(backend, constants) * _text_peak(model, backend, settings, means, table))
    beside = _pool_beside(model, backend, settings) + constants.workspace.bytes
    begun = (
        f"; {beside / MIB:.0f} MiB that torch's pool takes beside weights and KV cache, "
        f"{constants.workspace.bytes / MIB:.0f} of them for matrix products"
    )
    if model.vision is None or not settings.image_tokens:
        return (
            Line("vision_workspace", 0, EXACT, "no pictures"),
            Line("text_workspace", beside + text, MODELLED, _text_note(settings) + begun),
        )
    # What stays lies between what comes and goes, so the pool grows by more than either.
    slack = _vision_slack(backend, constants)
    kept = round(slack * _kept(model.vision, backend, settings))
    vision = round(slack * _vision_peak(model, model.vision, backend, settings, means))
    if backend == TRANSFORMERS:  # no keys and values are there yet while the tower runs
        instead = pool_tokens(backend, settings) * kv_bytes(model, backend, settings)
    else:  # what the tower makes is one of the pictures that stay
        features = costs.feature_bytes(model.vision, settings.image_tokens)
        instead = round(slack * features)
    lent = vision - instead < text
    stays = f"{kept / MIB:.0f} MiB of features{_and_pixels(backend)} stay"
    peak = f"peak {vision / MIB:.0f} MiB for {settings.image_tokens} image tokens"
    return (
        Line(
            "vision_workspace",
            kept + (0 if lent else vision - instead),
            MODELLED,
            f"{stays}; {peak}{', which text_workspace lends' if lent else ''}",
        ),
        Line(
            "text_workspace",
            beside + (text if lent else 0),
            MODELLED,
            f"{_text_note(settings)}: peak {text / MIB:.0f} MiB"
            f"{'' if lent else ', which vision_workspace lends'}{begun}",
        ),
    )


def _pool_beside(model: Model, backend: str, settings: Settings) -> int:
    """What torch takes more than weights and KV cache are, once both are there (``allocator.py``)."""
    kv_cache = pool_tokens(backend, settings) * kv_bytes(model, backend, settings)
    if backend == TRANSFORMERS:  # a tensor for the keys and one for the values of each layer
        tensors = 2 * model.text.num_hidden_layers
        segments = allocator.held_for([kv_cache // tensors] * tensors)
        return model.pool_apart + segments - kv_cache + allocator.BEGUN
    weights = model.pool
    if settings.offload:
        apart = offload.offload_of(model, settings.offload)
        weights = offload.torch_takes(model, apart) - (model.weight_bytes - apart.frees)
    # Keys of all layers are one tensor, values another.
    return weights + 2 * allocator.beside(kv_cache // 2) + allocator.BEGUN


def _graphs(model: Model, backend: str, settings: Settings, constants: Constants, means: Means) -> Line:
    """Of decode steps and, where there is room, of the tower, in the native engine; layers that are streamed
    from RAM cannot be recorded.
    """
    if backend != NATIVE:
        return Line("graphs", 0, EXACT, f"the {backend} backend captures no CUDA graphs")
    if settings.offload:
        return Line("graphs", 0, EXACT, "no CUDA graphs: layers come from RAM at each step")
    guess_rows = graphs.GUESS_ROWS if settings.speculate else 0
    pool = graphs.pool_bytes(model, settings.sequences, guess_rows)
    note = f"tensors of recorded decode steps of up to {settings.sequences}"
    if guess_rows:
        note += f", and of {guess_rows} rows for guesses"
    if means.tower and model.vision is not None and settings.image_tokens:
        scratch = means.scratch if model.tower_is_narrow else 0
        pool += graphs.tower_bytes(model.vision, settings.image_tokens, constants.workspace.bytes, scratch)
        note += ", and of the vision tower"
    return Line("graphs", pool, MODELLED, note)


def _vision_slack(backend: str, constants: Constants) -> float:
    return (
        calibration.TRANSFORMERS_VISION_SLACK if backend == TRANSFORMERS else constants.vision_slack
    ).value


def _text_slack(backend: str, constants: Constants) -> float:
    return (calibration.TRANSFORMERS_TEXT_SLACK if backend == TRANSFORMERS else constants.text_slack).value


def _kept(vision: VisionConfig, backend: str, settings: Settings) -> int:
    """What stays of pictures: features of all that a pass can reach; in transformers of all requests', and
    pixels.
    """
    if backend == NATIVE:
        reached = costs.rows_reached(settings.chunk, settings.image_tokens)
        # No more than all contexts hold: a picture that fills most of one has no second beside it.
        return costs.feature_bytes(vision, min(reached, settings.sequences * settings.context))
    features = costs.feature_bytes(vision, settings.image_tokens)
    return settings.sequences * (features + _pixels(vision, settings.image_tokens))


def _pixels(vision: VisionConfig, image_tokens: int) -> int:
    """Patches in float32, as transformers' processor makes them; generating keeps them to the end."""
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return image_tokens * vision.spatial_merge_size**2 * values * SINGLE


def _and_pixels(backend: str) -> str:
    return " and pixels" if backend == TRANSFORMERS else ""


def _text_note(settings: Settings) -> str:
    return f"{settings.chunk} tokens a pass at a context of {settings.context}, and logits"


def _text_peak(model: Model, backend: str, settings: Settings, means: Means, table: Table) -> int:
    chunk, context, sequences = settings.chunk, settings.context, settings.sequences
    if backend == NATIVE:
        # Where steps are not recorded a pass with guesses is one of these, and else it runs once before.
        guess_rows = graphs.GUESS_ROWS if settings.speculate else 0
        return costs.text_peak(
            model, chunk, context, sequences, means=means, table=table, guess_rows=guess_rows
        )
    # The prompts of all requests at once, padded to the longest.
    return costs.text_peak(model, chunk * sequences, context, sequences, native=False)


def _vision_peak(model: Model, vision: VisionConfig, backend: str, settings: Settings, means: Means) -> int:
    if backend == TRANSFORMERS:
        # The pictures of all requests in one call.
        tokens = settings.image_tokens * settings.sequences
        return round(tokens * calibration.TRANSFORMERS_VISION_PER_TOKEN.value)
    return costs.vision_peak(vision, settings.image_tokens, narrow=model.tower_is_narrow, means=means)
