"""Tolerances of every comparison, derived from the arithmetic before anything is measured.

Differences are relative, row by row: ``rms(e - r) / rms(r)`` (the row as a whole) and, for single wrong
elements, ``max |e - r| / (rms(r) + |r|)``. The reference is float32 itself, with unit roundoff ``2**-24``.

One step (a layer from the engine's own input) in an engine that computes in a dtype of unit roundoff u:

    step = SAFETY * GROWTH * (sqrt(ROUNDINGS * u**2 + PRODUCTS * (p**2 + w**2)) + sqrt(n) * 2**-24)

``u``: 2**-24 in float32, 2**-11 in float16, 2**-8 in bfloat16: the largest relative error of a rounding. A
step stores about ROUNDINGS = 12 intermediate results (norm, q, k, v, their norm and rotation, scores, output,
projection; norm, gate, up, product, projection), whose errors are independent and so add as squares. Sums of
n products are accumulated in float32 by both sides: a random walk of n roundings, sqrt(n) * 2**-24. GROWTH =
4: a sum whose terms cancel has a larger relative error than its terms, by the ratio of the sum of magnitudes
to the magnitude of the sum; within a softmax errors of a score s count |s| times. SAFETY = 3 in the mean of a
row (it is a mean of many, so its spread is small), 12 for the worst element of all (4 standard deviations
more).

Products: a layer has PRODUCTS = 4 with weights. Compiled code of a CPU rounds their inputs, by p: relative to
the root mean square of those that share a step (``StoredWeight.input_roundoff``); everywhere else p = 0.

Weights: what the files hold is exact in float32, and dequantizing costs one rounding, part of the sum above.
Where the engine keeps weights in a narrower form than the file's (float16 for widened 4 and 8 bits, on a CPU
without compiled products) each is off by w = 2**-11 of itself at most, float16's unit roundoff, independently
of the others; else w = 0. So a product's terms are off by w of themselves, as they are by p of its inputs: w
stands beside p. A state that every token changes (a gated delta net) carries the roundings of all T tokens
before: n grows by ROUNDINGS * T. Activations in FP8 (a GPU that multiplies FP8 by FP8) have u = 2**-4, an FP8
KV cache as well, of keys and values.

Depth: errors of earlier steps grow or shrink on their way by what the model does to any small change. That is
measured on the reference, which knows nothing of the engine: it runs a second time with every layer's output
changed at random by ``step`` relative to its row, and the distance of the two runs at a stage is how far
rounding may lead there. Tolerance of a stage after many layers:

    deep = step + DEEP_SAFETY * distance

DEEP_SAFETY = 3: one random change stands for all, and both engine and reference err.
"""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from vlfit.checkpoint.source import Checkpoint

ROUNDINGS = 12
PRODUCTS = 4
GROWTH = 4.0
SAFETY = 3.0
ELEMENT_SAFETY = 12.0
DEEP_SAFETY = 3.0
FLOAT32 = 2.0**-24
UNIT_ROUNDOFF = {"float32": FLOAT32, "float16": 2.0**-11, "bfloat16": 2.0**-8}
FP8_UNIT = 2.0**-4  # e4m3: three bits of mantissa


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that rounding explains: of a row as a whole, and of a single element."""

    row: float
    element: float

    def deep(self, distance: "Difference") -> "Tolerance":
        """The tolerance after many layers: ``deep`` of the module's formula.

        ``distance``: of the reference run with small changes from the exact one.
        """
        return Tolerance(
            self.row + DEEP_SAFETY * distance.row,
            self.element + DEEP_SAFETY * max(distance.element, distance.row),
        )


EXACT = Tolerance(0.0, 0.0)


@dataclass(frozen=True)
class Difference:
    """How far numbers are apart: the worst row, the worst element, and where that row is (None: nowhere)."""

    row: float
    element: float
    worst_row: int | None = None

    def share(self, tolerance: Tolerance) -> float:
        """The larger of the two as a share of its tolerance: above 1.0 they differ."""
        return max(_share(self.row, tolerance.row), _share(self.element, tolerance.element))


def _share(value: float, tolerance: float) -> float:
    if value != value:  # NaN
        return float("inf")
    if tolerance > 0.0:
        return value / tolerance
    return 0.0 if value == 0.0 else float("inf")


def difference(ours: Tensor, theirs: Tensor) -> Difference:
    """The distance of ``ours`` from ``theirs``, of equal shape: rows are all but the last dimension.

    A row of the reference that is almost 0 beside the others is measured against a hundredth of their mean.
    """
    if ours.shape != theirs.shape:
        return Difference(float("inf"), float("inf"))
    if not ours.numel():
        return Difference(0.0, 0.0)
    wide = theirs.double().reshape(-1, theirs.shape[-1] if theirs.ndim else 1)
    apart = ours.double().reshape(wide.shape) - wide
    size = wide.square().mean(1).sqrt()
    size = size.clamp_min(max(float(size.mean()) * 0.01, 1e-30))
    rows = apart.square().mean(1).sqrt() / size
    elements = (apart.abs() / (size[:, None] + wide.abs())).amax(1)
    worst = int(torch.nan_to_num(rows, nan=torch.inf).argmax())
    return Difference(float(rows[worst]), float(elements.nan_to_num(torch.inf).max()), worst)


def step_tolerance(unit: float, inputs: int, weights: float = 0.0, products: float = 0.0) -> Tolerance:
    """``step`` of the module's formula: u = ``unit``, n = ``inputs``, w = ``weights``, p = ``products``."""
    base = GROWTH * _roundings(unit, inputs, weights, products)
    return Tolerance(SAFETY * base, ELEMENT_SAFETY * base)


