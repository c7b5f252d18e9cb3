"""The table of cards, lookup by a typed or a driver's name, and a machine with a card from the table."""

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches

from vlfit.errors import DeviceError, UsageError
from vlfit.machine.host import read_host
from vlfit.machine.model import Gpu, Machine
from vlfit.units import MIB, format_bytes

# Sources of the table:
# - total: MiB printed by ``nvidia-smi`` (NVML's total), published by owners of each card with drivers of 2023
#   to 2026. From Ada on, and with ECC, it is a little less than the advertised size.
# - bandwidth: bus width times data rate, from the vendor's data sheet. Laptops may clock the memory lower.
# - compute capability: NVIDIA's list of CUDA GPUs.
# - PCIe: the card's own connector. The slot may have less.
# - multiprocessors and boost clock: the vendor's data sheets (128 CUDA cores are one, with compute capability
#   8.0 and 7.5 64; of cards that NVIDIA also sells itself, the reference clock). Of laptops the middle of the
#   range that the vendor allows, as what their makers chose is not known. The A10G's sheet (NVIDIA A10G for
#   AWS, 2022) has 80 RT cores, one for each multiprocessor, and 35 TFLOP/s in float32, which 80 * 256
#   operations a cycle are at 1,710 MHz; some lists have the A10's 72 instead.


@dataclass(frozen=True, slots=True)
class Card:
    """A model of graphics card. ``gb_per_s``: memory bandwidth in 10^9 bytes per second.

    ``name``: the driver's name without "NVIDIA", followed by the memory size if the card is sold with
    several. ``total_mib``: as the driver reports it, a little less than advertised. ``pcie_lanes``: of the
    card's connector; a slot may have fewer. ``multiprocessors``, ``boost_mhz``: how many there are, and their
    boost clock; None: not looked up.
    """

    name: str
    total_mib: int
    gb_per_s: float
    compute_capability: tuple[int, int]
    pcie_generation: int
    pcie_lanes: int
    multiprocessors: int
    boost_mhz: int


