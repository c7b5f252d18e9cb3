"""A checkpoint of any architecture: its files, its config as it stands, and which bytes are of what.

For models that only transformers runs. What tensors belong to is told by their names, as most architectures
name them.
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
from vlfit.checkpoint.source import locate
from vlfit.checkpoint.tensors import is_vision
from vlfit.errors import NotACheckpoint

TEXT, VISION, EMBEDDING = "weights.text", "weights.vision", "weights.embedding"
PARTS = (TEXT, VISION, EMBEDDING)

_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|lm_head|wte|tok_embeddings|embed_out|word_embeddings)(\.|$)")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class AnyCheckpoint:
    """A checkpoint whose config and headers could be read, whatever its architecture.

    ``config`` is ``config.json`` as it stands. No weights are in memory.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def model_type(self) -> str:
        """The architecture, as transformers calls it; "" where the config does not say."""
        told = self.config.get("model_type")
        return told if isinstance(told, str) else ""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(info.bytes for info in self.tensors.values())

    @property
    def parameter_count(self) -> int:
        """Number of values in all tensors; where some are packed, that of the packs."""
        return sum(info.count for info in self.tensors.values())

    @property
    def weights_format(self) -> str:
        """``bf16``, ``fp16``, ``fp32``, or the format of safetensors that most values are in."""
        return {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}.get(self.stored, self.stored.lower())

    @property
    def quantized(self) -> bool:
        """Whether tensors are what a quantizer left of them."""
        return isinstance(self.config.get("quantization_config"), Mapping)

    @property
    def stored(self) -> str:
        """The format of safetensors that most values are in: ``BF16``, ``F32``, ..."""
        counts: dict[str, int] = {}
        for info in self.tensors.values():
            counts[info.dtype] = counts.get(info.dtype, 0) + info.count
        return max(counts, key=lambda dtype: counts[dtype], default="BF16")

    def bytes_loaded(self, value_bytes: int) -> dict[str, int]:
        """Bytes on a device by ledger line, floats as values of ``value_bytes``, all else as it is stored.

        An output head that the config says is the table of tokens is not counted, though a file may hold it.
        """
        tied = self._tied()
        sizes = dict.fromkeys(PARTS, 0)
        for info in self.tensors.values():
            if tied and _HEAD.search(info.name):
                continue
            sizes[part_of(info.name)] += info.count * value_bytes if info.dtype in _FLOATS else info.bytes
        return sizes

    def _tied(self) -> bool:
        text = self.config.get("text_config")
        inner = text.get("tie_word_embeddings") if isinstance(text, Mapping) else None
        told = self.config.get("tie_word_embeddings", inner)
        return told is True


def part_of(name: str) -> str:
    """The ledger line that a tensor belongs to, by its name: ``weights.text`` if nothing tells otherwise."""
    if is_vision(name):
        return VISION
    return EMBEDDING if _EMBEDDING.search(name) else TEXT


def open_any(model: str | Path, files: hub.Files, progress: ByteProgress | None = None) -> AnyCheckpoint:
    """Open ``mini``, a folder, or a hub name, of whatever architecture; a hub name is downloaded if need be.

    ``files``: what is fetched of it, and who judges its config (``hub.any_model``). Raises what that raises,
    ``CheckpointError`` when config or headers cannot be read, and ``HubError`` when files cannot be fetched.
    """
    name, folder = locate(model, progress, files)
    checkpoint = read_any(name, folder)
    files.check(folder)
    return checkpoint


def read_any(name: str, folder: Path) -> AnyCheckpoint:
    """Config and headers of ``folder``."""
    if not (folder / "config.json").is_file():
        what = "holds no config.json" if folder.is_dir() else "is not a folder"
        raise NotACheckpoint(f"{folder} {what}", "Give a checkpoint's folder or a name on the hub.")
    return AnyCheckpoint(name, folder, Fields.read(folder / "config.json").values, read_headers(folder))
