"""What ``vlfit convert`` can make of a config: formats, options, names. Used to plan before converting."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.quantization import (
    FLOAT_FORMAT,
    FP8,
    INT4,
    CompressedFormat,
    Fp8Format,
    Quantization,
    WeightScheme,
)
from vlfit.models.registry import spec_of

GROUP_SIZE = 32  # default of ``vlfit convert --weights int4``
COARSER_GROUP_SIZES = (64, 128)
FP8_BLOCK = 128  # rows and columns, as in official FP8 checkpoints
# Targets in config.json. To vLLM the output head is not a linear layer: it has to be named.
EMBEDDING_TARGET = r"re:.*embed_tokens$"
HEAD_TARGET = r"re:.*lm_head$"
INT8_PER_ROW = WeightScheme(8, None)  # a scale for each row


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """Options of ``vlfit convert`` beside ``--weights``.

    ``int8_embedding``: the embedding in int8, and the output head too unless ``int4_head`` says otherwise.
    ``int8_vision``: the linear layers of the vision tower in int8. ``group_size``: consecutive inputs that
    share a scale in int4. ``int4_head``: the output head in int4.
    """

    int8_embedding: bool = False
    int8_vision: bool = False
    group_size: int = GROUP_SIZE
    int4_head: bool = False

    @property
    def name_suffix(self) -> str:
        """Suffix of the converted checkpoint's name: ``-E8-V8-G64``; "" for the defaults."""
        parts = [
            "-E8" if self.int8_embedding else "",
            "-V8" if self.int8_vision else "",
            f"-G{self.group_size}" if self.group_size != GROUP_SIZE else "",
            "-H4" if self.int4_head else "",
        ]
        return "".join(parts)

    def cli_options(self, *, tied: bool) -> str:
        """These options as flags of ``vlfit convert``; "" for the defaults.

        ``tied``: the output head shares the embedding's weights, so ``--head`` is not needed for int8.
        """
        words = ["--embedding int8"] if self.int8_embedding else []
        if self.int4_head or (self.int8_embedding and not tied):
            words.append(f"--head {'int4' if self.int4_head else 'int8'}")
        if self.int8_vision:
            words.append("--vision int8")
        if self.group_size != GROUP_SIZE:
            words.append(f"--group-size {self.group_size}")
        return " ".join(words)


DEFAULT_OPTIONS = FormatOptions()


def size_saving_options(config: ModelConfig, weights: str) -> Iterator[FormatOptions]:
    """Options that make a smaller checkpoint than ``vlfit convert --weights`` with default options.

    Each includes all options of the previous one, so exactness and bytes decrease. Options that ``config``
    does not permit are left out: groups must divide every layer, a tied head has no format of its own, a
    text-only model has no vision tower. Yields nothing if ``weights`` is neither fp8 nor int4.
    """
    if weights not in (FP8, INT4):
        return
    options = FormatOptions(int8_embedding=True)
    yield options
    if config.vision is not None:
        options = replace(options, int8_vision=True)
        yield options
    if weights == FP8:
        return
    for size in COARSER_GROUP_SIZES:
        if group_size_divides(config, size):
            options = replace(options, group_size=size)
            yield options
    if not config.tie_word_embeddings:
        yield replace(options, int4_head=True)


def group_size_divides(config: ModelConfig, group_size: int) -> bool:
    """Whether ``group_size`` divides the inputs of all linear layers of the text model, as int4 requires."""
    text = config.text
    widths = (text.hidden_size, text.intermediate_size, text.num_attention_heads * text.head_dim)
    return not any(width % group_size for width in widths)


def with_weights_format(
    config: ModelConfig, weights: str, options: FormatOptions = DEFAULT_OPTIONS
) -> ModelConfig:
    """``config`` with the quantization that ``vlfit convert --weights WEIGHTS`` writes for it.

    ``weights``: fp8 or int4; for any other, such as bf16, the result has no quantization and ``options`` are
    ignored.
    """
    return replace(config, quantization=_quantization_of(config, weights, options))


def _quantization_of(config: ModelConfig, weights: str, options: FormatOptions) -> Quantization | None:
    if weights not in (FP8, INT4):
        return None
    spec = spec_of(config.model_type)
    vision = spec.vision_modules if config.vision is not None else None
    kept = [ending.removeprefix(".").removesuffix(".weight") for ending in spec.unquantized]
    if weights == FP8 and options == DEFAULT_OPTIONS:
        return Fp8Format(FP8_BLOCK, FP8_BLOCK, (*((vision.root,) if vision else ()), *kept))
    text = WeightScheme(4, options.group_size)
    if weights == FP8:
        text = WeightScheme(8, FP8_BLOCK, kind=FLOAT_FORMAT, block_rows=FP8_BLOCK)
    own_head = not config.tie_word_embeddings
    targets = [EMBEDDING_TARGET] if options.int8_embedding else []
    targets += [HEAD_TARGET] if own_head and options.int8_embedding and not options.int4_head else []
    targets += [vision.quantized] if vision and options.int8_vision else []
    ignored = [rf"re:{re.escape(vision.root)}\."] if vision and not options.int8_vision else []
    ignored += [rf"re:.*\.{re.escape(name)}$" for name in kept]
    ignored += [] if own_head and (options.int8_embedding or options.int4_head) else ["lm_head"]
    schemes = (text, replace(INT8_PER_ROW, targets=tuple(targets))) if targets else (text,)
    return CompressedFormat(schemes, tuple(ignored))
