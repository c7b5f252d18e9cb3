"""Speeds by arithmetic: a PCIe link's from its generation and lanes, a memory's from its clock and width.

Knows the two formulas. Does not ask any device.
"""

# Transfers per second and lane, and the share of bits that carry data (PCI-SIG: 8b/10b coding in generations
# 1 and 2, 128b/130b up to 5; generation 6 sends 236 data bytes in each unit of 256).
_PCIE = {
    1: (2.5e9, 8 / 10),
    2: (5e9, 8 / 10),
    3: (8e9, 128 / 130),
    4: (16e9, 128 / 130),
    5: (32e9, 128 / 130),
    6: (64e9, 236 / 256),
}
# No memory of a GPU is slower or faster than this; outside of it a driver reports something else than asked.
_SLOWEST, _FASTEST = 10**10, 2 * 10**13


def pcie_bandwidth(generation: int | None, lanes: int | None) -> int | None:
    """Bytes per second one way, before packet headers (copies reach less); None for an unknown link."""
    if generation not in _PCIE or not lanes or lanes < 0:
        return None
    transfers, share = _PCIE[generation]
    return round(transfers * share / 8 * lanes)


def memory_bandwidth(clock: int | None, bus_width: int | None) -> int | None:
    """Bytes per second of a memory at ``clock`` MHz, ``bus_width`` bits wide; None if that makes no sense.

    NVML's memory clock is half the data rate, so each pin moves two bits per cycle of it: 14001 MHz and
    128 bit are the 448 GB/s of an RTX 5060, 1593 MHz and 5120 bit the 2039 GB/s of an A100, 10501 MHz and
    384 bit the 1008 GB/s of an RTX 4090, 3201 MHz and 6016 bit the 4.8 TB/s of an H200.
    """
    if not clock or not bus_width:
        return None
    speed = 2 * clock * 10**6 * bus_width // 8
    return speed if _SLOWEST <= speed <= _FASTEST else None
