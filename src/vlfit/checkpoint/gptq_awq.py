"""AWQ, GPTQ and AutoRound: their ``quantization_config``, and their tensors under common names.

A layer has ``qweight``, ``scales`` and ``qzeros`` in place of its weight [outputs, inputs], all stored inputs
first. ``normalize`` gives them the names and shapes of compressed-tensors (``quantization.py``), which the
rest of vlfit uses; ``StoredLayout`` tells how each lies in its file.

Sources: AutoAWQ, AutoGPTQ and GPTQModel, optimum, and vLLM's ``AutoRoundConfig``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlfit.checkpoint.fields import COMPARE_HINT, Fields
from vlfit.checkpoint.headers import StoredLayout, TensorInfo
from vlfit.errors import CheckpointError, MissingTensor, UnknownWeightsFormat, WrongShape

AWQ_METHOD, GPTQ_METHOD = "awq", "gptq"  # ``quant_method``
AUTO_ROUND_METHODS = ("auto-round", "intel/auto-round")
QWEIGHT = ".qweight"
# Tensors of a layer in the files, and the ending of the compressed-tensors name of each.
_PARTS = {"qweight": "packed", "scales": "scale", "qzeros": "zero_point", "g_idx": "g_idx"}
_SCALE_DTYPES = ("F16", "BF16", "F32")
_OUTPUTS_MULTIPLE = (
    8  # zero points of eight outputs share a word, in the only format that stores them (4 bits)
)
_UNQUANTIZED_BITS = 16
_MISMATCH = "config.json and the weights are of different checkpoints. Fetch both again."
_SUPPORTED = (
    "vlfit reads AWQ of version gemm in 4 bits, GPTQ in 4 bits or symmetric 8 bits, and AutoRound in the "
    "layout of either. vlfit convert makes int4 from the original checkpoint."
)
# How GPTQ stores zero points: v1 less one, v2 as they are (GPTQModel's ``convert_gptq_v1_to_v2_format``).
_ZEROS_LAYOUTS = {"gptq": StoredLayout.GPTQ_ZEROS, "gptq_v2": StoredLayout.TRANSPOSED}
# GPTQ's settings that change the computation, not only the weights.
_UNSUPPORTED_FIELDS = ("activation", "adapter", "rotation", "is_marlin_format")
# In GPTQ's ``dynamic``, before a pattern: not quantized, or quantized with other settings.
_EXCLUDE, _INCLUDE = "-:", "+:"


@dataclass(frozen=True, slots=True)
class GptqAwqScheme:
    """How a linear layer is stored: as integer codes of ``bits`` bits, with scales.

    ``group_size``: inputs that share a scale; None: all inputs of a row. ``symmetric``: the zero point is the
    middle code (8 of 16, 128 of 256), and the tensor ``qzeros`` is ignored. ``act_order``: groups are not
    consecutive inputs; the tensor ``g_idx`` has the group of each input.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    act_order: bool = False

    @property
    def codes_per_word(self) -> int:
        """Codes in a 32-bit word."""
        return 32 // self.bits


