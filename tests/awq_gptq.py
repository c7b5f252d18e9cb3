"""AWQ and GPTQ checkpoints, written from the definitions of their forms, code by code, in numpy.

Sources: ``WQLinear_GEMM.from_linear`` of AutoAWQ 0.2.9; ``pack_original`` and
``convert_gptq_v2_to_v1_format`` of GPTQModel 7.7. Knows nothing of how vlfit reads them; tests
hold that to ``Rounded.widened``.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.edit import change_json, copy_of

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Numbers = NDArray[Any]


@dataclass(frozen=True)
class Rounded:
    """A weight [outputs, inputs] in codes: weight = (code - zero) * scale, both of the input's group.

    ``zero`` and ``scale`` are [outputs, groups], ``group_of`` [inputs].
    """

    codes: Numbers
    zero: Numbers
    scale: Numbers
    group_of: Numbers
    bits: int

    def widened(self) -> Tensor:
        """In float32: one subtraction, one product."""
        zero, scale = self.zero[:, self.group_of], self.scale[:, self.group_of]
        return torch.from_numpy((self.codes - zero).astype(np.float32) * scale.astype(np.float32))


def rounded(weight: Tensor, bits: int, group: int, symmetric: bool, order: Numbers | None = None) -> Rounded:
    """``weight`` to the nearest code; group ``g`` has the inputs ``order[g * group : (g + 1) * group]``."""
    values = weight.float().numpy()
    inputs = values.shape[1]
    group = inputs if group == -1 else group
    group_of = np.empty(inputs, np.int64)
    group_of[np.arange(inputs) if order is None else order] = np.arange(inputs) // group
    most = 2**bits - 1
    zeros, scales = [], []
    for number in range(inputs // group):
        part = values[:, group_of == number]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scale = ((high - low) / most).astype(np.float16).astype(np.float32)
        zeros.append(
            np.full(len(part), 2 ** (bits - 1)) if symmetric else np.rint(-low / scale).clip(0, most)
        )
        scales.append(scale)
    zero, scale = np.stack(zeros, 1).astype(np.int64), np.stack(scales, 1)
    codes = (np.rint(values / scale[:, group_of]) + zero[:, group_of]).clip(0, most).astype(np.int64)
    return Rounded(codes, zero, scale, group_of, bits)


def awq_tensors(weight: Rounded) -> dict[str, Tensor]:
    """Eight outputs share a word of ``qweight`` and of ``qzeros``, in AutoAWQ's order."""

    def pack(codes: Numbers) -> Tensor:  # [outputs, any] to [any, outputs / 8]
        words = np.zeros((codes.shape[1], len(codes) // 8), np.uint32)
        for word in range(words.shape[1]):
            for place, output in enumerate(_AWQ_ORDER):
                words[:, word] |= codes[8 * word + output].astype(np.uint32) << np.uint32(4 * place)
        return torch.from_numpy(words.view(np.int32))

    scales = torch.from_numpy(weight.scale.T.copy()).half()
    return {"qweight": pack(weight.codes), "qzeros": pack(weight.zero), "scales": scales}


def gptq_tensors(weight: Rounded, *, version: int = 1) -> dict[str, Tensor]:
    """Inputs share the words of ``qweight``, outputs those of ``qzeros``; version 1 has zeros less one."""
    per, bits = 32 // weight.bits, weight.bits
    outputs, inputs = weight.codes.shape
    qweight = np.zeros((inputs // per, outputs), np.uint32)
    for number in range(inputs):
        qweight[number // per] |= weight.codes[:, number].astype(np.uint32) << np.uint32(
            bits * (number % per)
        )
    qzeros = np.zeros((weight.zero.shape[1], outputs // per), np.uint32)
    for output in range(outputs):
        qzeros[:, output // per] |= weight.zero[output].astype(np.uint32) << np.uint32(bits * (output % per))
    if version == 1:
        qzeros -= np.uint32(0x11111111 if bits == 4 else 0x01010101)
    return {
        "qweight": torch.from_numpy(qweight.view(np.int32)),
        "qzeros": torch.from_numpy(qzeros.view(np.int32)),
        "scales": torch.from_numpy(weight.scale.T.copy()).half(),
        "g_idx": torch.from_numpy(weight.group_of.astype(np.int32)),
    }


def write(
    source: Path,
    target: Path,
    section: dict[str, Any],
    store: Callable[[str, Tensor], tuple[Rounded, dict[str, Tensor]] | None],
) -> tuple[Path, Path]:
    """The plain checkpoint ``source`` twice, in ``target``: stored, and with what that stands for, widened.

    ``store`` gives a weight's codes and tensors by its module's name and its values; None: it stays.
    ``section`` is the ``quantization_config``.
    """
    stored, plain = {}, {}
    for name, tensor in _tensors(source).items():
        module = name.removesuffix(".weight")
        done = store(module, tensor) if _is_linear(name, tensor) else None
        if done is None:
            stored[name], plain[name] = tensor, tensor.float()
            continue
        plain[name] = done[0].widened()
        stored |= {f"{module}.{part}": values.contiguous() for part, values in done[1].items()}
    folders = []
    for name, tensors in (("stored", stored), ("wide", plain)):
        folder = copy_of(source, target / name)
        for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
            file.unlink()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    change_json(folders[0] / "config.json", lambda config: config.update(quantization_config=section))
    return folders[0], folders[1]


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _is_linear(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and name.endswith("_proj.weight") and ".visual." not in name


def awq_section(**changes: Any) -> dict[str, Any]:
    """As AutoAWQ's ``to_transformers_dict`` writes it."""
    section = {
        "quant_method": "awq",
        "zero_point": True,
        "group_size": 32,
        "bits": 4,
        "version": "gemm",
        "modules_to_not_convert": ["visual"],
    }
    return section | changes


def gptq_section(**changes: Any) -> dict[str, Any]:
    """As GPTQModel writes it."""
    section = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05},
    }
    return section | changes


def as_awq(source: Path, target: Path, group: int = 32) -> tuple[Path, Path]:
    def store(module: str, weight: Tensor) -> tuple[Rounded, dict[str, Tensor]]:
        codes = rounded(weight, 4, group, symmetric=False)
        return codes, awq_tensors(codes)

    return write(source, target, awq_section(group_size=group), store)


def as_gptq(
    source: Path,
    target: Path,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    ordered: bool = False,
    version: int = 1,
    **changes: Any,
) -> tuple[Path, Path]:
    """``ordered``: the inputs of each layer are in an order that all who share these inputs have."""
    orders = np.random.default_rng(5)
    known: dict[tuple[str, int], Numbers] = {}

    def store(module: str, weight: Tensor) -> tuple[Rounded, dict[str, Tensor]]:
        parent, _, part = module.rpartition(".")
        shared = parent if part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") else module
        order = known.setdefault((shared, weight.shape[1]), orders.permutation(weight.shape[1]))
        codes = rounded(weight, bits, group, symmetric, order if ordered else None)
        return codes, gptq_tensors(codes, version=version)

    section = gptq_section(bits=bits, group_size=group, sym=symmetric, desc_act=ordered, **changes)
    section["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    return write(source, target, section, store)


def sections_of(folder: Path) -> Any:
    """The ``quantization_config`` in ``folder``."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
