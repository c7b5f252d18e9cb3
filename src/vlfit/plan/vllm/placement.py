"""Where a model runs under vLLM: over which of a machine's equal cards, or in RAM.

Only equal cards go together, since every card gets the same share. Layers are split over no more cards than
they need, because copies of the model answer more requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vlfit.errors import UsageError
from vlfit.machine.model import Gpu, Machine
from vlfit.plan.calibration import with_bandwidth
from vlfit.plan.candidates import best_choice
from vlfit.plan.cost_model import CostModel
from vlfit.plan.plans import Choice, Remark
from vlfit.plan.preference import keeps_floors
from vlfit.plan.shapes import Model
from vlfit.plan.vllm import cost
from vlfit.plan.vllm.args import VllmArgs, VllmSettings, VllmWishes
from vlfit.plan.vllm.cost import split_tower_problem, tensor_parallel_problem
from vlfit.units import counted, format_bytes

# Cards of one name whose sizes differ by less are equal: drivers and ECC make a small difference.
_EQUAL_WITHIN = 0.02
# A card with less free memory than this share of the emptiest one's is left out, as the fullest decides for
# all.
_EMPTY_ENOUGH = 0.75


@dataclass(frozen=True, slots=True)
class CardGroup:
    """Equal cards of a machine: ``gpus``, the emptiest first, at least one.

    ``busy``: equal cards that are not used, as less than 75 % of the emptiest card's free memory is free.
    """

    gpus: tuple[Gpu, ...]
    busy: tuple[Gpu, ...] = ()

    def emptiest(self, count: int) -> tuple[Gpu, ...]:
        """The ``count`` emptiest of ``gpus``, the fullest of these first, as the ledger is for that one."""
        return tuple(sorted(self.gpus[:count], key=lambda gpu: gpu.free))

    @property
    def usable_bytes(self) -> int:
        """Bytes that a plan over all ``gpus`` can use: their number times what is free on the fullest."""
        return len(self.gpus) * min(gpu.free for gpu in self.gpus)


def card_groups(machine: Machine) -> list[CardGroup]:
    """The machine's cards in groups of equal ones, the group with the most ``usable_bytes`` first.

    Equal: same name and compute capability, and a size within 2 %.
    """
    left, found = sorted(machine.gpus, key=lambda gpu: -gpu.free), []
    while left:
        first = left[0]
        alike = [gpu for gpu in left if _are_equal(gpu, first)]
        left = [gpu for gpu in left if gpu not in alike]
        empty = tuple(gpu for gpu in alike if gpu.free >= _EMPTY_ENOUGH * first.free)
        found.append(CardGroup(empty, tuple(gpu for gpu in alike if gpu not in empty)))
    return sorted(found, key=lambda group: -group.usable_bytes)


def parallel_args(group: CardGroup, wishes: VllmWishes) -> Iterator[VllmArgs]:
    """Yield ``wishes.vllm`` with each ``tensor``, ``data`` and ``split_tower`` to try on ``group``, in order.

    Layers over fewer cards come first, with as many copies as fit the rest, unless ``wishes`` fix either
    number; for each, the whole tower on each card comes before a split one. Raises ``UsageError`` for wishes
    that need more cards than ``group.gpus``.
    """
    count = len(group.gpus)
    tensors = [wishes.tensor_parallel] if wishes.tensor_parallel else list(range(1, count + 1))
    possible = [tensor for tensor in tensors if tensor * (wishes.data_parallel or 1) <= count]
    if not possible:
        tensor, data = wishes.tensor_parallel or 1, wishes.data_parallel or 1
        raise UsageError(
            f"{tensor} x {data} cards are asked for; {count} equal one{'s are' if count > 1 else ' is'} here",
            "Ask for fewer: --tensor-parallel times --data-parallel is the number of cards.",
        )
    for tensor in possible:
        way = replace(wishes.vllm, tensor=tensor, data=wishes.data_parallel or count // tensor)
        yield way
        if tensor > 1:
            yield replace(way, split_tower=True)


def card_remarks(machine: Machine, group: CardGroup, settings: VllmSettings) -> Iterator[Remark]:
    """Yield remarks for a plan: which of the machine's cards the plan takes, and why not others.

    ``group``: the group of the plan's cards.
    """
    args, taken = settings.vllm, group.emptiest(settings.vllm.cards)
    if args.cards > 1:
        yield Remark(_describe_cards(settings, taken), "cards_taken")
        yield Remark(_describe_ram(settings, machine), "ram_of_processes")
    unused = [gpu for gpu in group.gpus if gpu not in taken]
    others = [gpu for gpu in machine.gpus if gpu not in group.gpus and gpu not in group.busy]
    if unused:
        text = f"Not taken: {_gpu_names(unused)}: a copy of the model needs {args.tensor} cards."
        yield Remark(text, "cards_unused")
    if group.busy:
        names = _gpu_names(group.busy)
        text = f"Not taken: {names}, as others hold much of it: the fullest card decides for all."
        yield Remark(text, "cards_busy")
    if others and len(machine.gpus) > 1:
        text = f"Not taken: {_gpu_names(others)}: only equal cards go together."
        yield Remark(text, "cards_unequal")


def _describe_cards(settings: VllmSettings, taken: tuple[Gpu, ...]) -> str:
    args = settings.vllm
    each = f"{counted(settings.sequences, 'request')} at once" + (
        f" in each copy, {settings.sequences * args.data} in all" if args.data > 1 else ""
    )
    least, most = taken[0].free, taken[-1].free
    fullest = f", the fullest ({format_bytes(least)} free)" if most > least else ""
    parts = []
    if args.tensor > 1:
        parts.append(f"each layer over {args.tensor} cards")
    if args.data > 1:
        parts.append(f"{args.data} copies of the model")
    measured = (
        "; what cards hold for each other was measured on two H200 alone, and how fast they add up was not"
        if args.tensor > 1
        else ""
    )
    return (
        f"{args.cards} cards, {' and '.join(parts)}: {each}. The ledger is one card's{fullest}; speed is one "
        f"request's{measured}."
    )


def _describe_ram(settings: VllmSettings, machine: Machine) -> str:
    """RAM of the processes, as measured with the build for processors."""
    args = settings.vllm
    fronts = 1 if args.single_api_server or args.data == 1 else args.data
    need = (
        fronts * cost.FRONT_RAM.bytes + args.data * cost.ENGINE_RAM.bytes + args.cards * cost.WORKER_RAM.bytes
    )
    short = (
        f"; {format_bytes(machine.host.ram_available)} are available"
        if need > machine.host.ram_available
        else ""
    )
    each = format_bytes(cost.FRONT_RAM.bytes)
    copies = f", one for each copy (--api-server-count 1 makes it one; {each} each)"
    takers = counted(fronts, "process that takes", "processes that take")
    return (
        f"RAM: about {format_bytes(need)} or more for {takers} "
        f"requests{copies if fronts > 1 else ''}, {counted(args.data, 'engine')} and "
        f"{counted(args.cards, 'worker')}, as measured on a processor{short}."
    )


def _are_equal(one: Gpu, other: Gpu) -> bool:
    near = abs(one.total - other.total) <= _EQUAL_WITHIN * other.total
    return one.name == other.name and one.compute_capability == other.compute_capability and near


def _gpu_names(gpus: list[Gpu] | tuple[Gpu, ...]) -> str:
    return ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in gpus)


@dataclass(frozen=True, slots=True)
class CardChoice:
    """A choice and the cards of ``group`` that it takes, the fullest first: the ledger is for that one."""

    choice: Choice
    group: CardGroup
    gpus: tuple[Gpu, ...]

    @property
    def gpu(self) -> Gpu:
        """The card that ``choice.lines`` are for: the fullest."""
        return self.gpus[0]


def best_of_groups(models: list[Model], machine: Machine, wishes: VllmWishes, costs: CostModel) -> CardChoice:
    """The best choice of model, settings and cards over all groups of ``machine``.

    Groups are tried in the order of ``card_groups``, and in each the ways of ``parallel_args``. The first
    choice that fits and keeps the floors (``keeps_floors``) is taken, else the first that fits, else the one
    that is the fewest bytes too large. Raises ``UsageError`` for wishes that no group or no model can meet.
    """
    found: list[CardChoice] = []
    refusals: list[UsageError] = []
    for group in card_groups(machine):
        try:
            for taken in _choices_on(models, group, wishes, costs, refusals):
                if taken.choice.headroom >= 0 and keeps_floors(
                    taken.choice.settings, taken.choice.model, wishes
                ):
                    return taken
                found.append(taken)
        except UsageError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return next((taken for taken in found if taken.choice.headroom >= 0), _least_short(found))


def _choices_on(
    models: list[Model], group: CardGroup, wishes: VllmWishes, costs: CostModel, refusals: list[UsageError]
) -> list[CardChoice]:
    """A choice for each way over ``group``, up to the first that fits above the floors."""
    choices = []
    for way in parallel_args(group, wishes):
        able = [model for model in models if not _refusal(model, way)]
        if not able:
            if wishes.tensor_parallel is not None:
                model = models[0]
                refusals.append(
                    UsageError(
                        f"{model.name} cannot go over {way.tensor} cards: {_refusal(model, way)}",
                        "Ask for another --tensor-parallel, or leave it to the plan.",
                        param="tensor_parallel",
                    )
                )
            continue
        gpus = tuple(with_bandwidth(gpu) for gpu in group.emptiest(way.cards))
        choice = best_choice(able, replace(wishes, vllm=way), gpus[0], costs)
        choices.append(CardChoice(choice, group, gpus))
        if choice.headroom >= 0 and keeps_floors(choice.settings, choice.model, wishes):
            break
    return choices


def _refusal(model: Model, way: VllmArgs) -> str:
    """Why ``model`` cannot run this way, "" if it can."""
    tower = split_tower_problem(model.vision, way.tensor) if way.split_tower else ""
    return tensor_parallel_problem(model, way.tensor) or tower


def _least_short(found: list[CardChoice]) -> CardChoice:
    return max(found, key=lambda taken: taken.choice.headroom)
