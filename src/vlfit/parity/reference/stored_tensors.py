"""Tensors of safetensors files in float32, each by the definition of its format, a slice of rows at a time.

Which format a matrix has is told by the tensors that are there: ``weight`` alone (16 or 32 bits),
``weight`` and ``weight_scale_inv`` (official FP8), ``weight`` and ``weight_scale`` (compressed-tensors int8
and FP8), ``weight_packed`` (compressed-tensors in words), ``qweight`` (AWQ and GPTQ). Nothing of the engine's
loader is used. Sources: the safetensors format; compressed-tensors' ``pack_quantized`` and
``naive_quantized`` compressors; AutoGPTQ's and GPTQModel's ``QuantLinear``; AutoAWQ's
``WQLinear_GEMM``; DeepSeek's block FP8.
"""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Lock
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from vlfit.errors import CheckpointError

# Of float32 weights that are dequantized at a time: few, so that they stay in the processor's caches from
# unpacking to the product (64 MiB took 5 ns for each weight of 4 bits, 2 MiB take 1).
SLICE_BYTES = 2 << 20
# Of slices of formats that are slow to dequantize, which several runs of a layer use; more is done again.
KEPT_BYTES = 512 << 20
_ALIGNED_ROWS = 256  # slices begin at a multiple: blocks of 128 rows and words of 8 rows stay whole
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight outputs


class WeightSource(Protocol):
    """Where a model's weights come from, by the names of safetensors files. Threads may call it at once.

    ``is_slow``: reading rows takes longer than keeping them in RAM.
    """

    is_slow: bool

    def has(self, name: str) -> bool:
        """Whether there is a tensor ``name``, or a module ``name`` that has a weight in any format."""
        ...

    def vector(self, name: str) -> Tensor:
        """A tensor that is not quantized, in its own shape, float32."""
        ...

    def rows(self, module: str, start: int, stop: int, shape: tuple[int, int]) -> Tensor:
        """Rows ``start`` to ``stop`` of the matrix of ``module``, dequantized to float32.

        ``shape``: [outputs, inputs] of the whole matrix.
        """
        ...


