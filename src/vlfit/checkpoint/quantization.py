"""``quantization_config`` of a checkpoint: how its linear layers are quantized.

Reads official FP8 (``quant_method`` ``fp8``) and ``compressed-tensors``: packed int4 and int8, plain int8 and
FP8, also several in one checkpoint. AWQ, GPTQ and AutoRound are in ``gptq_awq.py``.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vlfit.checkpoint.fields import COMPARE_HINT, Fields
from vlfit.checkpoint.gptq_awq import (
    AUTO_ROUND_METHODS,
    AWQ_METHOD,
    GPTQ_METHOD,
    GptqAwqFormat,
    read_auto_round,
    read_awq,
    read_gptq,
)
from vlfit.errors import CheckpointError, UnknownWeightsFormat

FP8, INT8, INT4 = "fp8", "int8", "int4"  # weights formats, as on the command line
INT5, INT6 = "int5", "int6"  # of matrices in GGUF files
FP8_METHOD, COMPRESSED_METHOD = "fp8", "compressed-tensors"
# Formats of compressed-tensors: codes in 32-bit words, 8-bit integers, 8-bit floats.
PACKED_FORMAT, INTEGER_FORMAT, FLOAT_FORMAT = "pack-quantized", "int-quantized", "float-quantized"
MIXED_FORMAT = "mixed-precision"  # each group of modules has its own
_ACT_ORDER = ("group", "dynamic", True)  # values of ``actorder`` that need ``weight_g_idx``
CODES_PER_WORD = 8  # 4-bit codes in one 32-bit word
PACKED_BITS = {4: INT4, 5: INT5, 6: INT6}  # formats whose codes do not fill bytes
LOW_BITS = {5: 1, 6: 2}  # lowest bits of a code that lie apart from its other four (``packed_words``)
RUN = 32  # codes of which four words hold the upper bits
# The integers that 4-bit codes stand for, from code 0 on: llama.cpp's IQ4_NL, e2m1 (doubled) and what the
# magnitudes and signs of IQ3_S can be.
CODEBOOKS = {
    "iq4nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "odd": tuple(range(-15, 16, 2)),
}
LOOKED_UP = ("iq4nl", "e2m1")  # the others are arithmetic
_NO_MATCH = 3  # after name, pattern and class

_SUPPORTED = (
    "vlfit reads bf16, fp16 and fp32 weights; FP8 as in the official Qwen3-VL checkpoints (e4m3, 128x128 "
    "blocks, dynamic activations); compressed-tensors int4 in groups (W4A16), int8 and FP8 with activations "
    "in 16 bits or dynamic; AWQ and GPTQ. vlfit convert makes such checkpoints from a bf16 one."
)


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """``quant_method`` ``fp8``, as in Qwen's official FP8 checkpoints: e4m3 weights with a scale per block.

    A block has ``block_rows`` outputs and ``block_columns`` inputs. ``unquantized_modules``: names or
    patterns of modules that keep 16-bit weights.
    """

    block_rows: int
    block_columns: int
    unquantized_modules: tuple[str, ...]

    def quantizes(self, module: str) -> bool:
        """Whether the linear layer ``module`` (``model.language_model.layers.0.mlp.up_proj``) is in FP8.

        Transformers' rule: an entry of ``unquantized_modules`` exempts a module if it is the module's name,
        an ancestor's name, the end of the name, or a pattern that matches the name up to a dot. The LM head
        is never quantized.
        """
        return module != "lm_head" and not any(
            _matches_exemption(entry, module) for entry in self.unquantized_modules
        )

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of ``weight_scale_inv`` for a ``rows`` x ``columns`` weight; last blocks may be partial."""
        return math.ceil(rows / self.block_rows), math.ceil(columns / self.block_columns)


