"""Plans for vLLM for many cards, checkpoints and wishes: what the planner can emit."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

from vlfit.errors import UsageError
from vlfit.machine.cards import CARDS, Card, machine_with_card
from vlfit.machine.model import Machine
from vlfit.plan.backends import VLLM
from vlfit.plan.model_lookup import find_exact_models
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.shapes import Model
from vlfit.plan.wishes import Wishes
from vlfit.units import MIB

# What is known of its flags changed between these; a plan for each differs in flags, variables or remarks.
FAMILIES = ("0.11", "0.12", "0.14.1", "0.19.1", "0.24", "0.25.1", "0.30", "0.31", "0.33")
CHECKPOINTS = (
    *(f"Qwen/Qwen3-VL-{size}-Instruct{ending}" for size in ("2B", "4B", "8B") for ending in ("", "-FP8")),
    "Qwen3-VL-8B-Instruct-INT4",
    "Qwen/Qwen2.5-3B-Instruct",
)
WISHES: tuple[dict[str, Any], ...] = (
    {},
    {"context": 16384},
    {"sequences": 1, "image_tokens": 256},
    {"kv_dtype": "fp8", "context": 8192},
    {"eager": True, "chunk": 512},
    {"context": 4096, "kv_tokens": 2048, "pictures": 1},
    {"tensor_parallel": 2},
    {"sequences": 64},
)
COUNTS = (1, 2, 4)  # of equal cards
CARDS_OF_PRODUCT = tuple(CARDS[place * len(CARDS) // 40] for place in range(40))


@lru_cache(maxsize=1)
def _base() -> Machine:
    return machine_with_card("RTX 5060")


def machine_of(one: Card, count: int = 1, held: int = 0, *, wsl2: bool = False) -> Machine:
    """``count`` such cards, ``held`` MiB of each by others; quicker than the table's own way, which asks the
    host anew.
    """
    base = _base()
    gpus = tuple(
        replace(
            base.gpus[0],
            index=index,
            name=f"NVIDIA {one.name}",
            total=one.total_mib * MIB,
            free=(one.total_mib - held) * MIB,
            desktop=held * MIB,
            compute_capability=one.compute_capability,
            bandwidth=round(one.gb_per_s * 10**9),
        )
        for index in range(count)
    )
    return replace(base, gpus=gpus, host=replace(base.host, wsl2=wsl2))


@lru_cache(maxsize=32)
def _models(name: str) -> tuple[Model, ...]:
    return tuple(find_exact_models(name))


def planned(name: str, machine: Machine, version: str, **wishes: Any) -> Plan | None:
    """The plan; None if it does not fit, or if the wishes are refused."""
    try:
        asked = Wishes(**{"backend": VLLM.name, "vllm_version": version, **wishes})
        if not _models(name)[0].vision and asked.image_tokens:
            return None
        made = find_plan(list(_models(name)), machine, asked)
    except UsageError:
        return None
    return made if made.fits else None


def whole(version: str | None = None) -> Iterator[Plan]:
    """Every card, checkpoint, wish and number of cards, for ``version`` or for each family in turn."""
    every = product(CARDS_OF_PRODUCT, CHECKPOINTS, WISHES, COUNTS)
    for turn, (one, name, wishes, count) in enumerate(every):
        chosen = version or FAMILIES[turn % len(FAMILIES)]
        made = planned(
            name, machine_of(one, count, 700 if turn % 2 else 0, wsl2=turn % 3 == 0), chosen, **wishes
        )
        if made is not None:
            yield made
    yield from in_ram(version or FAMILIES[-1])


def sample() -> Iterator[Plan]:
    """Each card and checkpoint a few times, with wishes, numbers of cards and versions in turn."""
    for turn, (place, one) in enumerate((place, one) for place in (0, 1) for one in CARDS_OF_PRODUCT):
        name = CHECKPOINTS[(turn * 3 + place) % len(CHECKPOINTS)]
        wishes, count = WISHES[turn % len(WISHES)], COUNTS[turn % len(COUNTS)]
        made = planned(
            name, machine_of(one, count, wsl2=turn % 5 == 0), FAMILIES[turn % len(FAMILIES)], **wishes
        )
        if made is not None:
            yield made
    yield from in_ram(FAMILIES[-1])


def in_ram(version: str) -> Iterator[Plan]:
    """Plans for vLLM's build for processors."""
    host = replace(_base().host, ram_total=64 * 2**30, ram_available=60 * 2**30)
    for name, wishes in product(("mini", "Qwen/Qwen3-VL-2B-Instruct"), WISHES[:6]):
        asked = {**wishes, **({"context": 4096} if name == "mini" and "context" in wishes else {})}
        if name == "mini" and "image_tokens" in asked:
            asked["image_tokens"] = 144
        made = find_plan(
            list(_models(name)),
            replace(_base(), gpus=(), host=host),
            Wishes(**{"backend": VLLM.name, "vllm_version": version, **asked}),
        )
        assert made.fits
        yield made
