"""The ledger of any model under transformers, whatever its architecture.

Weights are exact, by headers, and so is the KV cache where the config is that of a plain transformer. The
memory of a pass is estimated here and measured once the model is loaded
(``backends/transformers/generate_engine.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlfit.checkpoint.any_model import PARTS, AnyCheckpoint
from vlfit.checkpoint.source import read_checkpoint
from vlfit.errors import DoesNotFit, VlfitError
from vlfit.machine.model import Gpu, Host
from vlfit.plan.calibration import EXACT, MEASURED, MODELLED
from vlfit.plan.ledger import DEFAULT_CONTEXT, Line, PlanSettings, desktop_line, held_by_others, reserve_line
from vlfit.plan.shapes import FROM_HEADERS, HALF, SINGLE, Model, model_of
from vlfit.plan.transformers.lines import TEXT_SLACK, VISION_PER_TOKEN, VISION_SLACK
from vlfit.plan.transformers.lines import cuda_context as cuda_context
from vlfit.plan.transformers.lines import transformers_lines as known_lines
from vlfit.units import MIB, format_bytes

# Keys of the text model's config.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_FULL, _WINDOWED = ("full_attention", "attention"), ("sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class TextShape:
    """Sizes of a text model, from its config.

    - ``full``, ``windowed``, ``others``: numbers of layers: with keys and values of all tokens; of the last
      ``window`` tokens; with a state that does not grow, or something unknown, which is not counted.
    - ``hidden``, ``intermediate``, ``vocabulary``: widths of the residual, the feed-forward and the logits; a
      ``vocabulary`` of 0 is unknown.
    - ``positions``: the longest context in tokens; None: unknown.
    """

    full: int
    windowed: int
    others: int
    window: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    positions: int | None

    def kv_bytes(self, tokens: int, value_bytes: int) -> int:
        """Bytes of the KV cache of one request of ``tokens``, without what ``others`` keep."""
        each = 2 * self.kv_heads * self.head_dim * value_bytes
        return each * (self.full * tokens + self.windowed * min(tokens, self.window))


def parse_text_shape(config: Mapping[str, Any]) -> TextShape | None:
    """The text model's sizes, from the contents of ``config.json`` or a transformers config as a dict.

    None if the number of layers, the hidden size or the number of heads is missing. Other missing sizes get
    their usual values. Layers with compressed keys and values (``kv_lora_rank``) count as ``others``.
    """
    text = text_config(config)
    layers, hidden, heads = (
        _count(text, *names)
        for names in (
            ("num_hidden_layers", "n_layer", "num_layers"),
            ("hidden_size", "n_embd", "d_model"),
            ("num_attention_heads", "n_head"),
        )
    )
    if layers is None or hidden is None or heads is None:
        return None
    compressed = _count(text, "kv_lora_rank") is not None  # keys and values are compressed
    kinds = text.get("layer_types")
    kinds = kinds if isinstance(kinds, list) and len(kinds) == layers else ["full_attention"] * layers
    full, windowed = (sum(kind in names for kind in kinds) for names in (_FULL, _WINDOWED))
    window = _count(text, "sliding_window", "attention_chunk_size")
    if window is None:
        full, windowed = full + windowed, 0
    return TextShape(
        full=0 if compressed else full,
        windowed=0 if compressed else windowed,
        others=layers if compressed else layers - full - windowed,
        window=window or 0,
        kv_heads=_count(text, "num_key_value_heads", "num_kv_heads") or heads,
        head_dim=_count(text, "head_dim") or hidden // heads,
        hidden=hidden,
        intermediate=_count(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden,
        vocabulary=_count(text, "vocab_size") or _count(config, "vocab_size") or 0,
        positions=_count(text, "max_position_embeddings", "n_positions"),
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a config, found recursively; the whole config if it has none."""
    for name in _TEXT_CONFIGS:
        part = config.get(name)
        if isinstance(part, Mapping):
            return text_config(part)
    return config


