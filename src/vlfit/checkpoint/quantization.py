"""``quantization_config`` of a checkpoint: how linear layers are stored in fewer bits than 16.

Knows: the official FP8 form (quant_method ``fp8``) and the 4-bit form that vLLM and transformers read
(quant_method ``compressed-tensors``, format ``pack-quantized``), and what of both vlfit does not run.
Does not know: tensors or how they are computed with.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from vlfit.checkpoint.fields import Fields
from vlfit.errors import CheckpointError, UnknownWeightsFormat

FP8, INT4 = "fp8", "int4"  # what the formats are called on the command line and in lists
FP8_METHOD, INT4_METHOD = "fp8", "compressed-tensors"
PACKED_FORMAT = "pack-quantized"
CODES_PER_WORD = 8  # 4-bit codes in one 32-bit word

_WHAT_IS_READ = (
    "vlfit reads bf16, fp16 and fp32 weights, FP8 as the official Qwen3-VL FP8 checkpoints have it (e4m3, "
    "128x128 blocks, dynamic activations), and int4 as compressed-tensors packs it (W4A16 in groups). "
    "vlfit convert makes both from a bf16 checkpoint."
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
class Int4Format:
    """Weights in 4 bits, a scale for each ``group_size`` neighbours in a row, activations in 16 bits.

    Eight codes (0-15) stand in each 32-bit word, the first in its lowest bits. A weight is its code less its
    zero point, times its scale. ``symmetric``: the zero point is 8 everywhere and not stored.
    ``ignored`` are names of modules, or patterns after ``re:``, that keep 16-bit weights.
    """

    group_size: int
    symmetric: bool
    ignored: tuple[str, ...]

    def converts(self, module: str) -> bool:
        """Whether the linear layer ``module`` is in 4 bits, by the rule of compressed-tensors."""
        return not any(_ignores(entry, module) for entry in self.ignored)

    def divides(self, columns: int) -> bool:
        """Whether rows of ``columns`` weights make whole groups; the form has no partial ones."""
        return columns % self.group_size == 0

    def stored(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Names (after the module's) and shapes of what stands for a ``rows`` x ``columns`` weight."""
        groups = columns // self.group_size
        shapes: dict[str, tuple[int, ...]] = {
            "weight_packed": (rows, math.ceil(columns / CODES_PER_WORD)),
            "weight_scale": (rows, groups),
        }
        if not self.symmetric:
            shapes["weight_zero_point"] = (math.ceil(rows / CODES_PER_WORD), groups)
        return shapes


def _exempts(entry: str, module: str) -> bool:
    if module.endswith(entry):
        return True
    try:
        return re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", module) is not None
    except re.error:
        return module.startswith(f"{entry}.")


def _ignores(entry: str, module: str) -> bool:
    if not entry.startswith("re:"):
        return entry == module
    try:
        return re.match(entry.removeprefix("re:"), module) is not None
    except re.error as error:
        raise CheckpointError(
            f"config.json: quantization_config.ignore has the pattern {entry!r}: {error}",
            "Compare the file with the original checkpoint's.",
        ) from None


def read_quantization(fields: Fields) -> Fp8Format | Int4Format | None:
    """The ``quantization_config`` of config.json, None where there is none.

    Raises ``UnknownWeightsFormat`` for what vlfit does not run, ``CheckpointError`` for wrong fields.
    """
    if not fields.has("quantization_config"):
        return None
    section = fields.section("quantization_config")
    if not section.has("quant_method"):
        raise UnknownWeightsFormat("config.json: quantization_config names no quant_method", _WHAT_IS_READ)
    if section.values["quant_method"] == INT4_METHOD:
        return _read_int4(section)
    return _read_fp8(section)


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


def _read_int4(section: Fields) -> Int4Format:
    _check(section, {"format": (PACKED_FORMAT,), "quantization_status": ("compressed",)})
    groups = section.section("config_groups")
    if len(groups.values) != 1:
        raise UnknownWeightsFormat(
            f"config.json: quantization_config.config_groups holds {len(groups.values)} ways of storing "
            "weights, not one",
            _WHAT_IS_READ,
        )
    group = groups.section(next(iter(groups.values)))
    _check(group, {"format": (PACKED_FORMAT,)})
    _refuse(group, "input_activations", "output_activations")
    _refuse(section, "kv_cache_scheme", "transform_config")
    # More targets than that name layers that some programs do not see as linear: the output head.
    if "Linear" not in group.texts("targets", ("Linear",)):
        raise UnknownWeightsFormat(
            f"config.json: {group.prefix}targets is {group.values['targets']!r}, without Linear",
            _WHAT_IS_READ,
        )
    weights = group.section("weights")
    expected: dict[str, tuple[Any, ...]] = {
        "num_bits": (4,),
        "type": ("int",),
        "strategy": ("group",),
        "dynamic": (False,),
        # Columns may have been visited in another order ("weight"); stored in another order needs g_idx.
        "actorder": ("weight", "static", False),
    }
    _check(weights, expected)
    weights.integer("num_bits")  # compressed-tensors means 8 when it is not said
    size = weights.integer("group_size", least=1)
    if size % CODES_PER_WORD:
        raise UnknownWeightsFormat(
            f"config.json: {weights.prefix}group_size is {size}, not a multiple of {CODES_PER_WORD}",
            _WHAT_IS_READ,
        )
    return Int4Format(size, weights.flag("symmetric", True), section.texts("ignore", ()))


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
