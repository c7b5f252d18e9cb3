"""Streams a checkpoint's tensors from its files to the device, each byte read once.

Knows: safetensors files (mapped into memory), dtypes, FP8 scales, stacking of projections with one input.
Does not know: the model. ``qwen3_vl/`` asks for tensors by name, in the order of the ledger.
"""

import mmap
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.source import Checkpoint
from vlfit.engine.layers.linear import DenseLinear, Fp8Linear, Linear, dequantize_fp8
from vlfit.errors import MissingTensor, UnknownWeightsFormat

TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


class Loader:
    """Reads tensors of one checkpoint. A context manager: leaving it unmaps the files.

    ``dtype`` is what floating-point tensors become. On a GPU FP8 weights stay FP8; a CPU has no unit for
    them and memory to spare, so there they are widened while loading.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self._progress = progress
        self._read = 0
        self._total = checkpoint.weight_bytes
        self._maps: dict[Path, mmap.mmap] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    def tensor(self, name: str) -> Tensor:
        """The tensor ``name`` on the device, in ``dtype``. Raises ``MissingTensor``."""
        info = self._info(name)
        tensor = torch.empty(info.shape, dtype=self.dtype, device=self.device)
        self._copy(info, tensor)
        return tensor

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """One linear layer from the matrices ``names`` (each ``NAME.weight``) stacked in order.

        Several names make one product of what would be several: q, k and v share their input, as do gate
        and up.
        """
        stacked_bias = torch.cat([self.tensor(f"{name}.bias") for name in names]) if bias else None
        infos = [self._info(f"{name}.weight") for name in names]
        if all(info.dtype == "F8_E4M3" for info in infos):
            return self._fp8_linear(names, stacked_bias)
        rows = [info.shape[0] for info in infos]
        weight = torch.empty((sum(rows), infos[0].shape[1]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, weight.split(rows), strict=True):
            self._fill(name, part)
        return DenseLinear(weight, stacked_bias)

    def _fp8_linear(self, names: tuple[str, ...], bias: Tensor | None) -> Linear:
        if self.device.type == "cpu":
            rows = [self._info(f"{name}.weight").shape[0] for name in names]
            columns = self._info(f"{names[0]}.weight").shape[1]
            weight = torch.empty((sum(rows), columns), dtype=self.dtype)
            for name, part in zip(names, weight.split(rows), strict=True):
                self._fill(name, part)
            return DenseLinear(weight, bias)
        parts = [self._fp8_part(name, self.device) for name in names]
        return Fp8Linear(parts, self._block(), bias)

    def _fill(self, name: str, target: Tensor) -> None:
        """``NAME.weight`` into ``target`` [out, in], widened if it is FP8."""
        info = self._info(f"{name}.weight")
        if info.dtype != "F8_E4M3":
            self._copy(info, target)
            return
        weight, scale = self._fp8_part(name, torch.device("cpu"))
        target.copy_(dequantize_fp8(weight, scale, self._block(), self.dtype))

    def _fp8_part(self, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
        weight_info = self._info(f"{name}.weight")
        scale_info = self._info(f"{name}.weight_scale_inv")
        weight = torch.empty(weight_info.shape, dtype=torch.float8_e4m3fn, device=device)
        scale = torch.empty(scale_info.shape, dtype=torch.float32, device=device)
        self._copy(weight_info, weight)
        self._copy(scale_info, scale)
        return weight, scale

    def _block(self) -> tuple[int, int]:
        fp8 = self.checkpoint.config.fp8
        if fp8 is None:
            raise UnknownWeightsFormat(
                "the files hold FP8 tensors, but config.json has no quantization_config",
                "take config.json from the same place as the weights",
            )
        return fp8.block_rows, fp8.block_columns

    def _info(self, name: str) -> TensorInfo:
        info = self.checkpoint.tensors.get(name)
        if info is None:
            raise MissingTensor(
                f"{self.checkpoint.name} has no tensor {name}",
                "the download may be incomplete: `vlfit pull` fetches what is missing",
            )
        return info

    def _copy(self, info: TensorInfo, target: Tensor) -> None:
        """Bytes of ``info`` into ``target``, converted; the file's pages are let go at once.

        Pages stay in the kernel's cache (the next start reads them from there) but no longer count as this
        process's memory: while loading there is no second copy of the model.
        """
        mapped = self._mapped(info.file)
        count = info.end - info.start
        if count:
            raw = torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=info.start)
            dtype = TORCH_DTYPES.get(info.dtype)
            if dtype is None:
                raise UnknownWeightsFormat(
                    f"tensor {info.name} has dtype {info.dtype}",
                    f"vlfit reads {', '.join(TORCH_DTYPES)}",
                )
            if raw.storage_offset() % dtype.itemsize:
                raw = raw.clone()
            target.copy_(raw.view(dtype).view(info.shape))
            del raw
            first = info.start - info.start % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, first, info.end - first)
        self._read += count
        if self._progress:
            self._progress(self._read, self._total)

    def _mapped(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as handle:
                # A private writable mapping: torch wants a writable buffer, and the file is never written.
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]
