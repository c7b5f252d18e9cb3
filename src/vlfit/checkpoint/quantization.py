"""``quantization_config`` of a checkpoint: how linear layers are stored in fewer bits than 16.

Reads the official FP8 form (quant_method ``fp8``) and ``compressed-tensors``: packed integers of 4 or 8 bits,
plain ones of 8, and FP8, several of them in one checkpoint. AWQ, GPTQ and AutoRound: ``gptq_awq.py``.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.gptq_awq import (
    AUTO_ROUND_METHODS,
    AWQ_METHOD,
    GPTQ_METHOD,
    ByInputs,
    read_auto_round,
    read_awq,
    read_gptq,
)
from vlfit.errors import CheckpointError, UnknownWeightsFormat

FP8, INT8, INT4 = "fp8", "int8", "int4"  # what the formats are called on the command line and in lists
FP8_METHOD, COMPRESSED_METHOD = "fp8", "compressed-tensors"
# The ways of compressed-tensors to store a weight: codes in 32-bit words, 8-bit integers, 8-bit floats.
PACKED_FORMAT, INTEGER_FORMAT, FLOAT_FORMAT = "pack-quantized", "int-quantized", "float-quantized"
MIXED_FORMAT = "mixed-precision"  # each group of modules says its own
_ORDERED = ("group", "dynamic", True)  # of ``actorder``, three names of one thing
CODES_PER_WORD = 8  # 4-bit codes in one 32-bit word

_WHAT_IS_READ = (
    "vlfit reads bf16, fp16 and fp32 weights, FP8 as the official Qwen3-VL FP8 checkpoints have it (e4m3, "
    "128x128 blocks, dynamic activations), of compressed-tensors int4 in groups (W4A16), int8 and FP8 with "
    "activations in 16 bits or dynamic, AWQ, and GPTQ. vlfit convert makes such checkpoints from a bf16 one."
)


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Weights in 8-bit floats with one scale per block of ``block_rows`` x ``block_columns``.

    ``not_converted`` are the names (or patterns) of modules that keep 16-bit weights.
    """

    block_rows: int
    block_columns: int
    not_converted: tuple[str, ...]

    def converts(self, module: str) -> bool:
        """Whether the linear layer ``module`` (``model.language_model.layers.0.mlp.up_proj``) is in FP8.

        The rule is transformers': an entry exempts a module when it is the module's name or an ancestor's,
        a pattern that matches up to a dot, or the end of the name. The LM head is never converted.
        """
        return module != "lm_head" and not any(_exempts(entry, module) for entry in self.not_converted)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of ``weight_scale_inv`` of a ``rows`` x ``columns`` weight; last blocks may be partial."""
        return math.ceil(rows / self.block_rows), math.ceil(columns / self.block_columns)


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How compressed-tensors stores a weight [rows, columns]: codes of ``bits``, and scales for them.

    ``kind``: ``PACKED_FORMAT`` has 32 / ``bits`` codes in each 32-bit word, the first in its lowest bits; a
    weight is its code less its zero point, times its scale. ``symmetric``: the zero point is the middle code
    (8 of 16, 128 of 256) everywhere, and not stored. ``INTEGER_FORMAT`` has signed bytes, ``FLOAT_FORMAT``
    e4m3, both without zero points. A scale is shared by ``group_size`` neighbours in a row (None: by all of
    them) of ``block_rows`` rows. ``targets``: whose weights; ``Linear``, names of modules, or patterns after
    ``re:``. ``ordered``: columns that share a scale are no neighbours: ``weight_g_idx`` has each one's group.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True
    kind: str = PACKED_FORMAT
    block_rows: int = 1
    targets: tuple[str, ...] = ("Linear",)
    ordered: bool = False

    @property
    def form(self) -> str:
        """``int4``, ``int8`` or ``fp8``."""
        return FP8 if self.kind == FLOAT_FORMAT else INT4 if self.bits == 4 else INT8

    @property
    def codes_per_word(self) -> int:
        """Codes in 32 bits: kernels read whole words, packed or not."""
        return 32 // self.bits

    def divides(self, columns: int) -> bool:
        """Whether rows of ``columns`` weights make whole groups and words; only FP8 may have partial ones."""
        if self.kind == FLOAT_FORMAT:
            return True
        return columns % (self.group_size or columns) == 0 and columns % self.codes_per_word == 0

    def stored(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Names (after the module's) and shapes of what stands for a ``rows`` x ``columns`` weight."""
        groups = math.ceil(columns / (self.group_size or columns))
        codes = self.codes_per_word
        shapes: dict[str, tuple[int, ...]] = {"weight": (rows, columns)}
        if self.kind == PACKED_FORMAT:
            shapes = {"weight_packed": (rows, math.ceil(columns / codes))}
        shapes["weight_scale"] = (math.ceil(rows / self.block_rows), groups)
        if not self.symmetric:
            shapes["weight_zero_point"] = (math.ceil(rows / codes), groups)
        if self.ordered:
            shapes["weight_g_idx"] = (columns,)
        return shapes