def _count(config: Mapping[str, Any], *names: str) -> int | None:
    """The value of the first of ``names`` that is a positive integer."""
    values = (config.get(name) for name in names)
    return next((each for each in values if type(each) is int and each > 0), None)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the user or the backend chose for a run.

    - ``context``: most tokens of a request. ``image_tokens``: most tokens of a picture.
    - ``value_bytes``: of the dtype in which weights are loaded: 2 or 4.
    - ``offload``: bytes of weights to keep in RAM; ``auto``: as few as make it fit; None: none.
    - ``known``: the model, if vlfit knows the architecture (``known_model``): workspaces are less of a guess.
    """

    context: int
    image_tokens: int
    value_bytes: int
    offload: int | str | None = None
    known: Model | None = None


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """The ledger of a model on a device.

    ``weights``: bytes of all weights, of which ``weights_on_device`` are on the device; the rest is offloaded
    to RAM.
    """

    lines: tuple[Line, ...]
    weights: int
    weights_on_device: int

    @property
    def total(self) -> int:
        """Bytes of all lines of the ledger."""
        return sum(line.bytes for line in self.lines)


def known_model(folder: Path) -> Model | None:
    """The checkpoint in ``folder`` as a ``Model``; None if vlfit cannot read it or not this architecture."""
    try:
        found = read_checkpoint(folder.name, folder)
        return model_of(found.name, found.config, found.tensors, FROM_HEADERS)
    except VlfitError:
        return None


def choose_context(shape: TextShape | None, max_model_len: int | None) -> int:
    """The context in tokens: ``max_model_len``, or if None the model's, but at most ``DEFAULT_CONTEXT``.

    Raises ``DoesNotFit`` if ``max_model_len`` is more than ``shape.positions``. ``shape``: None if unknown,
    and nothing is checked.
    """
    most = shape.positions if shape is not None else None
    if max_model_len is None:
        return min(most or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if most is not None and max_model_len > most:
        raise DoesNotFit(
            f"a context of {max_model_len:,} tokens was asked for; the model knows {most:,} positions",
            f"Use --context {most} or less.",
        )
    return max_model_len


def lines_on_gpu(
    checkpoint: AnyCheckpoint, shape: TextShape | None, gpu: Gpu, options: RunOptions
) -> tuple[Line, ...]:
    """The ledger on ``gpu`` with all weights on it: ``options.offload`` is ignored. It may not fit.

    ``shape``: None if unknown: the KV cache is not counted then.
    """
    parts = checkpoint.bytes_by_ledger_line(options.value_bytes)
    weights = sum(parts.values())
    return _in_order(
        _lines_beside_weights(shape, gpu, options), _weights(parts, weights, weights, options.value_bytes)
    )


def fit_on_gpu(
    checkpoint: AnyCheckpoint, shape: TextShape | None, gpu: Gpu, host: Host, options: RunOptions
) -> DeviceFit:
    """The ledger on ``gpu`` (as it is before loading), with ``options.offload`` applied.

    ``shape``: None if unknown: the KV cache is not counted then. Raises ``DoesNotFit``:

    - without offload, if weights, KV cache, CUDA and reserve do not fit; workspaces are guessed and may not;
    - with ``auto``, if all other lines, workspaces included, leave no memory for weights;
    - if the offloaded weights do not fit the RAM.

    With bytes to offload, whether the rest fits is not checked.
    """
    parts = checkpoint.bytes_by_ledger_line(options.value_bytes)
    weights = sum(parts.values())
    around = _lines_beside_weights(shape, gpu, options)
    certain = sum(line.bytes for line in around if line.how != MODELLED or line.line == "reserve")
    if options.offload is None:
        short = certain + weights - gpu.total
        if short > 0:
            raise _too_large(checkpoint, gpu, weights, certain, short)
        here = weights
    elif options.offload == "auto":
        here = min(weights, gpu.total - sum(line.bytes for line in around))
    else:
        here = weights - int(options.offload)
    if here <= 0:
        raise DoesNotFit(
            f"beside the weights {format_bytes(sum(line.bytes for line in around))} are needed, of "
            f"{format_bytes(gpu.total)} on {gpu.name}: nothing is left for any layer",
            "Lower --context or --image-tokens, or use --device cpu.",
        )
    _check_ram(weights - here, host)
    return DeviceFit(_in_order(around, _weights(parts, weights, here, options.value_bytes)), weights, here)


def fit_in_ram(
    checkpoint: AnyCheckpoint, shape: TextShape | None, host: Host, options: RunOptions
) -> DeviceFit:
    """The ledger on a CPU: weights and KV cache, no workspaces.

    Raises ``DoesNotFit`` if less RAM is available. ``shape``: None if unknown: the KV cache is not counted
    then. ``options.offload`` is ignored.
    """
    parts = checkpoint.bytes_by_ledger_line(options.value_bytes)
    weights = sum(parts.values())
    lines = (*_weights(parts, weights, weights, options.value_bytes), _kv_cache(shape, options))
    total = sum(line.bytes for line in lines)
    if total > host.ram_available:
        raise DoesNotFit(
            f"{checkpoint.name} takes {format_bytes(weights)} of weights and "
            f"{format_bytes(total - weights)} of KV cache; {format_bytes(host.ram_available)} of RAM are "
            f"free, {format_bytes(total - host.ram_available)} too few",
            "Use --dtype bfloat16 or a smaller --context, or close programs.",
        )
    return DeviceFit(lines, weights, weights)


def with_measured_bytes(
    lines: tuple[Line, ...], held: Mapping[str, int], peak: int, note: str
) -> tuple[Line, ...]:
    """``lines`` with estimates replaced by what was measured after loading and a worst-case request.

    ``held``: bytes of weights by name of the ledger line. ``peak``: peak bytes beside weights and KV cache:
    ``text_workspace`` gets them, with ``note``; ``vision_workspace`` gets 0, as torch has one pool for both.
    Other lines are kept.
    """
    updated = []
    for line in lines:
        if line.line in held:
            updated.append(
                replace(line, bytes=held[line.line], how=MEASURED, note=f"{line.note}, as it is held")
            )
        elif line.line == "vision_workspace":
            updated.append(replace(line, bytes=0, how=MEASURED, note="in text_workspace: one pool has both"))
        elif line.line == "text_workspace":
            updated.append(replace(line, bytes=peak, how=MEASURED, note=note))
        else:
            updated.append(line)
    return tuple(updated)


def _in_order(around: tuple[Line, ...], weights: tuple[Line, ...]) -> tuple[Line, ...]:
    """Lines in the order in which memory is taken: context, weights, KV cache, workspaces, reserve."""
    first = tuple(line for line in around if line.line in ("desktop", "context"))
    return (*first, *weights, *(line for line in around if line not in first))


def _lines_beside_weights(shape: TextShape | None, gpu: Gpu, options: RunOptions) -> tuple[Line, ...]:
    """All lines but the weights."""
    context = cuda_context(gpu)
    vision = round(VISION_SLACK.value * options.image_tokens * VISION_PER_TOKEN.value)
    text = _text_workspace(shape, options)
    around = (
        desktop_line(gpu),
        Line("context", context.bytes, context.how, f"CUDA and its libraries: {context.source}"),
        _kv_cache(shape, options),
        # Tower and text model never run at once, so only the larger counts.
        Line(
            "vision_workspace",
            vision if vision > text else 0,
            MODELLED,
            f"a guess: {options.image_tokens} image tokens as Qwen3-VL 2B's tower takes them",
        ),
        Line("text_workspace", 0 if vision > text else text, MODELLED, "a guess, until a request has run"),
        reserve_line(),
    )
    passes = {line.line: line for line in _known_passes(gpu, options)}
    return tuple(passes.get(line.line, line) for line in around)


def _known_passes(gpu: Gpu, options: RunOptions) -> tuple[Line, ...]:
    """Workspaces of a known model as a plan has them; none for other models or float32."""
    if options.known is None or options.value_bytes != HALF:
        return ()
    settings = PlanSettings(options.known.weights, options.context, options.image_tokens, 1, options.context)
    every = known_lines(options.known, gpu, settings)
    return tuple(line for line in every if line.line in ("vision_workspace", "text_workspace"))


def _text_workspace(shape: TextShape | None, options: RunOptions) -> int:
    """A prompt as long as the context in one pass, and one row of logits in float32.

    For each token the row in a float32 norm, or the feed-forward's three intermediate rows.
    """
    if shape is None:
        return 0
    norms = (2 * SINGLE + options.value_bytes) * shape.hidden
    inner = options.value_bytes * (2 * shape.hidden + 3 * shape.intermediate)
    logits = shape.vocabulary * (options.value_bytes + 2 * SINGLE)
    return round(TEXT_SLACK.value * (options.context * max(norms, inner) + logits))


def _kv_cache(shape: TextShape | None, options: RunOptions) -> Line:
    if shape is None or not shape.full + shape.windowed:
        return Line("kv_cache", 0, MODELLED, "unknown: its config does not say what a token keeps")
    size = shape.kv_bytes(options.context, options.value_bytes)
    layers = f"{options.context} tokens in {shape.full} layers"
    if shape.windowed:
        layers += f", {min(options.context, shape.window)} in {shape.windowed} more"
    if shape.others:
        return Line("kv_cache", size, MODELLED, f"{layers}; what {shape.others} others keep is not counted")
    return Line("kv_cache", size, EXACT, layers)


def _weights(parts: Mapping[str, int], weights: int, here: int, value_bytes: int) -> tuple[Line, ...]:
    """Where some are in RAM, each part has its share: which layers these are is decided at loading."""
    note = f"read from headers, values of {value_bytes} bytes"
    if here == weights:
        return tuple(Line(part, parts[part], EXACT, note) for part in PARTS)
    note += f"; {format_bytes(weights - here)} of all wait in RAM"
    return tuple(Line(part, parts[part] * here // weights, MODELLED, note) for part in PARTS)


def _too_large(checkpoint: AnyCheckpoint, gpu: Gpu, weights: int, certain: int, short: int) -> DoesNotFit:
    free = gpu.total - held_by_others(gpu)
    needed = weights + certain - held_by_others(gpu)
    return DoesNotFit(
        f"{checkpoint.name} needs {needed / MIB:,.0f} MiB of {gpu.name}, {weights / MIB:,.0f} of them "
        f"weights; {free / MIB:,.0f} MiB are free, {short / MIB:,.0f} too few",
        "Let layers wait in RAM, which is slow (--offload auto); use a smaller --context or model; or close "
        "programs that hold the GPU (vlfit machine names them).",
    )


def _check_ram(waiting: int, host: Host) -> None:
    if waiting > host.ram_available:
        raise DoesNotFit(
            f"{format_bytes(waiting)} of weights would wait in RAM, of which "
            f"{format_bytes(host.ram_available)} are free",
            "Use a smaller model, or close programs.",
        )
