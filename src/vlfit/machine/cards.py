"""Looks a card up by the name that a person types or the driver gives, and makes a machine of it.

Knows how names vary. Does not know the numbers (``card_table.py``) or which card is here (``survey.py``).
"""

import re
from difflib import get_close_matches

from vlfit.errors import UsageError
from vlfit.machine.card_table import CARDS, Card
from vlfit.machine.host import read_host
from vlfit.machine.links import pcie_bandwidth
from vlfit.machine.model import Gpu, Host, Machine
from vlfit.units import MIB, format_bytes

_GIGA = 10**9
# Words that carry no difference between two cards of the table.
_IDLE_WORDS = frozenset(
    ("nvidia", "geforce", "rtx", "gtx", "tesla", "quadro", "gpu", "graphics", "card", "generation", "edition")
)
_OTHER_MAKERS = re.compile(
    r"\b(arc|intel|iris|amd|radeon|rx|instinct|mi\d{2,3}x?|apple|m\d (pro|max|ultra))\b"
)
_BEFORE_TURING = re.compile(r"\b((gtx ?)?(9|10)[5-8]0( ?ti)?|titan (x|xp|v)|p(4|40|100)|v100|k80|m(40|60))\b")
_SAME_WORDS = {"mobile": "laptop", "notebook": "laptop"}
_SIZE = re.compile(r"\b(\d+)\s*gi?b?\b")


def card(name: str, desktop: int = 0, wsl2: bool = False) -> Machine:
    """This computer with that card in it, ``desktop`` bytes of which others hold: to plan before buying.

    Everything but the card, ``wsl2`` and the display is as it is here. Raises ``UsageError`` for a name that
    is unknown or means several cards, and for a desktop that is negative or larger than the card.
    """
    found = find_card(name)
    total = found.total * MIB
    if not 0 <= desktop <= total:
        raise UsageError(
            f"a desktop cannot hold {format_bytes(desktop)} of a {found.name} with {format_bytes(total)}",
            "--desktop is what other programs hold of the card's memory, e.g. --desktop 951MiB",
        )
    gpu = Gpu(
        index=0,
        name=f"NVIDIA {found.name}",
        total=total,
        free=total - desktop,
        desktop=desktop,
        processes=(),
        driver="",
        cuda="",
        compute_capability=found.compute_capability,
        bandwidth=round(found.bandwidth * _GIGA),
        bandwidth_how="table",
        pcie_bandwidth=pcie_bandwidth(found.pcie_generation, found.pcie_lanes),
        pcie_generation=found.pcie_generation,
        pcie_lanes=found.pcie_lanes,
    )
    return Machine((gpu,), _host(desktop, wsl2), _notes(found, desktop))


def _host(desktop: int, wsl2: bool) -> Host:
    host = read_host()
    display = "windows" if wsl2 else host.display if desktop and host.display != "windows" else "none"
    return Host(
        ram_total=host.ram_total,
        ram_available=host.ram_available,
        swap_total=host.swap_total,
        memory_limit=host.memory_limit,
        wsl2=wsl2,
        container=host.container,
        display=display,
        cores=host.cores,
        platform=host.platform,
    )


def _notes(found: Card, desktop: int) -> tuple[str, ...]:
    notes = [f"The {found.name} is from the table of cards; RAM and processor are this computer's."]
    if not desktop:
        # The owner of an RTX 3050 reports 373 of 8192 MiB as nvidia-smi's memory.reserved.
        notes.append(
            "Nothing else is counted on the card, not even the few hundred MiB that its driver keeps:"
            " --desktop says what is held of it."
        )
    return tuple(notes)


def find_card(name: str) -> Card:
    """The card that ``name`` means ("5060", "rtx 5060 ti 16gb"). Raises ``UsageError`` unless it is one."""
    words, size = _words(name)
    found = _of_size(_matching(words), size) if words else []
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"{name!r} means several cards: {_names(found)}",
            f"name one of them, e.g. --gpu {found[0].name!r}",
        )
    raise _not_in_the_table(name, _matching(words) if words else [])


def _not_in_the_table(name: str, other_sizes: list[Card]) -> UsageError:
    """Says which cards are near, or why none of its kind is there."""
    if _OTHER_MAKERS.search(name.lower()):
        return UsageError(
            f"no card {name!r} in the table: it has NVIDIA's only, as vlfit needs CUDA",
            "`vlfit machine --cards` lists them; pass one to --gpu",
        )
    if _BEFORE_TURING.search(name.lower()):
        return UsageError(
            f"no card {name!r} in the table: it is older than Turing (2018), for which current builds of "
            "torch have no kernels",
            "`vlfit machine --cards` lists those that are there; pass one to --gpu",
        )
    return UsageError(
        f"no card {name!r} in the table; nearest: {_names(other_sizes or _nearest(name))}",
        "`vlfit machine --cards` lists them all; on a computer that has the card, `vlfit machine --save "
        "FILE` writes it down for --machine FILE",
    )


def card_of_driver(name: str, total: int) -> Card | None:
    """The card that the driver calls ``name`` and that has about ``total`` bytes; None if there is none."""
    words, size = _words(name)
    same = [each for each in CARDS if _words(each.name)[0] == words]
    if size is not None:
        same = _of_size(same, size)
    # Reports of one card differ by a few per cent (drivers, ECC); sizes of one name by a fifth and more.
    near = [each for each in same if abs(each.total * MIB - total) <= 0.1 * total]
    return min(near, key=lambda each: abs(each.total * MIB - total), default=None)


def _words(name: str) -> tuple[frozenset[str], int | None]:
    """What tells a card from others, and the size in GB if the name has one."""
    text = name.lower()
    sizes = _SIZE.findall(text)
    text = _SIZE.sub(" ", text)
    text = re.sub(r"(?<=\d{4})(?=[a-z])|(?<=[a-z]{3})(?=\d{4})", " ", text)  # 5060ti, rtx5060
    words = (_SAME_WORDS.get(word, word) for word in re.split(r"[^a-z0-9]+", text) if word)
    return frozenset(word for word in words if word not in _IDLE_WORDS), int(sizes[-1]) if sizes else None


def _matching(words: frozenset[str]) -> list[Card]:
    """Cards with exactly these words; where there is none, those that have them among others."""
    exact = [each for each in CARDS if _words(each.name)[0] == words]
    return exact or [each for each in CARDS if words < _words(each.name)[0]]


def _of_size(cards: list[Card], size: int | None) -> list[Card]:
    return [each for each in cards if size is None or _size(each) == size]


def _size(each: Card) -> int:
    """The size on the box in GB: the name's, else the one that the total is nearest to."""
    named = _words(each.name)[1]
    return named if named is not None else _NOMINAL[min(_NOMINAL, key=lambda mib: abs(mib - each.total))]


_NOMINAL = {gib * 1024: gib for gib in (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 80, 96, 141)}


def _names(cards: list[Card]) -> str:
    return ", ".join(each.name for each in cards[:6]) + (" and others" if len(cards) > 6 else "")


def _nearest(name: str) -> list[Card]:
    plain = {" ".join(sorted(_words(each.name)[0])): each for each in reversed(CARDS)}
    near = get_close_matches(" ".join(sorted(_words(name)[0])), plain, 3, cutoff=0.4)
    return [plain[key] for key in near] or list(CARDS[:6])
