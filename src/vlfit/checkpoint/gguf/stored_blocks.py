"""How a tensor's numbers lie in the blocks of a GGUF file, and which of today's formats holds them exactly.

A block is a run of 32 or 256 neighbours in a row with scales of its own. Where its weights are integers
times a scale, with or without a minimum, the tensor becomes codes and scales that lose nothing; the few types
of other kinds (``IQ2_XS``) are held in 16 bits.
``loading/block_tensors.py`` does the work.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import gcd


class BlockPart(Enum):
    """What of its blocks a tensor is: all weights, dequantized; integer codes; scales; super scales."""

    WEIGHTS = auto()
    CODES = auto()
    SCALES = auto()
    SUPER_SCALES = auto()


class NumberChange(Enum):
    """What llama.cpp does to a tensor's numbers: 1 more (norms of weights around 0), or -exp (decay)."""

    PLUS_ONE = auto()
    MINUS_EXP = auto()


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Heads of a tensor [rows, columns] in another order than the checkpoint's.

    From ``start`` on along ``axis`` (0: rows, 1: columns) the checkpoint has ``groups`` groups of ``repeats``
    heads, each of ``width`` rows or columns; in the file the first heads of all groups come first.
    """

    axis: int
    start: int
    groups: int
    repeats: int
    width: int


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """The blocks that a tensor is made of.

    - ``type``: name in ``gguf.GGMLQuantizationType``; a block of ``F32``, ``F16`` and ``BF16`` is one number.
    - ``shape``: outputs and inputs in the file, in weights.
    - ``rope_heads``: number of heads whose rows llama.cpp reordered for its rotary embedding (q and k of
      ``llama`` files): rows 0, n/2, 1, n/2 + 1, ... of each head of n; 0: rows are in order.
    - ``order``: heads in another order; None: as they are. ``change``: what was done to the numbers.
    - ``second_half``: start in the file of a tensor of the same size that is interleaved with this one on a
      new third-last dimension: the two frames of a patch embedding; None: there is none.
    - ``rows_after``: starts in the file of tensors of ``shape`` and ``type`` whose rows follow (q, k and v
      as one matrix); (): there are none.
    """

    type: str
    part: BlockPart
    shape: tuple[int, ...]
    rope_heads: int = 0
    order: HeadOrder | None = None
    change: NumberChange | None = None
    second_half: int | None = None
    rows_after: tuple[int, ...] = ()

    @property
    def pieces(self) -> int:
        """How many tensors of the file hold this one: several if it was split, or if parts were joined."""
        return 1 + len(self.rows_after) + (self.second_half is not None)

    @property
    def are_multiplied(self) -> bool:
        """Whether a CPU multiplies a matrix from these blocks as they lie in the file, rows in any order.

        False if columns are in another order, numbers were changed, or the type is another.
        """
        columns = self.order is not None and self.order.axis == 1
        changed = columns or self.change is not None or self.second_half is not None
        return len(self.shape) == 2 and self.type in MULTIPLIED_AS_STORED and not changed


@dataclass(frozen=True, slots=True)
class ExactForm:
    """Integer codes of ``bits`` with a scale for each ``group`` of inputs.

    ``scale_dtype`` (as safetensors spells it): ``F16`` and ``BF16`` are scales of one level, for codes around
    0 (-8 to 7 in 4 bits). Otherwise scales have two levels, with a super scale for each ``super_group`` of
    inputs (``kernels/gemm/quantized.py``, ``QuantizedWeight``): ``I8`` without minima, ``I16`` with, and then
    codes are not negative. ``codebook``: codes are indices into that of ``CODEBOOKS``.
    """

    bits: int
    group: int
    scale_dtype: str
    super_group: int | None = None
    codebook: str | None = None

    @property
    def super_scale_dtype(self) -> str:
        """Dtype of the super scales: a float16, or with minima two in 32 bits."""
        return "I32" if self.scale_dtype == "I16" else "F16"


# MXFP4's scales are powers of two and NVFP4's floats of 8 bits, which bfloat16 and float16 hold exactly.
EXACT_FORMS: Mapping[str, ExactForm] = {
    "Q4_0": ExactForm(4, 32, "F16"),
    "Q4_1": ExactForm(4, 32, "I16", 32),
    "Q5_0": ExactForm(5, 32, "F16"),
    "Q5_1": ExactForm(5, 32, "I16", 32),
    "Q8_0": ExactForm(8, 32, "F16"),
    "Q2_K": ExactForm(4, 16, "I16", 256),
    "Q3_K": ExactForm(4, 16, "I8", 256),
    "Q4_K": ExactForm(4, 32, "I16", 256),
    "Q5_K": ExactForm(5, 32, "I16", 256),
    "Q6_K": ExactForm(6, 16, "I8", 256),
    "IQ3_S": ExactForm(4, 32, "I8", 256, "odd"),
    "IQ4_NL": ExactForm(4, 32, "F16", None, "iq4nl"),
    "IQ4_XS": ExactForm(4, 32, "I8", 256, "iq4nl"),
    "MXFP4": ExactForm(4, 32, "BF16", None, "e2m1"),
    "NVFP4": ExactForm(4, 16, "F16", None, "e2m1"),
}
PLAIN_TYPES = ("F32", "F16", "BF16")  # also safetensors' names
# Types that a CPU multiplies from the blocks of the file (``kernels/cpu/blocks.c``).
MULTIPLIED_AS_STORED = frozenset((*EXACT_FORMS, "F16", "BF16")) - {"IQ3_S"}
# Every other type that the ``gguf`` package dequantizes; ggml has more that no file of weights uses.
DEQUANTIZED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
# What other types become: every one is dequantized in float32 and then rounded once to what computes.
DEQUANTIZED_DTYPE = "F16"


def exact_form(block_type: str, order: HeadOrder | None = None) -> ExactForm | None:
    """The form that holds ``block_type`` exactly; None: it is dequantized to 16 bits.

    ``order``: of heads that are put back; columns move in whole groups, and super scales are for as many
    inputs as move together.
    """
    form = EXACT_FORMS.get(block_type)
    if form is not None and order is not None and order.axis == 1:
        if order.width % form.group:
            return None
        if form.super_group is not None:
            form = replace(form, super_group=gcd(form.super_group, order.width))
    return form
