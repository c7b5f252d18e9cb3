"""The engine's own modules at the true shapes of real models, on torch's meta device: sizes without numbers.

``Live`` counts the bytes of every live tensor, operation by operation, to compare the engine's code with the
plan. No GPU, no weights, no arithmetic.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlfit.checkpoint.catalog import CatalogEntry
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import G_IDX_SUFFIX
from vlfit.loading.loader import Loader
from vlfit.models.decoder import TextModel
from vlfit.models.qwen3_vl.vision import VisionTower
from vlfit.plan.shapes import Model, model_of

META = torch.device("meta")


class Live(TorchDispatchMode):
    """Bytes of the live storages made in this ``with`` block: ``now``, and their ``peak``.

    Only storages on a ``device`` of this kind count.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.now = 0
        self.peak = 0
        self._seen: dict[int, Any] = {}

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self.device:
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._seen:
            return

        def gone(_: Any) -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


class MetaLoader(Loader):
    """The real loader without reading: tensors have no bytes."""

    def _copy(self, info: TensorInfo, target: Tensor, *, asynchronous: bool = False) -> None:
        pass

    def _order(self, name: str) -> Tensor | None:
        stored = self.checkpoint.tensors.get(f"{name}{G_IDX_SUFFIX}")
        return None if stored is None else torch.arange(stored.shape[0])


@contextmanager
def live() -> Iterator[Live]:
    """Count what lives in the block, garbage collected before."""
    gc.collect()
    gc.freeze()  # what is left is not gone through again the next time
    # In inference mode torch would show composite operations whole, and hide what lives inside them.
    with torch.no_grad(), Live() as counter:
        yield counter


def config_of(entry: CatalogEntry) -> ModelConfig:
    assert isinstance(entry.config, ModelConfig)
    return entry.config


def model_of_entry(entry: CatalogEntry) -> Model:
    """The planner's model of ``entry``, whose config a test may have changed."""
    return model_of(entry.name, entry.config, entry.tensors, "catalog", family=entry.family)


def load(entry: CatalogEntry) -> tuple[TextModel, VisionTower, int, int]:
    """The text model, the vision tower, and the bytes that loading allocates for each."""
    with live() as counter:
        text = TextModel(config_of(entry), loader(entry))
        assert text.rope.axis is not None
        rope = text.rope.axis.nbytes + text.rope.inverse_frequencies.nbytes
        text_bytes = counter.now - rope
        tower = VisionTower(config_of(entry).required_vision, loader(entry))
        return text, tower, text_bytes, counter.now - rope - text_bytes


def loader(entry: CatalogEntry) -> MetaLoader:
    checkpoint = Checkpoint(entry.name, Path("nowhere"), config_of(entry), entry.tensors)
    return MetaLoader(checkpoint, META, torch.bfloat16)