@dataclass(frozen=True, slots=True)
class CompressedFormat:
    """Weights as compressed-tensors stores them, activations in 16 bits: a scheme for each group of modules.

    ``ignored`` are names of modules, or patterns after ``re:``, that keep 16-bit weights. ``_known``: what
    ``scheme_of`` found; a model has some hundred modules, and each is asked about a few times.
    """

    schemes: tuple[WeightScheme, ...]
    ignored: tuple[str, ...]
    _known: dict[str, WeightScheme | None] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def converts(self, module: str) -> bool:
        """Whether the weight of ``module`` is in fewer bits, by the rule of compressed-tensors."""
        ignored = any(_matches(entry, module, "ignore") for entry in self.ignored)
        return not ignored and self.scheme_of(module) is not None

    def scheme_of(self, module: str) -> WeightScheme | None:
        """How the weight of ``module`` is stored if it is in fewer bits; None: no group has it.

        The first group that targets it by its name, else by a pattern, else as the kind of module that it is.
        """
        if module not in self._known:
            self._known[module] = _scheme_of(self.schemes, module)
        return self._known[module]


_NO_TARGET = 3


def _scheme_of(schemes: tuple[WeightScheme, ...], module: str) -> WeightScheme | None:
    ranked = (
        (min(_rank(target, module) for target in scheme.targets), place)
        for place, scheme in enumerate(schemes)
        if scheme.targets
    )
    rank, place = min(ranked, default=(_NO_TARGET, 0))
    return schemes[place] if rank < _NO_TARGET else None


def _rank(target: str, module: str) -> int:
    """How closely a group's ``target`` names ``module``, 0 closest; ``_NO_TARGET``: not at all."""
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if _matches(target, module, "config_groups: targets") else _NO_TARGET
    return 2 if target == ("Embedding" if module.endswith("embed_tokens") else "Linear") else _NO_TARGET


# ``ByInputs`` becomes a ``CompressedFormat`` once the headers are read (``checkpoint/tensors.py``).
Quantization = Fp8Format | CompressedFormat | ByInputs


def _exempts(entry: str, module: str) -> bool:
    if module.endswith(entry):
        return True
    try:
        return re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", module) is not None
    except re.error:
        return module.startswith(f"{entry}.")


def _matches(entry: str, module: str, field: str) -> bool:
    if not entry.startswith("re:"):
        return entry == module
    try:
        return re.match(entry.removeprefix("re:"), module) is not None
    except re.error as error:
        raise CheckpointError(
            f"config.json: quantization_config.{field} has the pattern {entry!r}: {error}",
            "Compare the file with the original checkpoint's.",
        ) from None


def read_quantization(fields: Fields) -> Quantization | None:
    """The ``quantization_config`` of config.json, None where there is none.

    Raises ``UnknownWeightsFormat`` for what vlfit does not run, ``CheckpointError`` for wrong fields.
    """
    if not fields.has("quantization_config"):
        return None
    section = fields.section("quantization_config")
    if not section.has("quant_method"):
        raise UnknownWeightsFormat("config.json: quantization_config names no quant_method", _WHAT_IS_READ)
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
    _check(section, expected)
    if section.has("modules_to_convert"):
        raise UnknownWeightsFormat(
            "config.json: quantization_config.modules_to_convert asks for more than linear layers",
            _WHAT_IS_READ,
        )
    if "weight_block_size" in section.values and not section.has("weight_block_size"):
        raise UnknownWeightsFormat(
            "config.json: quantization_config.weight_block_size is null (one scale per tensor)", _WHAT_IS_READ
        )
    block = section.integers("weight_block_size", (128, 128), least=1)
    if len(block) != 2:
        raise section.wrong("weight_block_size", f"is {list(block)}", "two integers (rows, columns)")
    exempt = section.texts("modules_to_not_convert", section.texts("ignored_layers", ()))
    return Fp8Format(block[0], block[1], exempt)


