"""Of all settings in the order of preference the ones to take: the first that fit and leave air.

Knows: how a choice is made, the air that is left for what is modelled, and how few layers may wait in RAM.
Does not know the order (``preference.py``) or what a line costs (``ledger.py``).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vlfit.machine.model import Gpu
from vlfit.plan.ledger import NATIVE, Line, Settings, ledger
from vlfit.plan.model import Model
from vlfit.plan.offload import AUTO, count_for, counts, offload_of
from vlfit.plan.preference import air, candidates, keeps_floors, least, tiers

if TYPE_CHECKING:
    from vlfit.plan.search import Wishes


Candidate = tuple[Settings, Model, str]
# What candidates are sorted by, the first that differs deciding; tokens of a pass come last.
_LEVELS: tuple[Callable[[Candidate], Any], ...] = (
    lambda each: each[0].context,
    lambda each: each[0].image_tokens,
    lambda each: each[0].sequences,
    lambda each: (each[1].name, each[0].tight),
)


@dataclass(frozen=True, slots=True)
class Choice:
    model: Model
    backend: str
    settings: Settings
    lines: tuple[Line, ...]
    headroom: int


def best(models: list[tuple[Model, str]], wishes: "Wishes", gpu: Gpu) -> Choice:
    """The choice among these; with a negative ``headroom`` nothing fits, and it is what takes the least.

    Where nothing leaves air, what leaves the most is taken: so more memory never makes a plan smaller.
    """
    smallest = _roomiest(models, wishes, gpu)
    if smallest.headroom < 0:
        return smallest
    every = _offloaded(candidates(models, wishes), wishes)
    for tier in tiers(every, wishes):
        search = _Search(gpu)
        found = search.first_with_air(tier) or search.roomiest
        if found is not None and found.headroom >= 0:
            return found
    return smallest


def _roomiest(models: list[tuple[Model, str]], wishes: "Wishes", gpu: Gpu) -> Choice:
    """The one that takes the least of all."""
    last = _offloaded(least(models, wishes), wishes)
    return max((_choice(gpu, *each) for each in last), key=_headroom)


def _offloaded(every: list[Candidate], wishes: "Wishes") -> list[Candidate]:
    """``every`` with as many layers in RAM as were wished for."""
    if wishes.offload is None or wishes.offload == AUTO:
        return every
    models = {model.name: model for _, model, _ in every}
    waiting = {name: count_for(model, wishes.offload) for name, model in models.items()}
    return [
        (replace(settings, offload=waiting[model.name]), model, backend) for settings, model, backend in every
    ]


class _Search:
    """Looks through candidates in their order, and keeps the ``roomiest`` that it saw.

    Of those that share a context, then image tokens, and so on, the last of each model is the least: where
    that has no air and no more room than was seen, the others need not be counted.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.roomiest: Choice | None = None

    def first_with_air(self, every: list[Candidate], level: int = 0) -> Choice | None:
        """The first of ``every`` that leaves air, if one does; they share all above ``level``."""
        if level == len(_LEVELS):
            return next((choice for each in every if _spare(choice := self._seen(each)) >= 0), None)
        for _, group in groupby(every, _LEVELS[level]):
            alike = list(group)
            if self._may_have_one(alike):
                found = self.first_with_air(alike, level + 1)
                if found is not None:
                    return found
        return None

    def _may_have_one(self, every: list[Candidate]) -> bool:
        if len(every) == 1:
            return True
        last = {model.name: (settings, model, backend) for settings, model, backend in every}
        choices = [_choice(self._gpu, *each) for each in last.values()]
        return any(
            _spare(choice) >= 0 or self.roomiest is None or choice.headroom > self.roomiest.headroom
            for choice in choices
        )

    def _seen(self, candidate: Candidate) -> Choice:
        choice = _choice(self._gpu, *candidate)
        if self.roomiest is None or choice.headroom > self.roomiest.headroom:
            self.roomiest = choice
        return choice


def _choice(gpu: Gpu, settings: Settings, model: Model, backend: str) -> Choice:
    lines = ledger(model, gpu, backend, settings)
    return Choice(model, backend, settings, lines, gpu.total - sum(line.bytes for line in lines))


def _headroom(choice: Choice) -> int:
    return choice.headroom


def _spare(choice: Choice) -> int:
    """Bytes left over beside the air that should stay."""
    return choice.headroom - air(choice.lines)


def fewest_waiting(models: list[tuple[Model, str]], wishes: "Wishes", gpu: Gpu) -> Choice | None:
    """The choice with the fewest bytes of layers in RAM, at the least settings above the floors; where none
    makes room for those, at the least of all.
    """
    native = [each for each in models if each[1] == NATIVE]
    if not native:
        return None
    for tier in tiers(candidates(native, wishes), wishes):
        smallest: dict[str, Candidate] = {}
        for settings, model, backend in tier:
            kept = smallest.get(model.name)
            # The first of these has the most tokens of a pass: each pass copies all layers that wait.
            if kept is None or kept[0] != replace(settings, chunk=kept[0].chunk):
                smallest[model.name] = settings, model, backend
        found = [choice for each in smallest.values() if (choice := _with_waiting(gpu, *each)).headroom >= 0]
        if found:
            return min(found, key=lambda choice: offload_of(choice.model, choice.settings.offload).ram)
    return None


def _with_waiting(gpu: Gpu, settings: Settings, model: Model, backend: str) -> Choice:
    """With the fewest layers in RAM that make it fit with air, or all of them."""

    def choice(count: int) -> Choice:
        return _choice(gpu, replace(settings, offload=count), model, backend)

    steps = counts(model)
    if not steps:
        return choice(0)
    fewest = bisect_left(steps, 0, key=lambda count: _spare(choice(count)))
    return choice(steps[min(fewest, len(steps) - 1)])


def coarser(makers: Sequence[Callable[[], Model]], wishes: "Wishes", gpu: Gpu) -> Choice | None:
    """Of models that are rounded more and more, the mildest that fits with air and above the floors; else
    any that fits. None where not even the last does, which is the smallest: the others are not made then.
    """
    if _roomiest([(makers[-1](), NATIVE)], wishes, gpu).headroom < 0:
        return None
    models = []
    for make in makers:
        models.append((make(), NATIVE))
        choice = best(models[-1:], wishes, gpu)
        if choice.headroom >= air(choice.lines) and keeps_floors(choice.settings, choice.model, wishes):
            return choice
    return best(models, wishes, gpu)