CARDS = (
    # Blackwell, desktop: GDDR7 at 28 Gbit/s (5080: 30), the 5050 GDDR6 at 20.
    Card("GeForce RTX 5090", 32607, 1792, (12, 0), 5, 16, 170, 2407),
    Card("GeForce RTX 5080", 16303, 960, (12, 0), 5, 16, 84, 2617),
    Card("GeForce RTX 5070 Ti", 16303, 896, (12, 0), 5, 16, 70, 2452),
    Card("GeForce RTX 5070", 12227, 672, (12, 0), 5, 16, 48, 2512),
    Card("GeForce RTX 5060 Ti 16GB", 16311, 448, (12, 0), 5, 8, 36, 2572),
    Card("GeForce RTX 5060 Ti 8GB", 8151, 448, (12, 0), 5, 8, 36, 2572),
    Card("GeForce RTX 5060", 8151, 448, (12, 0), 5, 8, 30, 2497),
    Card("GeForce RTX 5050", 8151, 320, (12, 0), 5, 8, 20, 2572),
    # Blackwell, laptop.
    Card("GeForce RTX 5090 Laptop GPU", 24463, 896, (12, 0), 5, 16, 82, 1878),
    Card("GeForce RTX 5080 Laptop GPU", 16303, 896, (12, 0), 5, 16, 60, 1893),
    Card("GeForce RTX 5070 Ti Laptop GPU", 12227, 672, (12, 0), 5, 16, 46, 1833),
    Card("GeForce RTX 5070 Laptop GPU", 8151, 384, (12, 0), 5, 8, 36, 1886),
    Card("GeForce RTX 5060 Laptop GPU", 8151, 384, (12, 0), 5, 8, 26, 1976),
    Card("GeForce RTX 5050 Laptop GPU", 8151, 384, (12, 0), 5, 8, 20, 2081),
    # Ada Lovelace, desktop.
    Card("GeForce RTX 4090", 24564, 1008, (8, 9), 4, 16, 128, 2520),
    Card("GeForce RTX 4080 SUPER", 16376, 736, (8, 9), 4, 16, 80, 2550),
    Card("GeForce RTX 4080", 16376, 716.8, (8, 9), 4, 16, 76, 2505),
    Card("GeForce RTX 4070 Ti SUPER", 16376, 672, (8, 9), 4, 16, 66, 2610),
    Card("GeForce RTX 4070 Ti", 12282, 504, (8, 9), 4, 16, 60, 2610),
    Card("GeForce RTX 4070 SUPER", 12282, 504, (8, 9), 4, 16, 56, 2475),
    Card("GeForce RTX 4070", 12282, 504, (8, 9), 4, 16, 46, 2475),
    Card("GeForce RTX 4060 Ti 16GB", 16380, 288, (8, 9), 4, 8, 34, 2535),
    Card("GeForce RTX 4060 Ti 8GB", 8188, 288, (8, 9), 4, 8, 34, 2535),
    Card("GeForce RTX 4060", 8188, 272, (8, 9), 4, 8, 24, 2460),
    # Ada Lovelace, laptop.
    Card("GeForce RTX 4090 Laptop GPU", 16376, 576, (8, 9), 4, 16, 76, 1747),
    Card("GeForce RTX 4080 Laptop GPU", 12282, 432, (8, 9), 4, 16, 58, 1815),
    Card("GeForce RTX 4070 Laptop GPU", 8188, 256, (8, 9), 4, 8, 36, 1702),
    Card("GeForce RTX 4060 Laptop GPU", 8188, 256, (8, 9), 4, 8, 24, 1920),
    Card("GeForce RTX 4050 Laptop GPU", 6141, 192, (8, 9), 4, 8, 20, 1987),
    # Ampere, desktop.
    Card("GeForce RTX 3090 Ti", 24564, 1008, (8, 6), 4, 16, 84, 1860),
    Card("GeForce RTX 3090", 24576, 936.2, (8, 6), 4, 16, 82, 1695),
    Card("GeForce RTX 3080 Ti", 12288, 912.4, (8, 6), 4, 16, 80, 1665),
    Card("GeForce RTX 3080 12GB", 12288, 912.4, (8, 6), 4, 16, 70, 1710),
    Card("GeForce RTX 3080 10GB", 10240, 760.3, (8, 6), 4, 16, 68, 1710),
    Card("GeForce RTX 3070 Ti", 8192, 608.3, (8, 6), 4, 16, 48, 1770),
    Card("GeForce RTX 3070", 8192, 448, (8, 6), 4, 16, 46, 1725),
    Card("GeForce RTX 3060 Ti", 8192, 448, (8, 6), 4, 16, 38, 1665),
    Card("GeForce RTX 3060 12GB", 12288, 360, (8, 6), 4, 16, 28, 1777),
    Card("GeForce RTX 3060 8GB", 8192, 240, (8, 6), 4, 16, 28, 1777),
    Card("GeForce RTX 3050 8GB", 8192, 224, (8, 6), 4, 8, 20, 1777),
    Card("GeForce RTX 3050 6GB", 6144, 168, (8, 6), 4, 8, 18, 1470),
    # Ampere, laptop.
    Card("GeForce RTX 3080 Ti Laptop GPU", 16384, 512, (8, 6), 4, 16, 58, 1357),
    Card("GeForce RTX 3080 Laptop GPU 16GB", 16384, 448, (8, 6), 4, 16, 48, 1477),
    Card("GeForce RTX 3080 Laptop GPU 8GB", 8192, 448, (8, 6), 4, 16, 48, 1477),
    Card("GeForce RTX 3070 Ti Laptop GPU", 8192, 448, (8, 6), 4, 16, 46, 1260),
    Card("GeForce RTX 3070 Laptop GPU", 8192, 448, (8, 6), 4, 16, 40, 1455),
    Card("GeForce RTX 3060 Laptop GPU", 6144, 336, (8, 6), 4, 16, 30, 1493),
    Card("GeForce RTX 3050 Ti Laptop GPU", 4096, 192, (8, 6), 4, 8, 20, 1365),
    Card("GeForce RTX 3050 6GB Laptop GPU", 6144, 144, (8, 6), 4, 8, 20, 1340),
    Card("GeForce RTX 3050 Laptop GPU 4GB", 4096, 192, (8, 6), 4, 8, 16, 1398),
    # Turing.
    Card("GeForce RTX 2080 Ti", 11264, 616, (7, 5), 3, 16, 68, 1545),
    Card("GeForce RTX 2080 SUPER", 8192, 496, (7, 5), 3, 16, 48, 1815),
    Card("GeForce RTX 2080", 8192, 448, (7, 5), 3, 16, 46, 1710),
    Card("GeForce RTX 2070 SUPER", 8192, 448, (7, 5), 3, 16, 40, 1770),
    Card("GeForce RTX 2070", 8192, 448, (7, 5), 3, 16, 36, 1620),
    Card("GeForce RTX 2060 SUPER", 8192, 448, (7, 5), 3, 16, 34, 1650),
    Card("GeForce RTX 2060 12GB", 12288, 336, (7, 5), 3, 16, 34, 1650),
    Card("GeForce RTX 2060 6GB", 6144, 336, (7, 5), 3, 16, 30, 1680),
    Card("GeForce GTX 1660 Ti", 6144, 288, (7, 5), 3, 16, 24, 1770),
    Card("GeForce GTX 1660 SUPER", 6144, 336, (7, 5), 3, 16, 22, 1785),
    Card("GeForce GTX 1660", 6144, 192, (7, 5), 3, 16, 22, 1785),
    Card("GeForce GTX 1650 SUPER", 4096, 192, (7, 5), 3, 16, 20, 1725),
    Card("GeForce GTX 1650", 4096, 128, (7, 5), 3, 16, 14, 1665),
    # Workstation.
    Card("RTX PRO 6000 Blackwell Workstation Edition", 97887, 1792, (12, 0), 5, 16, 188, 2617),
    Card("RTX PRO 6000 Blackwell Server Edition", 97887, 1597, (12, 0), 5, 16, 188, 2430),
    Card("RTX 6000 Ada Generation", 49140, 960, (8, 9), 4, 16, 142, 2505),
    Card("RTX 5000 Ada Generation", 32760, 576, (8, 9), 4, 16, 100, 2550),
    Card("RTX 4000 Ada Generation", 20475, 360, (8, 9), 4, 16, 48, 2175),
    Card("RTX 2000 Ada Generation", 16380, 224, (8, 9), 4, 8, 22, 2130),
    Card("RTX A6000", 49140, 768, (8, 6), 4, 16, 84, 1800),
    Card("RTX A5000", 24564, 768, (8, 6), 4, 16, 64, 1695),
    Card("RTX A4500", 20470, 640, (8, 6), 4, 16, 56, 1650),
    Card("RTX A4000", 16376, 448, (8, 6), 4, 16, 48, 1560),
    Card("RTX A2000 12GB", 12282, 288, (8, 6), 4, 16, 26, 1200),
    Card("RTX A2000 6GB", 6138, 288, (8, 6), 4, 16, 26, 1200),
    # Data centre. Cards with GDDR6 and ECC on report about 6 % less than advertised.
    Card("H200", 143771, 4814, (9, 0), 5, 16, 132, 1980),
    Card("H200 NVL", 143771, 4814, (9, 0), 5, 16, 132, 1785),
    Card("H100 80GB HBM3", 81559, 3352, (9, 0), 5, 16, 132, 1980),
    Card("H100 PCIe", 81559, 2039, (9, 0), 5, 16, 114, 1755),
    Card("H100 NVL", 95830, 3938, (9, 0), 5, 16, 132, 1785),
    Card("A100-SXM4-80GB", 81920, 2039, (8, 0), 4, 16, 108, 1410),
    Card("A100 80GB PCIe", 81920, 1935, (8, 0), 4, 16, 108, 1410),
    Card("A100-SXM4-40GB", 40960, 1555, (8, 0), 4, 16, 108, 1410),
    Card("A100-PCIE-40GB", 40960, 1555, (8, 0), 4, 16, 108, 1410),
    Card("A40", 46068, 695.8, (8, 6), 4, 16, 84, 1740),
    Card("A30", 24576, 933, (8, 0), 4, 16, 56, 1440),
    Card("A10G", 23028, 600, (8, 6), 4, 16, 80, 1710),
    Card("A10", 23028, 600, (8, 6), 4, 16, 72, 1695),
    Card("L40S", 46068, 864, (8, 9), 4, 16, 142, 2520),
    Card("L40", 46068, 864, (8, 9), 4, 16, 142, 2490),
    Card("L4", 23034, 300, (8, 9), 4, 16, 58, 2040),
    Card("Tesla T4", 15360, 320, (7, 5), 3, 16, 40, 1590),
)


