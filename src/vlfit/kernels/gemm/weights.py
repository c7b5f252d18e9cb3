"""Weights in FP8 or in 4 to 8 bits as kernels take them: their tensors, and what a kernel is compiled for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.checkpoint.quantization import FP8, INT8, PACKED_BITS
from vlfit.kernels.launch import KernelConstant

MAX_SPAN = 128  # inputs summed before their scale is applied, at most
# What codes of 4 bits are looked up as, in two tables of signed bytes (``row_integers.py``): times a sign and
# plus an offset, with which those of codes below 8 are not negative and all others are.
LOOKUP_SIGN = {"iq4nl": -1, "e2m1": 1}
LOOKUP_OFFSET = -1


_FORMATS = {torch.float8_e4m3fn: FP8, torch.int8: INT8}


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight matrix [out_features, in_features] in 4, 5, 6 or 8 bits.

    ``codes``: [out_features, in_features] float8_e4m3fn or int8 (in_features a multiple of 4), or int32, of
    ``bits``: in 4 [out_features, in_features / 8], eight codes to a word, the first in its lowest bits; in 5
    and 6 see ``layers/linear.py``, ``pack_codes``. ``scale`` [ceil(out_features / block_shape[0]),
    ceil(in_features / block_shape[1])]. ``zero_point`` [ceil(out_features / 8), groups] int32, packed like
    the codes, for int4 only; None: the middle code (8 of 16) for int4, int5 and int6, no zero points for the
    other formats. ``block_shape``: outputs and inputs that share a scale. ``codebook``: the codes are indices
    into that of ``checkpoint.quantization.CODEBOOKS`` (int4 only); there are no zero points then.

    With ``super_scale`` scales have two levels, as in GGUF's K-quants: a weight is code * (sub-scale * d), or
    minus sub-minimum * dmin if affine, with float16 d and dmin for each 256 inputs or so. ``block_shape`` is
    (1, group), and

    - symmetric: ``scale`` int8, the sub-scales; ``super_scale`` [out_features, in_features / super-block]
      float16, the d.
    - affine: ``scale`` int16, sub-scale (low byte) and sub-minimum (high byte), both unsigned;
      ``super_scale`` int32, d (low half) and dmin (high half). Packed codes have no zero point.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    block_shape: tuple[int, int]
    super_scale: Tensor | None = None
    bits: int = 4
    codebook: str | None = None

    @property
    def is_affine(self) -> bool:
        """Whether a minimum is subtracted from each weight."""
        return self.super_scale is not None and self.scale.dtype == torch.int16

    @property
    def format(self) -> str:
        """Format of the codes: ``fp8``, ``int8``, ``int4``, ``int5`` or ``int6``."""
        return _FORMATS.get(self.codes.dtype) or PACKED_BITS[self.bits]

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        if self.codes.dtype != torch.int32:
            return self.codes.shape[1]
        return self.codes.shape[1] * 8 if self.bits == 4 else self.scale.shape[1] * self.block_shape[1]

    @property
    def span(self) -> int:
        """Number of inputs summed before their common scale is applied: a power of two up to ``MAX_SPAN``."""
        width = self.block_shape[1]
        if width >= self.in_features:
            return MAX_SPAN  # one scale per row
        return min(width & -width, MAX_SPAN)


@dataclass(frozen=True, slots=True)
class WeightForm(KernelConstant):
    """What a kernel is compiled for of its weights.

    - ``format``, ``bits`` (8 for FP8), ``codebook`` ("": none), ``has_zeros``, ``affine``, ``two_level``: of
      a ``QuantizedWeight``. ``native_fp8``: FP8 is converted in hardware.
    - ``scale_n``, ``scale_k``: outputs and inputs that share a scale. ``super_k``: inputs of a super scale, 0
      without. ``span``: inputs that are summed before a scale.
    - ``scales_in_words``: rows of scales of 8 bits are whole words.
    """

    format: str
    bits: int
    codebook: str
    native_fp8: bool
    has_zeros: bool
    affine: bool
    two_level: bool
    scale_n: int
    scale_k: int
    super_k: int
    span: int
    scales_in_words: bool


def weight_form(weights: QuantizedWeight, native_fp8: bool) -> WeightForm:
    """The form of ``weights``; ``native_fp8``: FP8 is converted in hardware."""
    scale, supers = weights.scale, weights.super_scale
    return WeightForm(
        format=weights.format,
        bits=8 if weights.codes.dtype != torch.int32 else weights.bits,
        codebook=weights.codebook or "",
        native_fp8=native_fp8 and weights.format == FP8,
        has_zeros=weights.zero_point is not None,
        affine=weights.is_affine,
        two_level=supers is not None,
        scale_n=weights.block_shape[0],
        scale_k=weights.block_shape[1],
        super_k=0 if supers is None else weights.in_features // supers.shape[1],
        span=weights.span,
        scales_in_words=scale.dtype == torch.int8 and scale.shape[1] % 4 == 0,
    )


def kernel_tensors(weights: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points as kernels take them; codes stand in for missing zero points."""
    codes = weights.codes
    if codes.dtype != torch.int32:
        codes = codes.view(torch.uint8 if codes.dtype == torch.float8_e4m3fn else torch.int32)
    zeros = weights.zero_point if weights.super_scale is None else weights.super_scale
    return codes, weights.scale, codes if zeros is None else zeros
