"""One card or several: the first way over a machine's equal cards on which a model fits as it should.

Knows: the order in which ways are tried, and when one is good enough. Does not know which ways there are
(``plan/vllm/placement.py``) or how settings are chosen on one (``plan/candidates.py``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vlfit.errors import UsageError
from vlfit.machine.model import Gpu, Machine
from vlfit.plan.calibration import with_bandwidth
from vlfit.plan.candidates import Choice, best, keeps_floors
from vlfit.plan.shapes import Model
from vlfit.plan.vllm import cost as constants
from vlfit.plan.vllm.cost import why_not, why_not_tower
from vlfit.plan.vllm.flags import OfVllm
from vlfit.units import format_bytes

if TYPE_CHECKING:
    from vlfit.plan.ledger import Settings
    from vlfit.plan.wishes import Wishes


# Which cards of a machine vLLM takes together, and in which ways a model may go over them.
#
# Knows: that only equal cards go together, since every card gets the same share; that layers are shared out
# only as far as is needed, because copies answer more requests. Does not know what anything costs
# (``plan/vllm/cost.py``) or which way is chosen (``search.py``).


# Cards of one kind whose sizes differ by less are equal; drivers and ECC make them differ a little.
_ALIKE = 0.02
# A card with less free than this share of the emptiest one's is left out: the fullest decides for all.
_EMPTY_ENOUGH = 0.75


@dataclass(frozen=True, slots=True)
class Group:
    """Equal cards, the emptiest first; ``busy`` ones are of the same kind, but something else holds them."""

    gpus: tuple[Gpu, ...]
    busy: tuple[Gpu, ...] = ()

    def taken(self, count: int) -> tuple[Gpu, ...]:
        """The ``count`` emptiest, the fullest of them first: the ledger is its."""
        return tuple(sorted(self.gpus[:count], key=lambda gpu: gpu.free))

    @property
    def room(self) -> int:
        """Free bytes that can be used, the fullest card deciding for all."""
        return len(self.gpus) * min(gpu.free for gpu in self.gpus)


def groups(machine: Machine) -> list[Group]:
    """The machine's cards in groups of equal ones, those with the most room first."""
    left, found = sorted(machine.gpus, key=lambda gpu: -gpu.free), []
    while left:
        first = left[0]
        alike = [gpu for gpu in left if _are_alike(gpu, first)]
        left = [gpu for gpu in left if gpu not in alike]
        empty = tuple(gpu for gpu in alike if gpu.free >= _EMPTY_ENOUGH * first.free)
        found.append(Group(empty, tuple(gpu for gpu in alike if gpu not in empty)))
    return sorted(found, key=lambda group: -group.room)


