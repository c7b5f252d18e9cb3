"""Products by cuBLAS for many numbers of rows, so that its kernels are loaded before the first request.

cuBLAS chooses a kernel by the number of rows, and loads it when it is first chosen: up to 2 MiB of the card.
The plan counts them; a server that is ready must not grow by them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vlfit.plan.native.tiles import FP8_ROW_MULTIPLE

_POINTS = 16  # numbers of rows for each doubling
_MIN_ROWS, _MAX_ROWS = 32, 8192  # of a product that is swept: larger ones take long
# Which argument of a product has the rows; the next one is the weights.
_PLACE_OF_ROWS: dict[Any, int] = {F.linear: 0, torch.mm: 0, torch.addmm: 1, torch._scaled_mm: 0}


class ProductSweep(TorchFunctionMode):
    """Within the block each product of M rows also runs with M / 2 to M rows, once for each shape of weights.

    The rows are those of the product itself, so no more memory is needed than for it. Results are dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._done: set[tuple[Any, ...]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = _PLACE_OF_ROWS.get(func)
        if place is not None and args[place].dim() == 2:
            self._sweep(func, place, args, kwargs)
        return func(*args, **kwargs)

    def _sweep(self, func: Any, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = args[place].shape[0]
        scaled = func is torch._scaled_mm
        multiple = FP8_ROW_MULTIPLE if scaled else 1
        step = -(-rows // (2 * _POINTS) // multiple) * multiple
        weights = (args[place + 1].shape, args[place + 1].stride(), args[place + 1].dtype)
        for fewer in range(rows - step, rows // 2, -step) if _MIN_ROWS <= rows <= _MAX_ROWS else ():
            key = (func, weights, fewer)
            if key in self._done:
                continue
            self._done.add(key)
            given = list(args)
            given[place] = args[place][:fewer]
            if scaled:  # scales of rows are stored by columns
                given[2] = args[2].new_empty((args[2].shape[1], fewer)).t()
            out = kwargs.get("out")
            if isinstance(out, Tensor):
                func(*given, **(kwargs | {"out": out[:fewer]}))
            else:
                func(*given, **kwargs)
