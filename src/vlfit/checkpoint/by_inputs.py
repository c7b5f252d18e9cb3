"""Linear layers as AWQ and GPTQ store them: matrices that stand on their side, under names of their own.

Both have ``qweight``, ``scales`` and ``qzeros`` in the place of a weight [outputs, inputs], each with its
inputs first. Knows which names and shapes these have, and what each of them is in the words of
compressed-tensors (``quantization.py``), which all the rest of vlfit speaks: from ``read_in`` on, a tensor is
called ``weight_packed``, has outputs first, and says how it lies in its file (``Layout``).
Does not know: config.json (``awq.py`` and ``gptq.py`` do) or values (``engine/repack.py`` does).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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