class Weights:
    """Products with the matrices of a ``WeightSource``, a slice of them in memory for each thread.

    Slices are shared out among threads that compute alone: threads that compute a slice together wait for
    one another thousands of times, which takes long beside other programs.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.has, self.vector = source.has, source.vector
        self._keeps = False
        self.threads = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None
        self._kept: dict[tuple[str, int, int], Tensor] = {}
        self._kept_bytes = 0

    @contextmanager
    def keeping(self, *, several: bool) -> Iterator[None]:
        """Keep slices of a slow source until ``forget``, up to ``KEPT_BYTES``; if ``several`` is true."""
        self._keeps = several
        try:
            yield
        finally:
            self._keeps = False
            self.forget()

    def forget(self) -> None:
        """Free the slices that were kept."""
        self._kept.clear()
        self._kept_bytes = 0

    def _rows(self, module: str, start: int, stop: int, shape: tuple[int, int]) -> Tensor:
        found = self._kept.get((module, start, stop))
        if found is None:
            found = self.source.rows(module, start, stop, shape)
            if self._keeps and self.source.is_slow and self._kept_bytes + found.nbytes <= KEPT_BYTES:
                self._kept[module, start, stop] = found
                self._kept_bytes += found.nbytes
        return found

    def linear(
        self, module: str, x: Tensor, outputs: int, *, first: int = 0, total: int | None = None
    ) -> Tensor:
        """``x`` [n, inputs] times the matrix of ``module``, plus its bias if it has one: [n, outputs].

        ``first``, ``total``: the outputs are ``first`` to ``first + outputs`` of a matrix of ``total`` rows.
        """
        inputs = x.shape[-1]
        shape = (outputs if total is None else total, inputs)
        at_once = max(SLICE_BYTES // (4 * inputs) // _ALIGNED_ROWS, 1) * _ALIGNED_ROWS
        end = first + outputs
        begins = [first, *range((first // at_once + 1) * at_once, end, at_once)]

        def product(start: int, stop: int) -> Tensor:
            with torch.inference_mode():
                return x @ self._rows(module, start, stop, shape).T

        if len(begins) == 1 or self.threads == 1:
            parts = list(map(product, begins, [*begins[1:], end]))
        else:
            parts = list(self._workers().map(product, begins, [*begins[1:], end]))
        out = torch.cat(parts, dim=-1)
        if self.has(f"{module}.bias"):
            out += self.vector(f"{module}.bias")[first:end]
        return out

    def _workers(self) -> ThreadPoolExecutor:
        """Threads that each compute alone. torch's number of threads is each thread's own, once it is set."""
        if self._pool is None:
            here = torch.get_num_threads()
            begun = Barrier(self.threads)

            def begin(_: int) -> None:
                torch.set_num_threads(1)
                begun.wait(60)

            self._pool = ThreadPoolExecutor(self.threads, "reference")
            list(self._pool.map(begin, range(self.threads)))
            torch.set_num_threads(here)  # of threads that begin later
        return self._pool

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What this thread computes between products it computes alone, too."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def lookup(self, module: str, ids: Tensor, shape: tuple[int, int]) -> Tensor:
        """Rows ``ids`` of the table of ``module``: [n, columns]."""
        unique, places = ids.unique(return_inverse=True)
        rows = [self.source.rows(module, index, index + 1, shape) for index in unique.tolist()]
        return torch.cat(rows)[places]


class SafetensorsSource:
    """The weights of a folder of safetensors files. Raises ``CheckpointError`` for what it cannot read."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._files = _files_by_tensor(folder)
        self.is_slow = any(name.endswith(".qweight") for name in self._files)
        self._opened: dict[Path, Any] = {}
        self._opening = Lock()
        self._whole: tuple[str, Tensor] = ("", torch.empty(0))  # the last AWQ or GPTQ matrix
        quantization = config.get("quantization_config") or config.get("text_config", {}).get(
            "quantization_config"
        )
        self._quantization: dict[str, Any] = quantization or {}

    def has(self, name: str) -> bool:
        """As ``WeightSource.has``."""
        endings = ("", ".weight", ".weight_packed", ".qweight")
        return any(name + ending in self._files for ending in endings)

    def _slice(self, name: str) -> Any:
        path = self._files.get(name)
        if path is None:
            raise CheckpointError(f"the checkpoint has no tensor {name}", "Fetch it again: vlfit pull NAME.")
        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        return self._opened[path].get_slice(name)

    def _raw(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        part = self._slice(name)
        if not part.get_shape():
            return torch.as_tensor(part[...])
        tensor: Tensor = part[:] if start is None else part[start:stop]
        return tensor

    def vector(self, name: str) -> Tensor:
        """As ``WeightSource.vector``."""
        return self._raw(name).float()

    def rows(self, module: str, start: int, stop: int, shape: tuple[int, int]) -> Tensor:
        """As ``WeightSource.rows``."""
        if f"{module}.weight_packed" in self._files:
            return self._packed(module, start, stop, shape[1])
        if f"{module}.qweight" in self._files:
            with self._opening:
                if self._whole[0] != module:
                    self._whole = (module, self._gptq_or_awq(module, shape))
                return self._whole[1][start:stop]
        codes = self._raw(f"{module}.weight", start, stop)
        # A convolution over whole patches is a product with its flattened kernel.
        wide = codes.flatten(1).float()
        for scale in ("weight_scale_inv", "weight_scale"):
            if f"{module}.{scale}" in self._files:
                return wide * self._scales(f"{module}.{scale}", start, stop, shape)
        return wide

    def _scales(self, name: str, start: int, stop: int, shape: tuple[int, int]) -> Tensor:
        """Scales of rows ``start`` to ``stop``, one for each weight (or broadcast over the columns)."""
        scales = self._raw(name).float()
        if scales.numel() == 1:
            return scales.reshape(1, 1)
        scales = scales.reshape(len(scales), -1)
        height, width = self._block(shape, scales)
        rows = torch.arange(start, stop) // height
        return _spread(scales[rows], width, shape[1])

    def _block(self, shape: tuple[int, int], scales: Tensor) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        if len(scales) == shape[0]:
            return 1, -(-shape[1] // scales.shape[1])
        size = self._quantization.get("weight_block_size")
        groups = self._quantization.get("config_groups", {})
        for group in groups.values():
            size = size or group.get("weights", {}).get("block_structure")
        height, width = size or (128, 128)
        return int(height), int(width)

    def _packed(self, module: str, start: int, stop: int, columns: int) -> Tensor:
        words = self._raw(f"{module}.weight_packed", start, stop)
        bits = 32 * words.shape[1] // columns if words.shape[1] * 32 >= columns * 4 else 4
        bits = 8 if bits >= 8 else 4
        codes = _unpack(words, bits)[:, :columns]
        scales = self._raw(f"{module}.weight_scale", start, stop).float().reshape(len(words), -1)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
        if f"{module}.weight_zero_point" in self._files:
            # Zero points are packed along the rows: a word has those of 32 / bits consecutive ones.
            each = 32 // bits
            packed = self._raw(f"{module}.weight_zero_point", start // each, -(-stop // each))
            zeros = _unpack(packed.T.contiguous(), bits).T[start % each :][: len(words)].float()
        if f"{module}.weight_g_idx" in self._files:
            group = self._raw(f"{module}.weight_g_idx").long()
            return (codes.float() - zeros[:, group]) * scales[:, group]
        size, last = divmod(columns, scales.shape[1])
        if last:  # the last group is cut
            spread = [_spread(each, size + 1, columns) for each in (zeros, scales)]
            return codes.float().sub_(spread[0]).mul_(spread[1])
        wide = codes.float().view(len(words), -1, size)
        return wide.sub_(zeros[:, :, None]).mul_(scales[:, :, None]).view(len(words), columns)

    def _gptq_or_awq(self, module: str, shape: tuple[int, int]) -> Tensor:
        """A whole matrix [outputs, inputs]; both formats store inputs first."""
        outputs, inputs = shape
        words, scales = self._raw(f"{module}.qweight"), self._raw(f"{module}.scales").float()
        zeros = self._raw(f"{module}.qzeros")
        if words.shape[0] == inputs:  # AWQ: a word has eight outputs of one input
            codes, points = _unpack_awq(words, outputs), _unpack_awq(zeros, outputs)
        else:  # GPTQ: a word has the codes of consecutive inputs of one output
            bits = 32 * words.shape[0] // inputs
            codes = _unpack(words.T.contiguous(), bits).T[:inputs]
            if self._quantization.get("checkpoint_format") != "gptq_v2":
                # Zero points are stored less one. GPTQModel subtracts from whole words, so a point of 0
                # borrows from the next one; adding to whole words gives it back.
                zeros = zeros + sum(1 << place for place in range(0, 32, bits))
            points = _unpack(zeros, bits)[:, :outputs]
        if f"{module}.g_idx" in self._files:
            group = self._raw(f"{module}.g_idx").long()
        else:
            group = torch.arange(inputs) // -(-inputs // len(scales))
        return ((codes.int() - points[group].int()).float() * scales[group]).T.contiguous()


def _spread(values: Tensor, size: int, columns: int) -> Tensor:
    """``values`` [n, groups], each ``size`` times in a row, cut to [n, columns]; the last may be cut."""
    if size == 1:
        return values
    wide = values[:, :, None].expand(-1, -1, size).flatten(1)
    return wide[:, :columns]


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Codes of 32-bit words [n, m], the first in the lowest bits: [n, m * 32 / bits], 8 bits without sign."""
    whole = words.to(torch.int32).contiguous()
    if bits in (4, 8) and sys.byteorder == "little":
        octets = whole.view(torch.uint8)
        return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: Tensor = (whole[..., None] >> shifts).bitwise_and_(2**bits - 1)
    return codes.flatten(1).to(torch.uint8)


def _unpack_awq(words: Tensor, outputs: int) -> Tensor:
    """Codes of AWQ's words [n, outputs / 8], put into the order of outputs."""
    codes = _unpack(words, 4).reshape(len(words), -1, 8)
    return codes[:, :, list(_AWQ_ORDER)].flatten(1)[:, :outputs]


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        mapped = json.loads(index.read_text("utf-8"))["weight_map"]
        return {name: folder / file for name, file in mapped.items()}
    path = folder / "model.safetensors"
    if not path.exists():
        raise CheckpointError(f"{folder} has no safetensors files", "Fetch the checkpoint again.")
    with safe_open(path, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), path)