@dataclass(frozen=True, slots=True)
class GptqAwqFormat:
    """The ``quantization_config`` of an AWQ, GPTQ or AutoRound checkpoint.

    ``codes_layout``, ``zeros_layout``: how ``qweight`` and ``qzeros`` lie in the files. ``overrides``: pairs
    of a regular expression for module names and their scheme, None if they are not quantized. The first that
    matches the beginning of a name counts; modules that none matches have the scheme ``default``.
    """

    default: GptqAwqScheme
    codes_layout: StoredLayout
    zeros_layout: StoredLayout
    overrides: tuple[tuple[str, GptqAwqScheme | None], ...] = ()

    def scheme_of(self, module: str) -> GptqAwqScheme | None:
        """Scheme of ``module``; None: not quantized. Raises ``CheckpointError`` for an invalid pattern."""
        for pattern, scheme in self.overrides:
            try:
                if re.match(pattern, module):
                    return scheme
            except re.error as error:
                raise CheckpointError(
                    f"config.json: quantization_config.dynamic has the pattern {pattern!r}: {error}",
                    COMPARE_HINT,
                ) from None
        return self.default

    def normalize(
        self, linears: Mapping[str, tuple[int, int]], tensors: Mapping[str, TensorInfo]
    ) -> tuple[dict[str, GptqAwqScheme], dict[str, TensorInfo]]:
        """Scheme of each quantized module, and ``tensors`` under the names and shapes of compressed-tensors.

        ``linears``: outputs and inputs of the model's linear layers, by module name. A module with a
        ``qweight`` in ``tensors`` is quantized. ``qzeros`` and ``g_idx`` that its scheme does not use are
        left out; all other tensors are returned unchanged. No file is read. Raises ``CheckpointError`` if
        config.json says that a module with a ``qweight`` is not quantized; ``MissingTensor``, ``WrongShape``
        or ``UnknownWeightsFormat``, with the names in the files.
        """
        schemes: dict[str, GptqAwqScheme] = {}
        renamed: dict[str, list[TensorInfo]] = {}  # by name in the files
        for module, (rows, columns) in linears.items():
            if module + QWEIGHT not in tensors:
                continue
            scheme = self.scheme_of(module)
            if scheme is None:
                raise CheckpointError(
                    f"{module}{QWEIGHT} is there, but config.json says that {module} is not quantized",
                    _MISMATCH,
                )
            schemes[module] = scheme
            renamed |= {f"{module}.{part}": [] for part in _PARTS}
            renamed[module + QWEIGHT] = self._normalize_module(module, rows, columns, scheme, tensors)
        kept = (each for name, info in tensors.items() for each in renamed.get(name, [info]))
        return schemes, {info.name: info for info in kept}

    def _normalize_module(
        self, module: str, rows: int, columns: int, scheme: GptqAwqScheme, tensors: Mapping[str, TensorInfo]
    ) -> list[TensorInfo]:
        """The tensors that replace the weight of ``module``, in the order that they are loaded in."""
        groups, words = _num_groups(module, rows, columns, scheme), columns // scheme.codes_per_word
        in_file = (columns, rows // 8) if self.codes_layout is StoredLayout.AWQ_CODES else (words, rows)
        zeros = (groups, rows // scheme.codes_per_word)
        found: list[TensorInfo] = []

        def add(part: str, in_file: tuple[int, ...], dtypes: tuple[str, ...], **changes: Any) -> None:
            info = _checked_tensor(f"{module}.{part}", in_file, dtypes, tensors)
            found.append(replace(info, name=f"{module}.weight_{_PARTS[part]}", **changes))

        add("qweight", in_file, ("I32",), shape=(rows, words), layout=self.codes_layout)
        add("scales", (groups, rows), _SCALE_DTYPES, shape=(rows, groups), layout=StoredLayout.TRANSPOSED)
        if not scheme.symmetric:
            add("qzeros", zeros, ("I32",), shape=zeros[::-1], layout=self.zeros_layout)
        if scheme.act_order:
            add("g_idx", (columns,), ("I32",))
        return found


def _num_groups(module: str, rows: int, columns: int, scheme: GptqAwqScheme) -> int:
    """Groups of the inputs of ``module``. Raises ``UnknownWeightsFormat`` where they are not whole."""
    size = scheme.group_size or columns
    if columns % size or columns % scheme.codes_per_word:
        raise UnknownWeightsFormat(
            f"{module} has {columns} inputs, not a whole number of groups of {size}", _MISMATCH
        )
    if rows % _OUTPUTS_MULTIPLE:
        raise UnknownWeightsFormat(
            f"{module} has {rows} outputs, not a multiple of {_OUTPUTS_MULTIPLE}", _MISMATCH
        )
    return columns // size


def _checked_tensor(
    name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], tensors: Mapping[str, TensorInfo]
) -> TensorInfo:
    info = tensors.get(name)
    if info is None:
        raise MissingTensor(f"{name} is missing", f"{_MISMATCH} Or a shard is missing.")
    if info.shape != shape:
        raise WrongShape(
            f"{name} has shape {list(info.shape)}; config.json calls for {list(shape)}", _MISMATCH
        )
    if info.dtype not in dtypes:
        raise UnknownWeightsFormat(
            f"{name} is stored as {info.dtype}", f"vlfit reads {' and '.join(dtypes)} there."
        )
    return info


def read_awq(section: Fields) -> GptqAwqFormat:
    """Read the ``quantization_config`` of an AWQ checkpoint: 4 bits in AutoAWQ's ``WQLinear_GEMM`` layout.

    Raises ``UnknownWeightsFormat`` for any other kind of AWQ, ``CheckpointError`` for invalid fields.
    """
    name = _field_name(section, "version", "checkpoint_format", "format")
    version = section.text(name, "gemm")
    if version.lower() != "gemm":
        raise _unsupported(section, name, version)
    if section.values.get("backend") == "llm-awq":  # a version, in transformers' spelling
        raise _unsupported(section, "backend", "llm-awq")
    bits = section.integer(_field_name(section, "bits", "w_bit"))
    if bits != 4:
        raise _unsupported(section, "bits", bits)
    scheme = GptqAwqScheme(bits, _group_size(section, bits), symmetric=False)
    return GptqAwqFormat(scheme, StoredLayout.AWQ_CODES, StoredLayout.AWQ_ZEROS)


def read_gptq(section: Fields) -> GptqAwqFormat:
    """Read the ``quantization_config`` of a GPTQ checkpoint: 4 bits, or symmetric 8 bits.

    Raises ``UnknownWeightsFormat`` for any other kind of GPTQ, ``CheckpointError`` for invalid fields.
    """
    name = _field_name(section, "checkpoint_format", "format")
    checkpoint_format = section.text(name, "gptq")
    if checkpoint_format not in _ZEROS_LAYOUTS:
        raise _unsupported(section, name, checkpoint_format)
    for name in _UNSUPPORTED_FIELDS:
        if section.values.get(name):
            raise _unsupported(section, name, section.values[name])
    if str(section.values.get("pack_dtype") or "int32").removeprefix("torch.") != "int32":
        raise _unsupported(section, "pack_dtype", section.values["pack_dtype"])
    return GptqAwqFormat(
        _gptq_scheme(section),
        StoredLayout.TRANSPOSED,
        _ZEROS_LAYOUTS[checkpoint_format],
        _dynamic_overrides(section),
    )


def _gptq_scheme(section: Fields) -> GptqAwqScheme:
    bits = section.integer("bits")
    symmetric = section.flag("sym", True)
    if bits not in (4, 8):
        raise _unsupported(section, "bits", bits)
    if bits == 8 and not symmetric:
        raise _unsupported(section, "sym", False)
    size = _group_size(section, bits)
    # With one scale for all inputs there is one group, in whatever order.
    return GptqAwqScheme(bits, size, symmetric, section.flag("desc_act") and size is not None)


def _dynamic_overrides(section: Fields) -> tuple[tuple[str, GptqAwqScheme | None], ...]:
    """GPTQ's ``dynamic``: patterns of modules with other settings, or (None) not quantized."""
    dynamic = section.section("dynamic")
    overrides: list[tuple[str, GptqAwqScheme | None]] = []
    for pattern in dynamic.values:
        if pattern.startswith(_EXCLUDE):
            overrides.append((pattern.removeprefix(_EXCLUDE), None))
            continue
        changes = dynamic.section(pattern)
        merged = Fields({**section.values, **changes.values}, section.file, changes.prefix)
        overrides.append((pattern.removeprefix(_INCLUDE), _gptq_scheme(merged)))
    return tuple(overrides)


def read_auto_round(section: Fields) -> GptqAwqFormat:
    """Read the ``quantization_config`` of an AutoRound checkpoint, whose tensors are stored like AWQ or GPTQ.

    Which of the two is in its ``packing_format``. Its ``extra_config`` becomes ``overrides``. Raises
    ``UnknownWeightsFormat`` for a kind that vlfit does not run, ``CheckpointError`` for invalid fields.
    """
    packing = section.text("packing_format", "auto_round:auto_gptq")
    readers = {"auto_gptq": read_gptq, "gptq": read_gptq, "auto_awq": read_awq, "awq": read_awq}
    program, _, layout = packing.rpartition(":")
    if program not in ("", "auto_round") or layout not in readers:
        raise _unsupported(section, "packing_format", packing)
    if section.text("data_type", "int") != "int":
        raise _unsupported(section, "data_type", section.values["data_type"])
    if section.integer("act_bits", _UNQUANTIZED_BITS) < _UNQUANTIZED_BITS:
        raise _unsupported(section, "act_bits", section.values["act_bits"])
    reader = readers[layout]
    overrides: list[tuple[str, GptqAwqScheme | None]] = []
    extra = section.section("extra_config")
    for name in extra.values:
        changes = extra.section(name)
        unquantized = changes.integer("bits", section.integer("bits")) >= _UNQUANTIZED_BITS
        scheme = None if unquantized else reader(_with_changes(section, changes)).default
        overrides.append((f"(?:{name})$", scheme))
    read = reader(_with_changes(section, Fields({}, section.file, section.prefix)))
    return replace(read, overrides=tuple(overrides))


def _with_changes(section: Fields, changes: Fields) -> Fields:
    """AutoRound's settings with ``changes`` applied, in the fields of AWQ and GPTQ."""
    values = {name: section.values.get(name) for name in ("bits", "group_size", "sym")}
    changed = {name: value for name, value in changes.values.items() if value is not None}
    return Fields({**values, "desc_act": False, **changed}, section.file, changes.prefix)


def _group_size(section: Fields, bits: int) -> int | None:
    """Inputs that share a scale; None (written -1): all of a row."""
    name = _field_name(section, "group_size", "q_group_size")
    size = section.integer(name, minimum=-1)
    if size == -1:
        return None
    if size == 0 or size % (32 // bits):
        raise _unsupported(section, name, size)
    return size


def _field_name(section: Fields, name: str, *older: str) -> str:
    """The one of these names that ``section`` has; ``name`` if it has none of them."""
    return next((each for each in (name, *older) if section.has(each)), name)


def _unsupported(section: Fields, name: str, value: object) -> UnknownWeightsFormat:
    """The error for a field with a value that vlfit does not run."""
    return UnknownWeightsFormat(f"config.json: {section.prefix}{name} is {value!r}", _SUPPORTED)
