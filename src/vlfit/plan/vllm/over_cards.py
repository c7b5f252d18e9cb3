"""One card or several: the first way over a machine's equal cards on which a model fits as it should.

Knows: the order in which ways are tried, and when one is good enough. Does not know which ways there are
(``groups.py``) or how settings are chosen on one (``pick.py``).
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vlfit.errors import UsageError
from vlfit.machine.model import Gpu, Machine
from vlfit.plan.calibration import with_bandwidth
from vlfit.plan.model import Model
from vlfit.plan.pick import Choice, best
from vlfit.plan.preference import keeps_floors
from vlfit.plan.vllm.groups import Group, groups, ways
from vlfit.plan.vllm.parallel import why_not, why_not_tower
from vlfit.plan.vllm.settings import OfVllm

if TYPE_CHECKING:
    from vlfit.plan.search import Wishes


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
