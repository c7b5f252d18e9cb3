"""The engine's own modules at the true shapes of real models, on torch's meta device: sizes without numbers.

``Live`` counts the bytes of every tensor that lives, operation by operation, so that a test can compare what
the engine's code holds with what the plan says it does. No GPU, no weights, no arithmetic.
"""

import weakref
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
from vlfit.checkpoint.tensors import ORDER_SUFFIX
from vlfit.loading.loader import Loader

META = torch.device("meta")


class Live(TorchDispatchMode):
    """Bytes of storages that were made in this ``with`` block and live ``now``, and their ``peak``.

    Those on a ``device`` of the given kind count.
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
    """The real loader, but for reading: a tensor's bytes stay where they are not."""

    def _copy(self, info: TensorInfo, target: Tensor, *, asynchronous: bool = False) -> None:
        pass

    def _order(self, name: str) -> Tensor | None:
        stored = self.checkpoint.tensors.get(f"{name}{ORDER_SUFFIX}")
        return None if stored is None else torch.arange(stored.shape[0])


def loader(entry: CatalogEntry) -> MetaLoader:
    assert isinstance(entry.config, ModelConfig)
    checkpoint = Checkpoint(entry.name, Path("nowhere"), entry.config, entry.tensors)
    return MetaLoader(checkpoint, META, torch.bfloat16)
