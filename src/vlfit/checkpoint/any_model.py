"""Checkpoints of any architecture, for models that only transformers runs.

Which part a tensor belongs to (text, vision, embedding) is guessed from its name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlfit.api.progress import ByteProgress
from vlfit.checkpoint import hub
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.headers import TensorInfo, read_headers
from vlfit.checkpoint.source import locate_or_download, resolve_name
from vlfit.checkpoint.tensors import is_vision
from vlfit.errors import NotACheckpoint, UsageError

TEXT, VISION, EMBEDDING = "weights.text", "weights.vision", "weights.embedding"
PARTS = (TEXT, VISION, EMBEDDING)

_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|lm_head|wte|tok_embeddings|embed_out|word_embeddings)(\.|$)")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class AnyCheckpoint:
    """Config and tensor headers of a checkpoint of any architecture; no weights are in memory.

    ``config``: the parsed config.json. ``tensors``: by name. Whether the two agree has not been checked.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def model_type(self) -> str:
        """The ``model_type`` of config.json; "" without one."""
        model_type = self.config.get("model_type")
        return model_type if isinstance(model_type, str) else ""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(info.bytes for info in self.tensors.values())

    @property
    def parameter_count(self) -> int:
        """Number of values in all tensors; a packed word counts as one."""
        return sum(info.count for info in self.tensors.values())

    @property
    def weights_format(self) -> str:
        """``main_dtype`` as ``bf16``, ``fp16`` or ``fp32``; any other in lower case, such as ``f8_e4m3``."""
        return {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}.get(self.main_dtype, self.main_dtype.lower())

    @property
    def is_quantized(self) -> bool:
        """Whether config.json has a ``quantization_config``."""
        return isinstance(self.config.get("quantization_config"), Mapping)

    @property
    def main_dtype(self) -> str:
        """The safetensors dtype of most values: ``BF16``, ``F32``, ...; ``BF16`` without tensors."""
        counts: dict[str, int] = {}
        for info in self.tensors.values():
            counts[info.dtype] = counts.get(info.dtype, 0) + info.count
        return max(counts, key=lambda dtype: counts[dtype], default="BF16")

    def bytes_by_ledger_line(self, value_bytes: int) -> dict[str, int]:
        """Bytes on a device by ledger line (``PARTS``).

        F64, F32, F16 and BF16 values take ``value_bytes`` each; other dtypes, FP8 too, as much as in the
        file. A head that is tied to the embedding is not counted, even if a file has it.
        """
        tied = self._is_tied()
        sizes = dict.fromkeys(PARTS, 0)
        for info in self.tensors.values():
            if tied and _HEAD.search(info.name):
                continue
            sizes[ledger_line_of_tensor(info.name)] += (
                info.count * value_bytes if info.dtype in _FLOAT_DTYPES else info.bytes
            )
        return sizes

    def _is_tied(self) -> bool:
        text = self.config.get("text_config")
        nested = text.get("tie_word_embeddings") if isinstance(text, Mapping) else None
        return self.config.get("tie_word_embeddings", nested) is True


def ledger_line_of_tensor(name: str) -> str:
    """Ledger line of the tensor ``name``, one of ``PARTS``; ``weights.text`` for an unknown name."""
    if is_vision(name):
        return VISION
    return EMBEDDING if _EMBEDDING.search(name) else TEXT


def open_any_checkpoint(
    model: str | Path, files: hub.FileSelection, progress: ByteProgress | None = None
) -> AnyCheckpoint:
    """Open ``model``, any name that ``resolve_name`` takes; a hub model that is not here is downloaded.

    ``files``: what to download (``hub.transformers_files``); ``files.check`` is also called if nothing has to
    be downloaded. ``progress``: None prints on stderr. Raises the errors of ``files.check`` and of
    ``locate_or_download``, ``UsageError`` for a GGUF model, and ``CheckpointError`` for an invalid config or
    header.
    """
    if resolve_name(model)[0].is_gguf:
        raise UsageError(
            f"{model} is a GGUF model, which the transformers backend does not run",
            "Leave out --backend transformers, or name the original checkpoint.",
        )
    name, folder = locate_or_download(model, progress, files)
    checkpoint = read_any_checkpoint(name, folder)
    files.check(folder)
    return checkpoint


def read_any_checkpoint(name: str, folder: Path) -> AnyCheckpoint:
    """Read config.json and tensor headers in ``folder``, without checking them against each other.

    ``name``: becomes ``AnyCheckpoint.name``. Raises ``CheckpointError`` for missing or invalid files.
    """
    if not (folder / "config.json").is_file():
        what = "holds no config.json" if folder.is_dir() else "is not a folder"
        raise NotACheckpoint(f"{folder} {what}", "Give a checkpoint's folder or a name on the hub.")
    return AnyCheckpoint(name, folder, Fields.read(folder / "config.json").values, read_headers(folder))
