"""Linear layers as AWQ and GPTQ store them: matrices that stand on their side, under names of their own.

Both have ``qweight``, ``scales`` and ``qzeros`` in the place of a weight [outputs, inputs], each with its
inputs first. They are translated into compressed-tensors' names (``quantization.py``), which the rest of
vlfit uses: after ``read_in`` a tensor is called ``weight_packed``, has outputs first, and ``Layout`` says
how it lies in its file.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.headers import Layout, TensorInfo
from vlfit.errors import CheckpointError, MissingTensor, UnknownWeightsFormat, WrongShape

QWEIGHT = ".qweight"
# What stands for a weight in the files, and after which word compressed-tensors calls it.
_PARTS = {"qweight": "packed", "scales": "scale", "qzeros": "zero_point", "g_idx": "g_idx"}
_ANOTHER = "config.json and the weights are of different checkpoints. Fetch both again."
_SCALES = ("F16", "BF16", "F32")
_ZEROS_SHARE_A_WORD = 8  # of 4 bits; zero points of 8 bits are not stored anywhere else


@dataclass(frozen=True, slots=True)
class Stored:
    """How one linear layer is stored: codes of ``bits``, a scale for each ``group_size`` inputs (None: all).

    ``symmetric``: the zero point is the middle code (8 of 16, 128 of 256), whatever ``qzeros`` says of it.
    ``ordered``: inputs were put into groups by another order than their own (``g_idx`` says which).
    """

    bits: int
    group_size: int | None
    symmetric: bool
    ordered: bool = False

    @property
    def codes_per_word(self) -> int:
        return 32 // self.bits


@dataclass(frozen=True, slots=True)
class ByInputs:
    """``quantization_config`` of AWQ and GPTQ. ``codes`` and ``zeros``: how ``qweight`` and ``qzeros`` lie.

    ``others``: patterns of modules that are not stored as most are, the first that matches counts; None: not
    converted at all.
    """

    most: Stored
    codes: Layout
    zeros: Layout
    others: tuple[tuple[str, Stored | None], ...] = ()

    def of(self, module: str) -> Stored | None:
        """How ``module`` is stored. Raises ``CheckpointError`` for a pattern that is none."""
        for pattern, stored in self.others:
            try:
                if re.match(pattern, module):
                    return stored
            except re.error as error:
                raise CheckpointError(
                    f"config.json: quantization_config.dynamic has the pattern {pattern!r}: {error}",
                    "Compare the file with the original checkpoint's.",
                ) from None
        return self.most

    def read_in(
        self, matrices: Mapping[str, tuple[int, int]], tensors: Mapping[str, TensorInfo]
    ) -> tuple[dict[str, Stored], dict[str, TensorInfo]]:
        """Which modules are stored so, and ``tensors`` with theirs in the words of compressed-tensors.

        ``matrices`` are the model's linear layers: outputs and inputs by the name of the module. Those that
        have a ``qweight`` are converted, whatever config.json means. Raises ``MissingTensor``, ``WrongShape``
        and ``UnknownWeightsFormat``, with the names that the files have.
        """
        converted: dict[str, Stored] = {}
        read: dict[str, list[TensorInfo]] = {}  # by a name in the files: what comes in its place
        for module, (rows, columns) in matrices.items():
            if module + QWEIGHT not in tensors:
                continue
            stored = self.of(module)
            if stored is None:
                raise CheckpointError(
                    f"{module}{QWEIGHT} is there, but config.json says that {module} keeps its weight",
                    _ANOTHER,
                )
            converted[module] = stored
            read |= {f"{module}.{part}": [] for part in _PARTS}
            read[module + QWEIGHT] = self._read_module(module, rows, columns, stored, tensors)
        named = (kept for name, info in tensors.items() for kept in read.get(name, [info]))
        return converted, {info.name: info for info in named}

    def _read_module(
        self, module: str, rows: int, columns: int, stored: Stored, tensors: Mapping[str, TensorInfo]
    ) -> list[TensorInfo]:
        """What stands for the weight of ``module``, in the order that it is loaded in."""
        groups, words = _groups(module, rows, columns, stored), columns // stored.codes_per_word
        in_file = (columns, rows // 8) if self.codes is Layout.AWQ_CODES else (words, rows)
        zeros = (groups, rows // stored.codes_per_word)

        def read(part: str, in_file: tuple[int, ...], dtypes: tuple[str, ...], **changes: Any) -> None:
            info = _find(f"{module}.{part}", in_file, dtypes, tensors)
            found.append(replace(info, name=f"{module}.weight_{_PARTS[part]}", **changes))

        found: list[TensorInfo] = []
        read("qweight", in_file, ("I32",), shape=(rows, words), layout=self.codes)
        read("scales", (groups, rows), _SCALES, shape=(rows, groups), layout=Layout.TRANSPOSED)
        if not stored.symmetric:
            read("qzeros", zeros, ("I32",), shape=zeros[::-1], layout=self.zeros)
        if stored.ordered:
            read("g_idx", (columns,), ("I32",))
        return found


def _groups(module: str, rows: int, columns: int, stored: Stored) -> int:
    """How many groups the inputs of ``module`` make. Raises ``UnknownWeightsFormat`` where they do not."""
    size = stored.group_size or columns
    if columns % size or columns % stored.codes_per_word:
        raise UnknownWeightsFormat(
            f"{module} has {columns} inputs, which are no whole number of groups of {size}", _ANOTHER
        )
    if rows % _ZEROS_SHARE_A_WORD:
        raise UnknownWeightsFormat(
            f"{module} has {rows} outputs, which are no multiple of {_ZEROS_SHARE_A_WORD}", _ANOTHER
        )
    return columns // size


def _find(
    name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], tensors: Mapping[str, TensorInfo]
) -> TensorInfo:
    info = tensors.get(name)
    if info is None:
        raise MissingTensor(f"{name} is missing", f"{_ANOTHER} Or a shard is missing.")
    if info.shape != shape:
        raise WrongShape(
            f"{name} has shape {list(info.shape)}; config.json calls for {list(shape)}", _ANOTHER
        )
    if info.dtype not in dtypes:
        raise UnknownWeightsFormat(
            f"{name} is stored as {info.dtype}", f"vlfit reads {' and '.join(dtypes)} there."
        )
    return info


# ``quantization_config`` of AWQ checkpoints, as AutoAWQ and GPTQModel write them (quant_method ``awq``).
#
# Fields under their older names too. Of the layouts only ``gemm`` is read, which AutoAWQ's ``WQLinear_GEMM``
# defines.


AWQ_METHOD = "awq"
WHAT_IS_READ = (
    "vlfit reads AWQ of version gemm in 4 bits, GPTQ in 4 bits or symmetric 8 bits, and AutoRound in the "
    "layout of either. vlfit convert makes int4 from the original checkpoint."
)


def read_awq(section: Fields) -> ByInputs:
    """Raises ``UnknownWeightsFormat`` for what vlfit does not run, ``CheckpointError`` for wrong fields."""
    name = named(section, "version", "checkpoint_format", "format")
    version = section.text(name, "gemm")
    if version.lower() != "gemm":
        raise unknown(section, name, version)
    if section.values.get("backend") == "llm-awq":  # transformers' way to say the version of that name
        raise unknown(section, "backend", "llm-awq")
    bits = section.integer(named(section, "bits", "w_bit"))
    if bits != 4:
        raise unknown(section, "bits", bits)
    size = group_size(section, bits)
    return ByInputs(Stored(bits, size, symmetric=False), Layout.AWQ_CODES, Layout.AWQ_ZEROS)


def group_size(section: Fields, bits: int) -> int | None:
    """How many inputs share a scale: None where all of a row do, which is written -1."""
    name = named(section, "group_size", "q_group_size")
    size = section.integer(name, least=-1)
    if size == -1:
        return None
    if size == 0 or size % (32 // bits):
        raise unknown(section, name, size)
    return size


def named(section: Fields, name: str, *older: str) -> str:
    """The name of a field that ``section`` has under one of these; the first if it has none of them."""
    return next((each for each in (name, *older) if section.has(each)), name)


def unknown(section: Fields, name: str, value: object) -> UnknownWeightsFormat:
    """The error for a field whose value vlfit does not run."""
    return UnknownWeightsFormat(f"config.json: {section.prefix}{name} is {value!r}", WHAT_IS_READ)


# ``quantization_config`` of GPTQ checkpoints, as AutoGPTQ, GPTQModel and optimum write them.
#
# A zero point is stored less one (``gptq``) or as it is (``gptq_v2``; see ``convert_gptq_v1_to_v2_format`` of
# GPTQModel). ``dynamic`` overrides settings for some modules.


GPTQ_METHOD = "gptq"
_ZEROS = {"gptq": Layout.ONE_LESS, "gptq_v2": Layout.TRANSPOSED}
# With one of these the model computes something else than its weights say.
_MORE_THAN_WEIGHTS = ("activation", "adapter", "rotation", "is_marlin_format")
_LEFT_OUT, _ALSO = "-:", "+:"


def read_gptq(section: Fields) -> ByInputs:
    """Raises ``UnknownWeightsFormat`` for what vlfit does not run, ``CheckpointError`` for wrong fields."""
    name = named(section, "checkpoint_format", "format")
    written = section.text(name, "gptq")
    if written not in _ZEROS:
        raise unknown(section, name, written)
    for name in _MORE_THAN_WEIGHTS:
        if section.values.get(name):
            raise unknown(section, name, section.values[name])
    if str(section.values.get("pack_dtype") or "int32").removeprefix("torch.") != "int32":
        raise unknown(section, "pack_dtype", section.values["pack_dtype"])
    most = _stored(section)
    return ByInputs(most, Layout.TRANSPOSED, _ZEROS[written], _dynamic(section))


def _dynamic(section: Fields) -> tuple[tuple[str, Stored | None], ...]:
    """Patterns of modules that are stored in another way, or (None) not converted."""
    dynamic = section.section("dynamic")
    others: list[tuple[str, Stored | None]] = []
    for pattern in dynamic.values:
        if pattern.startswith(_LEFT_OUT):
            others.append((pattern.removeprefix(_LEFT_OUT), None))
            continue
        changed = dynamic.section(pattern)
        together = Fields({**section.values, **changed.values}, section.file, changed.prefix)
        others.append((pattern.removeprefix(_ALSO), _stored(together)))
    return tuple(others)


def _stored(section: Fields) -> Stored:
    bits = section.integer("bits")
    symmetric = section.flag("sym", True)
    if bits not in (4, 8):
        raise unknown(section, "bits", bits)
    if bits == 8 and not symmetric:
        raise unknown(section, "sym", False)
    size = group_size(section, bits)
    # Where all inputs share a scale there is but one group, whatever their order.
    return Stored(bits, size, symmetric, section.flag("desc_act") and size is not None)


# ``quantization_config`` of AutoRound (quant_method ``auto-round``), whose tensors lie as AWQ's or GPTQ's.
#
# ``packing_format`` says which of both; ``extra_config`` overrides settings by module name. Read as vLLM's
# ``AutoRoundConfig`` does.


AUTO_ROUND_METHODS = ("auto-round", "intel/auto-round")
_PLAIN_BITS = 16


def read_auto_round(section: Fields) -> ByInputs:
    """Raises ``UnknownWeightsFormat`` for what vlfit does not run, ``CheckpointError`` for wrong fields."""
    packing = section.text("packing_format", "auto_round:auto_gptq")
    readers = {"auto_gptq": read_gptq, "gptq": read_gptq, "auto_awq": read_awq, "awq": read_awq}
    program, _, layout = packing.rpartition(":")
    if program not in ("", "auto_round") or layout not in readers:
        raise unknown(section, "packing_format", packing)
    if section.text("data_type", "int") != "int":
        raise unknown(section, "data_type", section.values["data_type"])
    if section.integer("act_bits", _PLAIN_BITS) < _PLAIN_BITS:
        raise unknown(section, "act_bits", section.values["act_bits"])
    reader = readers[layout]
    others: list[tuple[str, Stored | None]] = []
    extra = section.section("extra_config")
    for name in extra.values:
        changed = extra.section(name)
        kept = changed.integer("bits", section.integer("bits")) >= _PLAIN_BITS
        others.append((f"(?:{name})$", None if kept else reader(_as_one(section, changed)).most))
    form = reader(_as_one(section, Fields({}, section.file, section.prefix)))
    return ByInputs(form.most, form.codes, form.zeros, tuple(others))


def _as_one(section: Fields, changed: Fields) -> Fields:
    """``section`` with what ``changed`` says in its place, in the words of AWQ and GPTQ."""
    values = {name: section.values.get(name) for name in ("bits", "group_size", "sym")}
    said = {name: value for name, value in changed.values.items() if value is not None}
    return Fields({**values, "desc_act": False, **said}, section.file, changed.prefix)