# PCIe generation -> transfers per second and lane, and the fraction of bits that carry data (PCI-SIG: 8b/10b
# coding in generations 1 and 2, 128b/130b up to 5; generation 6 sends 236 data bytes in each unit of 256).
_PCIE = {
    1: (2.5e9, 8 / 10),
    2: (5e9, 8 / 10),
    3: (8e9, 128 / 130),
    4: (16e9, 128 / 130),
    5: (32e9, 128 / 130),
    6: (64e9, 236 / 256),
}
# Bytes per second. Results outside this range mean that the driver reported wrong clocks or widths.
_MIN_BANDWIDTH, _MAX_BANDWIDTH = 10**10, 2 * 10**13


def pcie_bandwidth(generation: int | None, lanes: int | None) -> int | None:
    """Theoretical bandwidth of a PCIe link: bytes per second, one way, packet headers included.

    None if ``generation`` is not 1 to 6, or ``lanes`` is None or not above 0.
    """
    if generation not in _PCIE or not lanes or lanes < 0:
        return None
    transfers, efficiency = _PCIE[generation]
    return round(transfers * efficiency / 8 * lanes)


def memory_bytes_per_second(clock: int | None, bus_width: int | None) -> int | None:
    """Bytes per second of GPU memory at ``clock`` MHz on a bus of ``bus_width`` bits.

    None if either is unknown, or the result is implausible.

    NVML's memory clock is half the data rate, so each pin moves two bits per cycle of it: 14001 MHz and
    128 bit are the 448 GB/s of an RTX 5060, 1593 MHz and 5120 bit the 2039 GB/s of an A100, 10501 MHz and
    384 bit the 1008 GB/s of an RTX 4090, 3201 MHz and 6016 bit the 4.8 TB/s of an H200.
    """
    if not clock or not bus_width:
        return None
    bandwidth = 2 * clock * 10**6 * bus_width // 8
    return bandwidth if _MIN_BANDWIDTH <= bandwidth <= _MAX_BANDWIDTH else None


