"""Bytes that the engine moves for a token: the plan's count against its own operations, one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.plan.on_meta import META, loader
from vlfit.checkpoint import catalog
from vlfit.checkpoint.quantization import FP8, INT4
from vlfit.plan import speed


class Moved(TorchDispatchMode):
    """Bytes that operations read and write; those that only look at memory in another way move none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        storages = {id(tensor.untyped_storage()) for tensor in given}
        is_view = all(id(tensor.untyped_storage()) in storages for tensor in made)
        if not is_view or func._schema.is_mutable:
            self.bytes += sum(self._touched(tensor) for tensor in (*given, *made))
        return result

    @staticmethod
    def _touched(tensor: Tensor) -> int:
        # A tensor that is spread out by strides of 0 is read once where it lies.
        shown = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
        count = 1
        for size in shown:
            count *= size
        return count * tensor.element_size()


@pytest.mark.parametrize("weights", [FP8, INT4])
def test_bytes_moved_for_each_weight_of_a_widened_matrix(weights: str) -> None:
    entry = next(entry for entry in catalog.family("4B") if entry.weights == weights)
    with torch.no_grad():
        layer = loader(entry).linear("model.language_model.layers.0.mlp.down_proj")
        x = torch.empty(1, 9728, dtype=torch.bfloat16, device=META)
        with Moved() as counter:
            layer(x)
    assert counter.bytes / (2560 * 9728) == pytest.approx(speed._MOVED[weights], rel=0.04)