def ways(group: Group, wishes: "Wishes") -> Iterator[OfVllm]:
    """Ways over the cards of ``group``, the layers on as few as possible first; copies take the rest.

    A tower is whole on each card before it is shared out as well. Raises ``UsageError`` for a wish that needs
    more cards than there are.
    """
    count = len(group.gpus)
    tensors = [wishes.tensor_parallel] if wishes.tensor_parallel else list(range(1, count + 1))
    possible = [tensor for tensor in tensors if tensor * (wishes.data_parallel or 1) <= count]
    if not possible:
        tensor, data = wishes.tensor_parallel or 1, wishes.data_parallel or 1
        raise UsageError(
            f"{tensor} x {data} cards are asked for; {count} equal one{'s are' if count > 1 else ' is'} here",
            "ask for fewer: --tensor-parallel times --data-parallel is the number of cards",
        )
    for tensor in possible:
        way = replace(wishes.vllm, tensor=tensor, data=wishes.data_parallel or count // tensor)
        yield way
        if tensor > 1:
            yield replace(way, split_tower=True)


def remarks(machine: Machine, group: Group, settings: "Settings") -> Iterator[str]:
    """What a person should know of the cards that are taken and of those that are not."""
    told, taken = settings.vllm, group.taken(settings.vllm.cards)
    if told.cards > 1:
        yield _how(settings, taken)
        yield _ram(settings, machine)
    unused = [gpu for gpu in group.gpus if gpu not in taken]
    others = [gpu for gpu in machine.gpus if gpu not in group.gpus and gpu not in group.busy]
    if unused:
        yield f"Not taken: {_named(unused)}: a copy of the model needs {told.tensor} cards."
    if group.busy:
        yield f"Not taken: {_named(group.busy)}, as others hold much of it: the fullest card decides for all."
    if others and len(machine.gpus) > 1:
        yield f"Not taken: {_named(others)}: only equal cards go together."


def _how(settings: "Settings", taken: tuple[Gpu, ...]) -> str:
    told = settings.vllm
    each = f"{settings.sequences} requests at once" + (
        f" in each copy, {settings.sequences * told.data} in all" if told.data > 1 else ""
    )
    least, most = taken[0].free, taken[-1].free
    fullest = f", the fullest ({format_bytes(least)} free)" if most > least else ""
    parts = []
    if told.tensor > 1:
        parts.append(f"each layer over {told.tensor} cards")
    if told.data > 1:
        parts.append(f"{told.data} copies of the model")
    measured = (
        "; what cards hold for each other was measured on two H200 alone, and how fast they add up was not"
        if told.tensor > 1
        else ""
    )
    return (
        f"{told.cards} cards, {' and '.join(parts)}: {each}. The ledger is one card's{fullest}; speed is one "
        f"request's{measured}."
    )


def _ram(settings: "Settings", machine: Machine) -> str:
    """What the processes take of RAM, by those of a processor's build."""
    told = settings.vllm
    fronts = 1 if told.one_front or told.data == 1 else told.data
    need = (
        fronts * constants.FRONT_RAM.bytes
        + told.data * constants.ENGINE_RAM.bytes
        + told.cards * constants.WORKER_RAM.bytes
    )
    short = (
        f"; {format_bytes(machine.host.ram_available)} are available"
        if need > machine.host.ram_available
        else ""
    )
    each = format_bytes(constants.FRONT_RAM.bytes)
    copies = f", one for each copy (--api-server-count 1 makes it one; {each} each)"
    return (
        f"RAM: about {format_bytes(need)} or more for {fronts} process{'es' if fronts > 1 else ''} that take"
        f"{'' if fronts > 1 else 's'} requests{copies if fronts > 1 else ''}, {told.data} engine"
        f"{'s' if told.data > 1 else ''} and {told.cards} workers, as measured on a processor{short}."
    )


def _are_alike(one: Gpu, other: Gpu) -> bool:
    near = abs(one.total - other.total) <= _ALIKE * other.total
    return one.name == other.name and one.compute_capability == other.compute_capability and near


def _named(gpus: "list[Gpu] | tuple[Gpu, ...]") -> str:
    return ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in gpus)


@dataclass(frozen=True, slots=True)
class Taken:
    """A choice, and the cards of ``group`` that it takes: the fullest, whose ledger it is, first."""

    choice: Choice
    group: Group
    gpus: tuple[Gpu, ...]

    @property
    def gpu(self) -> Gpu:
        return self.gpus[0]


def best_of_groups(models: list[tuple[Model, str]], machine: Machine, wishes: "Wishes") -> Taken:
    """The first way that fits above the floors; else the first that fits; else the one that lacks the least.

    Raises ``UsageError`` for a wish that no group of cards, or no model, can have.
    """
    found: list[Taken] = []
    refusals: list[UsageError] = []
    for group in groups(machine):
        try:
            for taken in _on(models, group, wishes, refusals):
                if taken.choice.headroom >= 0 and keeps_floors(
                    taken.choice.settings, taken.choice.model, wishes
                ):
                    return taken
                found.append(taken)
        except UsageError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return next((taken for taken in found if taken.choice.headroom >= 0), _nearest(found))


def _on(
    models: list[tuple[Model, str]], group: Group, wishes: "Wishes", refusals: list[UsageError]
) -> list[Taken]:
    """A choice for each way over ``group``, up to the first that needs no further one."""
    found = []
    for way in ways(group, wishes):
        able = [(model, backend) for model, backend in models if not _refusal(model, way)]
        if not able:
            if wishes.tensor_parallel is not None:
                model = models[0][0]
                refusals.append(
                    UsageError(
                        f"{model.name} cannot go over {way.tensor} cards: {_refusal(model, way)}",
                        "ask for another --tensor-parallel, or leave it to the plan",
                        param="tensor_parallel",
                    )
                )
            continue
        gpus = tuple(with_bandwidth(gpu) for gpu in group.taken(way.cards))
        choice = best(able, replace(wishes, vllm=way), gpus[0])
        found.append(Taken(choice, group, gpus))
        if choice.headroom >= 0 and keeps_floors(choice.settings, choice.model, wishes):
            break
    return found


def _refusal(model: Model, way: OfVllm) -> str:
    """Why ``model`` cannot go this way, "" if it can."""
    tower = why_not_tower(model.vision, way.tensor) if way.split_tower else ""
    return why_not(model, way.tensor) or tower


def _nearest(found: list[Taken]) -> Taken:
    return max(found, key=lambda taken: taken.choice.headroom)