# Words that do not distinguish any two cards in the table.
_IGNORED_WORDS = frozenset(
    ("nvidia", "geforce", "rtx", "gtx", "tesla", "quadro", "gpu", "graphics", "card", "generation", "edition")
)
_OTHER_VENDORS = {
    "AMD": re.compile(r"\b(amd|radeon|rx ?\d*|instinct|mi\d{2,3}x?)\b"),
    "Intel": re.compile(r"\b(arc|intel|iris)\b"),
    "Apple": re.compile(r"\b(apple|m[1-9])\b"),
}
_SEVERAL = re.compile(r"\s*(\d{1,3})\s*[x\u00d7*]\s*(.*\S)\s*", re.IGNORECASE)
_MOST_CARDS = 16
BFLOAT16_CAPABILITY = (8, 0)  # Ampere. On older GPUs transformers and vLLM compute in float16.
# Triton's oldest. For 7.5 it makes products without matrix units, with kilobytes of spilled registers.
KERNEL_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)  # Ada. On older GPUs FP8 weights are dequantized to 16 bits.
# What other programs are taken to hold of a card that is not here. With a screen: the desktop of the worked
# example (docs/plan.md), an RTX 5060 under WSL2. Without: what the driver reserves of an idle H100
# (driver 580, benchmarks/measured/ledger-h100.json).
TYPICAL_DESKTOP = 951 * MIB
TYPICAL_RESERVED = 480 * MIB
_BEFORE_TURING = re.compile(r"\b((gtx ?)?(9|10)[5-8]0( ?ti)?|titan (x|xp|v)|p(4|40|100)|v100|k80|m(40|60))\b")
_SYNONYMS = {"mobile": "laptop", "notebook": "laptop"}
_SIZE = re.compile(r"\b(\d+)\s*gi?b?\b")