def _roundings(unit: float, inputs: int, weights: float, products: float) -> float:
    """``step`` of the module's formula without its factors for growth and safety."""
    multiplied = PRODUCTS * (products**2 + weights**2)
    return sqrt(ROUNDINGS * unit**2 + multiplied) + sqrt(inputs) * FLOAT32


@dataclass(frozen=True)
class Precision:
    """What an engine computes in: ``dtype``, and which of its numbers are narrower.

    ``half_weights``: weights of 4 and 8 bits are kept in float16. ``fp8_rows``: products of FP8 by FP8.
    ``fp8_kv``: the KV cache has three bits of mantissa. ``products``, ``tower_products``: p of the module's
    formula.
    """

    dtype: str
    half_weights: bool = False
    fp8_rows: bool = False
    fp8_kv: bool = False
    products: float = 0.0
    tower_products: float = 0.0

    @property
    def unit(self) -> float:
        """The largest unit roundoff of a layer's products."""
        unit = UNIT_ROUNDOFF[self.dtype]
        return max(unit, FP8_UNIT) if self.fp8_rows else unit

    @property
    def weights(self) -> float:
        """w of the module's formula."""
        return UNIT_ROUNDOFF["float16"] if self.half_weights else 0.0

    def rounding(self, checkpoint: Checkpoint, state_tokens: int = 0) -> float:
        """How far roundings move a row in one layer, as a share of it: ``step`` without safety factors.

        Of products of FP8 by FP8 the inputs are rounded, evenly up to half a unit. ``state_tokens``: as in
        ``layer``.
        """
        text = checkpoint.config.text
        inputs = max(text.hidden_size, text.intermediate_size) + ROUNDINGS * state_tokens
        rounded = _roundings(UNIT_ROUNDOFF[self.dtype], inputs, self.weights, self.products)
        return rounded + (sqrt(PRODUCTS / 3) * FP8_UNIT if self.fp8_rows else 0.0)

    def layer(self, checkpoint: Checkpoint, state_tokens: int = 0) -> Tolerance:
        """The tolerance of one text layer computed from the engine's own input.

        ``state_tokens``: how many tokens its recurrent state has seen; 0 for attention.
        """
        return self.layer_of(checkpoint, max(self.unit, FP8_UNIT) if self.fp8_kv else self.unit, state_tokens)

    def layer_of(self, checkpoint: Checkpoint, unit: float, state_tokens: int = 0) -> Tolerance:
        """The tolerance of one text layer whose products have the unit roundoff ``unit``."""
        text = checkpoint.config.text
        inputs = max(text.hidden_size, text.intermediate_size) + ROUNDINGS * state_tokens
        return step_tolerance(unit, inputs, self.weights, self.products)

    def kv_rows(self, checkpoint: Checkpoint) -> Tolerance:
        """The tolerance of keys and values as the KV cache holds them, head by head.

        In FP8 an element is off by half a unit, 2**-4 of itself at most, and by as much of the smallest
        normal code below that; its scale is rounded to bfloat16.
        """
        layer = self.layer_of(checkpoint, self.unit)
        if not self.fp8_kv:
            return layer
        return Tolerance(layer.row + FP8_UNIT + 2.0**-8, layer.element + FP8_UNIT + 2.0**-8)

    def tower(self, checkpoint: Checkpoint) -> Tolerance:
        """The tolerance of one block of the vision tower, or of a merger; towers are never FP8 by FP8."""
        vision = checkpoint.config.required_vision
        merged = vision.hidden_size * vision.spatial_merge_size**2
        inputs = max(vision.intermediate_size, merged)
        return step_tolerance(UNIT_ROUNDOFF[self.dtype], inputs, self.weights, self.tower_products)

    def patches(self) -> Tolerance:
        """The tolerance of normalized pixels: one product and one difference, then stored."""
        unit = UNIT_ROUNDOFF[self.dtype]
        return Tolerance(4 * unit, 8 * unit)

    def lookup(self) -> Tolerance:
        """The tolerance of rows of the embedding table: a weight dequantized, then stored."""
        unit = UNIT_ROUNDOFF[self.dtype] + self.weights
        return Tolerance(4 * unit, 8 * unit)
