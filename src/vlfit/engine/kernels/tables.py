"""Which table of tiles a device has: what was measured on its card, or what is built in."""

from functools import cache

import torch

from vlfit.plan.tiles import BUILT_IN, Table
from vlfit.plan.tuned import Card, table_of


def card_of(device: torch.device) -> Card:
    """What tiles on ``device``, which is a GPU, are kept for."""
    return Card(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


@cache
def table_on(device: torch.device) -> Table:
    """The table of any device."""
    return table_of(card_of(device)) if device.type == "cuda" else BUILT_IN