def machine_with_card(name: str, desktop: int | None = 0, wsl2: bool = False) -> Machine:
    """This computer's RAM and CPU with a card from the table, or with several equal ones (``2x RTX 3090``).

    ``desktop``: bytes of each card held by other programs; None: assume ``typical_desktop``. ``wsl2``:
    whether the machine counts as WSL2, whatever this computer is. Raises ``UsageError`` for an unknown or
    ambiguous name, for more than 16 cards, and if ``desktop`` is negative or exceeds the card;
    ``DeviceError`` for a GPU of another vendor.
    """
    count, name = _count_of(name)
    card = find_card(name)
    total = card.total_mib * MIB
    desktop_how = "typed" if desktop is not None else "assumed"
    desktop = typical_desktop(card) if desktop is None else desktop
    if not 0 <= desktop <= total:
        raise UsageError(
            f"a desktop cannot hold {format_bytes(desktop)} of a {card.name} with {format_bytes(total)}",
            "--desktop is the card's memory that other programs hold, e.g. --desktop 951MiB.",
        )
    host = read_host()
    draws = desktop and host.display != "windows"
    display = "windows" if wsl2 else host.display if draws else "none"
    gpu = Gpu(
        index=0,
        name=f"NVIDIA {card.name}",
        total=total,
        free=total - desktop,
        desktop=desktop,
        processes=(),
        driver="",
        cuda="",
        compute_capability=card.compute_capability,
        bandwidth=round(card.gb_per_s * 10**9),
        bandwidth_how="table",
        pcie_bandwidth=pcie_bandwidth(card.pcie_generation, card.pcie_lanes),
        pcie_generation=card.pcie_generation,
        pcie_lanes=card.pcie_lanes,
        desktop_how=desktop_how,
        multiprocessors=card.multiprocessors,
        clock_mhz=card.boost_mhz,
    )
    gpus = tuple(replace(gpu, index=index) for index in range(count))
    return Machine(gpus, replace(host, wsl2=wsl2, display=display), _notes(card, desktop, desktop_how))


def typical_desktop(card: Card) -> int:
    """Bytes of ``card`` assumed to be held by other programs and the driver, if the user does not say.

    951 MiB for a card with a screen (GeForce, RTX), 480 MiB for a data-centre card.
    """
    has_screen = card.name.startswith(("GeForce", "RTX"))
    return TYPICAL_DESKTOP if has_screen else TYPICAL_RESERVED


def has_bf16(capability: tuple[int, int]) -> bool:
    """Whether a card of this compute capability has bfloat16 units; without them float16 is used."""
    return capability >= BFLOAT16_CAPABILITY


def has_fp8(capability: tuple[int, int]) -> bool:
    """Whether a card of this compute capability has FP8 units; without them FP8 weights are dequantized."""
    return capability >= FP8_CAPABILITY


def was_tried(capability: tuple[int, int]) -> bool:
    """Whether vlfit has been run on a card of this compute capability: so far only 9.0 (H100, H200)."""
    return capability == (9, 0)


def _count_of(name: str) -> tuple[int, str]:
    """Number of cards and the name of one, of ``2x RTX 3090``."""
    found = _SEVERAL.fullmatch(name)
    if found is None:
        return 1, name
    count = int(found[1])
    if not 1 <= count <= _MOST_CARDS:
        raise UsageError(
            f"--gpu {name!r} asks for {count} cards",
            f"From 1 to {_MOST_CARDS} equal cards: --gpu '2x {found[2]}'.",
        )
    return count, found[2]


def _notes(card: Card, desktop: int, desktop_how: str) -> tuple[str, ...]:
    notes = [f"The {card.name} is from the table of cards; RAM and CPU are this computer's."]
    if desktop_how == "assumed":
        notes.append(
            f"Other programs are assumed to hold {format_bytes(desktop)} of the card: --desktop sets that."
        )
    elif not desktop:
        # The owner of an RTX 3050 reports 373 of 8192 MiB as nvidia-smi's memory.reserved.
        notes.append(
            "The card counts as empty, without even the few hundred MiB that its driver reserves: --desktop"
            " sets what other programs hold."
        )
    return tuple(notes)