def _read_compressed(section: Fields) -> CompressedFormat:
    kinds = (PACKED_FORMAT, INTEGER_FORMAT, FLOAT_FORMAT)
    _check(section, {"format": (*kinds, MIXED_FORMAT), "quantization_status": ("compressed",)})
    _refuse(section, "kv_cache_scheme", "transform_config")
    groups = section.section("config_groups")
    if not groups.values:
        raise UnknownWeightsFormat(
            "config.json: quantization_config.config_groups holds no way of storing weights", _WHAT_IS_READ
        )
    common = section.text("format", PACKED_FORMAT)
    schemes = tuple(_read_scheme(groups.section(name), common) for name in groups.values)
    return CompressedFormat(schemes, section.texts("ignore", ()))


def _read_scheme(group: Fields, common: str) -> WeightScheme:
    """One of ``config_groups``; ``common`` is the format of a group that names none."""
    kind = group.text("format", common)
    weights = group.section("weights")
    bits = weights.integer("num_bits")  # compressed-tensors means 8 when it is not said
    # What is known of each kind: bits, type of number, and who shares a scale.
    known = {
        PACKED_FORMAT: ((4, 8), "int", ("group", "channel")),
        INTEGER_FORMAT: ((8,), "int", ("group", "channel")),
        FLOAT_FORMAT: ((8,), "float", ("channel", "block")),
    }
    if kind not in known:
        raise UnknownWeightsFormat(f"config.json: {group.prefix}format is {kind!r}", _WHAT_IS_READ)
    widths, number, strategies = known[kind]
    expected: dict[str, tuple[Any, ...]] = {
        "num_bits": widths,
        "type": (number,),
        "strategy": strategies,
        "dynamic": (False,),
        # The order in which columns were visited ("weight") is over; groups by it ("group") need g_idx.
        "actorder": ("weight", "static", False, *(_ORDERED if kind == PACKED_FORMAT else ())),
    }
    _check(weights, expected)
    _refuse(group, "output_activations")
    _check_activations(group, kind)
    targets = group.texts("targets", ("Linear",))
    symmetric = weights.flag("symmetric", True)
    if not symmetric and (kind, bits) != (PACKED_FORMAT, 4):
        raise UnknownWeightsFormat(
            f"config.json: {weights.prefix}symmetric is false, with {bits} bits", _WHAT_IS_READ
        )
    rows, columns = _shared_scale(weights, bits)
    ordered = columns is not None and weights.values.get("actorder") in _ORDERED
    return WeightScheme(bits, columns, symmetric, kind, rows, targets, ordered)


def _check_activations(group: Fields, kind: str) -> None:
    """Activations that were to be rounded while computing are left as they are, which is more exact."""
    if kind == PACKED_FORMAT:
        _refuse(group, "input_activations")
    elif group.values.get("input_activations"):
        _check(group.section("input_activations"), {"num_bits": (8,), "dynamic": (True,)})
        if not group.section("input_activations").has("dynamic"):
            _refuse(group, "input_activations")


def _shared_scale(weights: Fields, bits: int) -> tuple[int, int | None]:
    """Rows and columns (None: all) that share a scale."""
    strategy = weights.text("strategy", "group")
    if strategy == "channel":
        return 1, None
    if strategy == "block":
        block = weights.integers("block_structure", least=1)
        if len(block) != 2:
            raise weights.wrong("block_structure", f"is {list(block)}", "two integers (rows, columns)")
        return block[0], block[1]
    size = weights.integer("group_size", least=1)
    if size % (32 // bits):
        raise UnknownWeightsFormat(
            f"config.json: {weights.prefix}group_size is {size}, not a multiple of {32 // bits}",
            _WHAT_IS_READ,
        )
    return 1, size


def _check(fields: Fields, expected: dict[str, tuple[Any, ...]]) -> None:
    """Raises ``UnknownWeightsFormat`` for a field that is there with another value than ``expected``."""
    for name, known in expected.items():
        if fields.has(name) and fields.values[name] not in known:
            raise UnknownWeightsFormat(
                f"config.json: {fields.prefix}{name} is {fields.values[name]!r}", _WHAT_IS_READ
            )


def _refuse(fields: Fields, *names: str) -> None:
    for name in names:
        if fields.values.get(name):
            raise UnknownWeightsFormat(
                f"config.json: {fields.prefix}{name} is set: more than weights is quantized",
                _WHAT_IS_READ,
            )
