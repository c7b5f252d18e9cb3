"""What `vlfit convert` can make of a config, before anything is made: forms, options, names.

Ordered from the mildest rounding.
"""

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

GROUP_SIZE = 32  # what `vlfit convert --weights int4` takes when it is not told another
COARSER_GROUP_SIZES = (64, 128)
FP8_BLOCK = 128  # of the official FP8 checkpoints, rows and columns
VISION_MODULE = "model.visual"
# How parts go by in config.json. To vLLM the output head is no linear layer: it goes by its name.
TABLE_TARGET = r"re:.*embed_tokens$"
HEAD_TARGET = r"re:.*lm_head$"
TOWER_TARGET = r"re:.*visual\..*(attn\.qkv|attn\.proj|linear_fc1|linear_fc2)$"
EIGHT_BITS = WeightScheme(8, None)  # a scale for each row


@dataclass(frozen=True, slots=True)
class Rounding:
    """What is rounded beyond the text layers, and how far.

    ``table``: the table of tokens in int8, and an output head of its own with it. ``tower``: the linear
    layers of the vision tower in int8. ``group_size``: how many weights share a scale in int4.
    ``coarse_head``: the head in int4.
    """

    table: bool = False
    tower: bool = False
    group_size: int = GROUP_SIZE
    coarse_head: bool = False

    @property
    def ending(self) -> str:
        """For the name of what is made: ``-E8-V8-G64``; "" for the defaults."""
        parts = [
            "-E8" if self.table else "",
            "-V8" if self.tower else "",
            f"-G{self.group_size}" if self.group_size != GROUP_SIZE else "",
            "-H4" if self.coarse_head else "",
        ]
        return "".join(parts)

    def options(self, *, tied: bool) -> str:
        """What ``vlfit convert`` is told for it; ``tied``: the head has no weights of its own."""
        words = ["--embedding int8"] if self.table else []
        if self.coarse_head or (self.table and not tied):
            words.append(f"--head {'int4' if self.coarse_head else 'int8'}")
        if self.tower:
            words.append("--vision int8")
        if self.group_size != GROUP_SIZE:
            words.append(f"--group-size {self.group_size}")
        return " ".join(words)


PLAIN = Rounding()


def roundings(config: ModelConfig, weights: str) -> Iterator[Rounding]:
    """What saves more bytes than ``weights`` alone, the mildest first, each on top of the one before.

    Only what this config can have: larger groups must divide every layer, and a tied head is the embedding.
    """
    if weights not in (FP8, INT4):
        return
    further = Rounding(table=True)
    yield further
    if config.vision is not None:
        further = replace(further, tower=True)
        yield further
    if weights == FP8:
        return
    for size in COARSER_GROUP_SIZES:
        if divides(config, size):
            further = replace(further, group_size=size)
            yield further
    if not config.tie_word_embeddings:
        yield replace(further, coarse_head=True)


def divides(config: ModelConfig, group_size: int) -> bool:
    """Whether every text layer's inputs are in whole groups; int4 has no partial ones."""
    text = config.text
    widths = (text.hidden_size, text.intermediate_size, text.num_attention_heads * text.head_dim)
    return not any(width % group_size for width in widths)


def in_format(config: ModelConfig, weights: str, rounding: Rounding = PLAIN) -> ModelConfig:
    """``config`` with the text layers in ``weights``: bf16, or as ``vlfit convert`` writes fp8 and int4."""
    return replace(config, quantization=_quantization(config, weights, rounding))


def _quantization(config: ModelConfig, weights: str, rounding: Rounding) -> Quantization | None:
    if weights not in (FP8, INT4):
        return None
    if weights == FP8 and rounding == PLAIN:
        return Fp8Format(FP8_BLOCK, FP8_BLOCK, (VISION_MODULE,))
    text = WeightScheme(4, rounding.group_size)
    if weights == FP8:
        text = WeightScheme(8, FP8_BLOCK, kind=FLOAT_FORMAT, block_rows=FP8_BLOCK)
    own_head = not config.tie_word_embeddings
    targets = [TABLE_TARGET] if rounding.table else []
    targets += [HEAD_TARGET] if own_head and rounding.table and not rounding.coarse_head else []
    targets += [TOWER_TARGET] if rounding.tower else []
    kept = [] if rounding.tower else [r"re:model\.visual\."]
    kept += [] if own_head and (rounding.table or rounding.coarse_head) else ["lm_head"]
    schemes = (text, replace(EIGHT_BITS, targets=tuple(targets))) if targets else (text,)
    return CompressedFormat(schemes, tuple(kept))