def find_card(name: str) -> Card:
    """Find a card in the table by a typed name like "5060" or "rtx 5060 ti 16gb".

    Raises ``UsageError`` if no card or several cards match, with their names or the nearest ones;
    ``DeviceError`` for a GPU of another vendor.
    """
    words, size = _parse_name(name)
    cards = _with_size(_matching(words), size) if words else []
    if len(cards) == 1:
        return cards[0]
    if cards:
        raise UsageError(
            f"{name!r} matches several cards: {_list_names(cards)}",
            f"Name one of them, e.g. --gpu {cards[0].name!r}.",
        )
    raise _unknown_card(name, _matching(words) if words else [])


def _unknown_card(name: str, other_sizes: list[Card]) -> UsageError | DeviceError:
    """The error for an unknown card, with the nearest cards or why cards of its kind are missing."""
    listing = "`vlfit machine --cards` lists all cards for --gpu."
    for vendor, pattern in _OTHER_VENDORS.items():
        if pattern.search(name.lower()):
            never = ", where it was never tried" if vendor == "Apple" else ""
            return DeviceError(
                f"no plan for {name!r}: vlfit uses NVIDIA GPUs only; with one of {vendor} it runs on the CPU"
                f"{never}",
                "On that computer vlfit plan recommends a model for its processor; elsewhere vlfit plan "
                "--machine FILE does, with the file of vlfit machine --save FILE.",
            )
    if _BEFORE_TURING.search(name.lower()):
        return UsageError(
            f"no card {name!r} in the table: current builds of torch have no kernels for cards older than"
            " Turing (2018)",
            listing,
        )
    return UsageError(
        f"no card {name!r} in the table; nearest: {_list_names(other_sizes or _nearest(name))}",
        f"{listing} On a computer that has the card, `vlfit machine --save FILE` writes a file for"
        " --machine FILE.",
    )


def card_by_driver_name(name: str, total: int) -> Card | None:
    """Find a card in the table by the driver's name and ``total`` bytes of memory, within 10 %.

    None if no card matches.
    """
    words, size = _parse_name(name)
    cards = [card for card in CARDS if _parse_name(card.name)[0] == words]
    if size is not None:
        cards = _with_size(cards, size)
    # Totals of one card differ by a few per cent (drivers, ECC); sizes of one name by a fifth or more.
    near = [card for card in cards if abs(card.total_mib * MIB - total) <= 0.1 * total]
    return min(near, key=lambda card: abs(card.total_mib * MIB - total), default=None)


def _parse_name(name: str) -> tuple[frozenset[str], int | None]:
    """The words that distinguish a card, and its size in GB if the name has one."""
    text = name.lower()
    sizes = _SIZE.findall(text)
    text = _SIZE.sub(" ", text)
    text = re.sub(r"(?<=\d{4})(?=[a-z])|(?<=[a-z]{3})(?=\d{4})", " ", text)  # 5060ti, rtx5060
    words = (_SYNONYMS.get(word, word) for word in re.split(r"[^a-z0-9]+", text) if word)
    return frozenset(word for word in words if word not in _IGNORED_WORDS), int(sizes[-1]) if sizes else None


def _matching(words: frozenset[str]) -> list[Card]:
    """Cards with exactly these words; if there are none, cards with these and others."""
    exact = [card for card in CARDS if _parse_name(card.name)[0] == words]
    return exact or [card for card in CARDS if words < _parse_name(card.name)[0]]


def _with_size(cards: list[Card], size: int | None) -> list[Card]:
    return [card for card in cards if size is None or _advertised_gib(card) == size]


def _advertised_gib(card: Card) -> int:
    """The size in the card's name, else the common size that its total is nearest to."""
    named = _parse_name(card.name)[1]
    return named if named is not None else min(_COMMON_GIB, key=lambda gib: abs(gib * 1024 - card.total_mib))


_COMMON_GIB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 80, 96, 141)


def _list_names(cards: list[Card]) -> str:
    return ", ".join(card.name for card in cards[:6]) + (" and others" if len(cards) > 6 else "")


def _nearest(name: str) -> list[Card]:
    by_words = {" ".join(sorted(_parse_name(card.name)[0])): card for card in reversed(CARDS)}
    near = get_close_matches(" ".join(sorted(_parse_name(name)[0])), by_words, 3, cutoff=0.4)
    return [by_words[words] for words in near] or list(CARDS[:6])
