"""Weights that nobody trained, made on the device: for measuring what does not depend on their values.

What a process holds and how long a pass takes follow from names, types and shapes alone. Everything of
loading stays as it is, but for reading: no file is opened. Knows the types that weights are stored in.
"""

import torch
from torch import Tensor

from vlfit.checkpoint.headers import TensorInfo
from vlfit.engine.loader import Loader

_ONE = 0x38  # 1.0 as float8_e4m3fn; the bytes below it are numbers from 0 to 1


class MadeUpLoader(Loader):
    """The real loader, but for reading: small random numbers, the same in every run of a process."""

    def _copy(self, info: TensorInfo, target: Tensor, *, later: bool = False) -> None:
        if target.dtype in (torch.int32, torch.int8):
            target.random_()  # codes of 4 or 8 bits
        elif target.dtype == torch.float8_e4m3fn:
            target.view(torch.uint8).random_(0, _ONE)
        elif "scale" in info.name:
            target.fill_(0.01)
        else:
            target.normal_(0, 0.02)