def packed_words(columns: int, bits: int) -> int:
    """32-bit words of a row of ``columns`` codes of 4, 5, 6 or 8 bits.

    Of 5 and 6 bits a row first has the upper four of each code, as with 4, and then the lowest one or two:
    four words for each run of 128 or 64 codes, the last padded (``layers/linear.py``, ``pack_codes``).
    """
    low = LOW_BITS.get(bits)
    if low is None:
        return math.ceil(columns * bits / 32)
    return (columns // RUN + math.ceil(columns * low / 128)) * 4


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How compressed-tensors stores a weight [rows, columns]: codes of ``bits``, and scales.

    - ``kind``: ``PACKED_FORMAT`` packs 32 / ``bits`` codes into a 32-bit word, the first in its lowest bits;
      weight = (code - zero point) * scale. ``INTEGER_FORMAT`` stores signed bytes and ``FLOAT_FORMAT`` e4m3,
      both without zero points.
    - ``group_size``, ``block_rows``: consecutive columns (None: all) and rows that share a scale.
    - ``symmetric``: the zero point is the middle code (8 of 16, 128 of 256) and is not stored.
    - ``act_order``: a group's columns are not consecutive; the tensor ``weight_g_idx`` has their groups.
    - ``targets``: ``Linear``, names of modules, or patterns after ``re:``.
    - ``super_group``: consecutive columns that share a super scale, which scales are multiples of (GGUF's
      K-quants); None: scales have one level.
    - ``codebook``: what 4-bit codes stand for, a key of ``CODEBOOKS``; None: for themselves.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True
    kind: str = PACKED_FORMAT
    block_rows: int = 1
    targets: tuple[str, ...] = ("Linear",)
    act_order: bool = False
    super_group: int | None = None
    codebook: str | None = None

    @property
    def format(self) -> str:
        """``int4``, ``int8`` or ``fp8``; ``int5`` or ``int6`` in GGUF files."""
        return FP8 if self.kind == FLOAT_FORMAT else PACKED_BITS.get(self.bits, INT8)

    @property
    def codes_per_word(self) -> int:
        """Codes in 32 bits, also for a ``kind`` that does not pack words. Only for 4 and 8 bits."""
        return 32 // self.bits

    def can_store_columns(self, columns: int) -> bool:
        """Whether rows of ``columns`` weights can be stored: int4 and int8 need whole groups and words."""
        if self.kind == FLOAT_FORMAT:
            return True
        words = RUN if self.bits in LOW_BITS else self.codes_per_word
        return columns % (self.group_size or columns) == 0 and columns % words == 0

    def tensor_shapes(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that store a ``rows`` x ``columns`` weight, by name within the module.

        ``weight_packed`` or ``weight``; ``weight_scale``; ``weight_zero_point`` if not symmetric;
        ``weight_g_idx`` with ``act_order``.
        """
        groups = math.ceil(columns / (self.group_size or columns))
        codes = self.codes_per_word
        shapes: dict[str, tuple[int, ...]] = {"weight": (rows, columns)}
        if self.kind == PACKED_FORMAT:
            shapes = {"weight_packed": (rows, packed_words(columns, self.bits))}
        shapes["weight_scale"] = (math.ceil(rows / self.block_rows), groups)
        if self.super_group is not None:
            shapes["weight_super_scale"] = (rows, columns // self.super_group)
        if not self.symmetric:
            shapes["weight_zero_point"] = (math.ceil(rows / codes), groups)
        if self.act_order:
            shapes["weight_g_idx"] = (columns,)
        return shapes


@dataclass(frozen=True, slots=True)
class CompressedFormat:
    """The ``quantization_config`` of a compressed-tensors checkpoint: a scheme for each group of modules.

    Activations are not quantized, whatever the checkpoint recommends. ``ignored``: names of modules, or
    patterns after ``re:``, that keep 16-bit weights.
    """

    schemes: tuple[WeightScheme, ...]
    ignored: tuple[str, ...]
    _schemes_by_module: dict[str, WeightScheme | None] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def quantizes(self, module: str) -> bool:
        """Whether ``module`` is quantized: targeted by a scheme and not in ``ignored``.

        Raises ``CheckpointError`` for an invalid pattern.
        """
        ignored = any(_matches_target(entry, module, "ignore") for entry in self.ignored)
        return not ignored and self.scheme_of(module) is not None

    def scheme_of(self, module: str) -> WeightScheme | None:
        """The first scheme that targets ``module`` by name, else by a pattern, else by its class.

        None if no scheme does. Does not look at ``ignored``: see ``quantizes``. Raises ``CheckpointError``
        for an invalid pattern.
        """
        if module not in self._schemes_by_module:
            self._schemes_by_module[module] = _scheme_of(self.schemes, module)
        return self._schemes_by_module[module]


def _scheme_of(schemes: tuple[WeightScheme, ...], module: str) -> WeightScheme | None:
    ranked = (
        (min(_rank(target, module) for target in scheme.targets), index)
        for index, scheme in enumerate(schemes)
        if scheme.targets
    )
    rank, index = min(ranked, default=(_NO_MATCH, 0))
    return schemes[index] if rank < _NO_MATCH else None


def _rank(target: str, module: str) -> int:
    """How specifically ``target`` matches ``module``, 0 the most; ``_NO_MATCH``: not at all."""
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if _matches_target(target, module, "config_groups: targets") else _NO_MATCH
    return 2 if target == ("Embedding" if module.endswith("embed_tokens") else "Linear") else _NO_MATCH


# ``normalize_gptq_awq`` (``checkpoint/tensors.py``) turns a ``GptqAwqFormat`` into a ``CompressedFormat``.
Quantization = Fp8Format | CompressedFormat | GptqAwqFormat


def _matches_exemption(entry: str, module: str) -> bool:
    if module.endswith(entry):
        return True
    try:
        return re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", module) is not None
    except re.error:
        return module.startswith(f"{entry}.")


def _matches_target(entry: str, module: str, field: str) -> bool:
    if not entry.startswith("re:"):
        return entry == module
    try:
        return re.match(entry.removeprefix("re:"), module) is not None
    except re.error as error:
        raise CheckpointError(
            f"config.json: quantization_config.{field} has the pattern {entry!r}: {error}",
            COMPARE_HINT,
        ) from None


def read_quantization(fields: Fields) -> Quantization | None:
    """Read the ``quantization_config`` of config.json; None if it has none. ``fields``: of config.json.

    Raises ``UnknownWeightsFormat`` for a kind that vlfit does not run, ``CheckpointError`` for invalid
    fields.
    """
    if not fields.has("quantization_config"):
        return None
    section = fields.section("quantization_config")
    if not section.has("quant_method"):
        raise UnknownWeightsFormat("config.json: quantization_config has no quant_method", _SUPPORTED)
    readers: dict[str, Callable[[Fields], Quantization]] = {
        COMPRESSED_METHOD: _read_compressed,
        AWQ_METHOD: read_awq,
        GPTQ_METHOD: read_gptq,
        **dict.fromkeys(AUTO_ROUND_METHODS, read_auto_round),
    }
    return readers.get(section.text("quant_method"), _read_fp8)(section)


def _read_fp8(section: Fields) -> Fp8Format:
    expected: dict[str, tuple[Any, ...]] = {
        "quant_method": (FP8_METHOD,),
        "fmt": ("e4m3", "float8_e4m3fn"),
        "activation_scheme": ("dynamic",),
        "scale_fmt": ("float",),
    }
    _check_values(section, expected)
    if section.has("modules_to_convert"):
        raise UnknownWeightsFormat(
            "config.json: quantization_config.modules_to_convert is set: more than linear layers",
            _SUPPORTED,
        )
    if "weight_block_size" in section.values and not section.has("weight_block_size"):
        raise UnknownWeightsFormat(
            "config.json: quantization_config.weight_block_size is null (one scale per tensor)", _SUPPORTED
        )
    block = section.integers("weight_block_size", (128, 128), minimum=1)
    if len(block) != 2:
        raise section.field_error("weight_block_size", f"is {list(block)}", "two integers (rows, columns)")
    exempt = section.texts("modules_to_not_convert", section.texts("ignored_layers", ()))
    return Fp8Format(block[0], block[1], exempt)


def _read_compressed(section: Fields) -> CompressedFormat:
    kinds = (PACKED_FORMAT, INTEGER_FORMAT, FLOAT_FORMAT)
    _check_values(section, {"format": (*kinds, MIXED_FORMAT), "quantization_status": ("compressed",)})
    _refuse_set(section, "kv_cache_scheme", "transform_config")
    groups = section.section("config_groups")
    if not groups.values:
        raise UnknownWeightsFormat("config.json: quantization_config.config_groups is empty", _SUPPORTED)
    common = section.text("format", PACKED_FORMAT)
    schemes = tuple(_read_scheme(groups.section(name), common) for name in groups.values)
    return CompressedFormat(schemes, section.texts("ignore", ()))


def _read_scheme(group: Fields, common: str) -> WeightScheme:
    """One of ``config_groups``; ``common``: the format of a group that names none."""
    kind = group.text("format", common)
    weights = group.section("weights")
    bits = weights.integer("num_bits")  # compressed-tensors' own default is 8
    # Bits, number type and strategies of each format.
    supported = {
        PACKED_FORMAT: ((4, 8), "int", ("group", "channel")),
        INTEGER_FORMAT: ((8,), "int", ("group", "channel")),
        FLOAT_FORMAT: ((8,), "float", ("channel", "block")),
    }
    if kind not in supported:
        raise UnknownWeightsFormat(f"config.json: {group.prefix}format is {kind!r}", _SUPPORTED)
    widths, number, strategies = supported[kind]
    expected: dict[str, tuple[Any, ...]] = {
        "num_bits": widths,
        "type": (number,),
        "strategy": strategies,
        "dynamic": (False,),
        # "weight": the order in which columns were quantized, which no longer matters.
        "actorder": ("weight", "static", False, *(_ACT_ORDER if kind == PACKED_FORMAT else ())),
    }
    _check_values(weights, expected)
    _refuse_set(group, "output_activations")
    _check_activations(group, kind)
    targets = group.texts("targets", ("Linear",))
    symmetric = weights.flag("symmetric", True)
    if not symmetric and (kind, bits) != (PACKED_FORMAT, 4):
        raise UnknownWeightsFormat(
            f"config.json: {weights.prefix}symmetric is false, with {bits} bits", _SUPPORTED
        )
    rows, columns = _scale_block(weights, bits)
    ordered = columns is not None and weights.values.get("actorder") in _ACT_ORDER
    return WeightScheme(bits, columns, symmetric, kind, rows, targets, ordered)


def _check_activations(group: Fields, kind: str) -> None:
    """Check ``input_activations``. Activations are not quantized, which is more exact."""
    if kind == PACKED_FORMAT:
        _refuse_set(group, "input_activations")
    elif group.values.get("input_activations"):
        _check_values(group.section("input_activations"), {"num_bits": (8,), "dynamic": (True,)})
        if not group.section("input_activations").has("dynamic"):
            _refuse_set(group, "input_activations")


def _scale_block(weights: Fields, bits: int) -> tuple[int, int | None]:
    """Rows and columns (None: all) that share a scale."""
    strategy = weights.text("strategy", "group")
    if strategy == "channel":
        return 1, None
    if strategy == "block":
        block = weights.integers("block_structure", minimum=1)
        if len(block) != 2:
            raise weights.field_error("block_structure", f"is {list(block)}", "two integers (rows, columns)")
        return block[0], block[1]
    size = weights.integer("group_size", minimum=1)
    if size % (32 // bits):
        raise UnknownWeightsFormat(
            f"config.json: {weights.prefix}group_size is {size}, not a multiple of {32 // bits}",
            _SUPPORTED,
        )
    return 1, size


def _check_values(fields: Fields, expected: dict[str, tuple[Any, ...]]) -> None:
    """Raise ``UnknownWeightsFormat`` for a field that is set to another value than ``expected``."""
    for name, values in expected.items():
        if fields.has(name) and fields.values[name] not in values:
            raise UnknownWeightsFormat(
                f"config.json: {fields.prefix}{name} is {fields.values[name]!r}", _SUPPORTED
            )


def _refuse_set(fields: Fields, *names: str) -> None:
    """Raise ``UnknownWeightsFormat`` if one of ``names`` is set."""
    for name in names:
        if fields.values.get(name):
            raise UnknownWeightsFormat(
                f"config.json: {fields.prefix}{name} is set: more than the weights is quantized",
                _SUPPORTED,
            )
