"""Settings in the order of preference, and the choice among them: the first that fit with a margin."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from vlfit.errors import UsageError
from vlfit.machine.model import Gpu
from vlfit.plan.cost_model import CostModel
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.plans import Choice
from vlfit.plan.preference import CONTEXTS, IMAGE_TOKENS, keeps_floors, safety_margin
from vlfit.plan.shapes import Model
from vlfit.plan.wishes import Wishes

Candidate = tuple[PlanSettings, Model]
# Keys by which candidates are ordered, from the first to the last; the prefill chunk comes after them.
_LEVELS: tuple[Callable[[Candidate], Any], ...] = (
    lambda each: each[0].context,
    lambda each: each[0].image_tokens,
    lambda each: each[0].sequences,
    lambda each: (each[1].name, each[0].tight_kv_cache),
)


# --- candidates --------------------------------------------------------------------------------------------


def accepted_models(models: list[Model], check: Callable[[Model], object]) -> list[Model]:
    """The models for which ``check`` does not raise ``UsageError``; the others are left out silently.

    If there are none, raises the first ``UsageError`` of ``check``.
    """
    accepted, refusals = [], []
    for model in models:
        try:
            check(model)
            accepted.append(model)
        except UsageError as error:
            refusals.append(error)
    if refusals and not accepted:
        raise refusals[0]
    return accepted


def check_without_states(model: Model, title: str) -> None:
    """Raise ``UsageError`` for a model with recurrent states. ``title``: of the backend in whose plans these
    are not counted.
    """
    if model.state_bytes_per_sequence:
        raise UsageError(
            f"there is no plan for {model.name} under {title}: what its states take there was never measured",
            "Leave out --backend: vlfit's own engine runs it.",
        )


def candidates(models: list[Model], wishes: Wishes, costs: CostModel) -> list[Candidate]:
    """All (settings, model) pairs to try, the preferred first.

    Sizes that a model cannot have are left out (a context beyond its maximum, pictures that fill the
    context). Raises ``UsageError`` if a wish is beyond a model, or if nothing is left.
    """
    every = list(_iter_candidates(models, wishes, costs))
    if not every:
        raise _nothing_left(models, wishes)
    return every


def smallest_candidates(models: list[Model], wishes: Wishes, costs: CostModel) -> list[Candidate]:
    """For each model, its candidate that takes the least memory; if that one does not fit, no other does.

    Models for which ``wishes`` leave no candidate are left out. Raises ``UsageError`` if none is left at all,
    or if a wish is beyond a model.
    """
    smallest: dict[str, Candidate] = {}
    for candidate in _iter_candidates(models, wishes, costs, reversed):
        smallest.setdefault(candidate[1].name, candidate)
        if len(smallest) == len(models):
            break
    if not smallest:
        raise _nothing_left(models, wishes)
    return list(smallest.values())


def preference_tiers(every: list[Candidate], wishes: Wishes) -> Iterator[list[Candidate]]:
    """Split candidates into four lists, the most preferred list first; any may be empty.

    In order: at or above both floors (``keeps_floors``) with ``settings.graphs``, then without; below a floor
    with graphs, then without. Within a list the order of ``every`` is kept. Graphs count that much because a
    token takes ten times as long without them on an H100. The native engine never sets ``graphs``, so its
    candidates are all in the second and fourth list.
    """
    kept = [(each, keeps_floors(*each, wishes)) for each in every]
    for floors in (True, False):
        for graphs in (True, False):
            yield [each for each, keeps in kept if keeps == floors and each[0].graphs == graphs]


def _iter_candidates(
    models: list[Model],
    wishes: Wishes,
    costs: CostModel,
    order: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Iterator[Candidate]:
    """Settings in the order of preference, each with every weights format before the next step down.

    ``order``: ``reversed`` for the other way round.
    """
    sees = [model.vision is not None for model in models]
    if not all(sees) and wishes.image_tokens is not None:
        raise UsageError(
            f"{models[sees.index(False)].name} is a text-only model and takes no pictures",
            "Leave out --image-tokens.",
            param="image_tokens",
        )
    settings_of = {model.name: costs.candidates(model, wishes) for model in models}
    for context in order(_steps(wishes.context, _contexts(models))):
        for image_tokens in order(_steps(wishes.image_tokens, _picture_sizes(models) if all(sees) else (0,))):
            for sequences in order(_steps(wishes.sequences, costs.sequences)):
                for model in models:
                    if not _is_possible(model, context, image_tokens, wishes):
                        continue
                    for settings in order(settings_of[model.name](context, image_tokens, sequences)):
                        yield settings, model


def _steps(wish: int | None, steps: Iterable[int]) -> tuple[int, ...]:
    return tuple(steps) if wish is None else (wish,)


def _contexts(models: list[Model]) -> tuple[int, ...]:
    """Contexts to try; only the longest possible of models made for less than the shortest of them."""
    most = max(model.text.max_position_embeddings for model in models)
    return CONTEXTS if most >= min(CONTEXTS) else (most,)


def _picture_sizes(models: list[Model]) -> tuple[int, ...]:
    """Image tokens to try, none above the limits that the checkpoints themselves set."""
    limits = [model.max_image_tokens for model in models if model.max_image_tokens is not None]
    most = max(limits, default=max(IMAGE_TOKENS))
    return tuple(dict.fromkeys(min(step, most) for step in IMAGE_TOKENS))


def _is_possible(model: Model, context: int, image_tokens: int, wishes: Wishes) -> bool:
    most = model.text.max_position_embeddings
    if context > most and wishes.context is not None:
        raise UsageError(
            f"a context of {context} tokens was asked for; {_longest_context(model)}",
            f"Use --context {most} or less.",
            param="context",
        )
    return context <= most and image_tokens < context


def _longest_context(model: Model) -> str:
    """The longest context of ``model``."""
    return f"{model.name} was made for at most {model.text.max_position_embeddings}"


def _nothing_left(models: list[Model], wishes: Wishes) -> UsageError:
    """Which limit leaves no settings to try, and the way out."""
    model = max(models, key=lambda each: each.text.max_position_embeddings)
    most = model.text.max_position_embeddings
    contexts = [context for context in _steps(wishes.context, _contexts(models)) if context <= most]
    if wishes.image_tokens is None:
        smallest = min(_picture_sizes(models))
        return UsageError(
            f"a context of {contexts[0]} has no room for a picture of {smallest} tokens, the smallest that "
            "is tried",
            f"Ask for a larger --context, above {smallest}, or say how small pictures may be: "
            f"--image-tokens {max(4, contexts[0] // 2)}.",
            param="context",
        )
    larger = 1 << wishes.image_tokens.bit_length()
    return UsageError(
        f"a picture of {wishes.image_tokens} tokens fills a context of {contexts[0]}, the longest that is "
        "tried unless one is asked for",
        f"Add a larger one: --context {larger}."
        if larger <= most
        else f"Ask for fewer --image-tokens: {_longest_context(model)}.",
        param="image_tokens",
    )


# --- the choice --------------------------------------------------------------------------------------------


def best_choice(models: list[Model], wishes: Wishes, gpu: Gpu, costs: CostModel) -> Choice:
    """The most preferred settings that fit ``gpu``, if possible with the safety margin.

    Taken from the first of ``preference_tiers`` in which any settings fit: the first that leave the margin,
    else those with the most headroom, so that more memory never makes a plan smaller. If nothing fits, the
    result is ``least_memory_choice``, with a negative ``headroom``. Raises ``UsageError`` as ``candidates``.
    """
    smallest = least_memory_choice(models, wishes, gpu, costs)
    if smallest.headroom < 0:
        return smallest
    every = candidates(models, wishes, costs)
    for tier in preference_tiers(every, wishes):
        search = _Search(gpu, costs)
        chosen = search.first_with_margin(tier) or search.most_headroom
        if chosen is not None and chosen.headroom >= 0:
            return chosen
    return smallest


def least_memory_choice(models: list[Model], wishes: Wishes, gpu: Gpu, costs: CostModel) -> Choice:
    """The model and settings that leave the most headroom on ``gpu``; negative if nothing fits.

    Raises ``UsageError`` as ``smallest_candidates`` does.
    """
    smallest = smallest_candidates(models, wishes, costs)
    return max((choice_of(gpu, costs, *each) for each in smallest), key=lambda choice: choice.headroom)


def best_smaller_variant(
    smaller_variants: Sequence[Callable[[], Model]], wishes: Wishes, gpu: Gpu, costs: CostModel
) -> Choice | None:
    """The best choice among variants of a model with more parts quantized.

    That is the largest variant that fits with the safety margin and reaches both floors
    (``keeps_floors``); if none does, the best of those that fit. None if not even the smallest variant
    fits; the others are not made then.

    ``smaller_variants``: functions that make a model, the largest (least quantized) first; at least one.
    """
    if least_memory_choice([smaller_variants[-1]()], wishes, gpu, costs).headroom < 0:
        return None
    models = []
    for make in smaller_variants:
        models.append(make())
        choice = best_choice(models[-1:], wishes, gpu, costs)
        if headroom_beyond_margin(choice) >= 0 and keeps_floors(choice.settings, choice.model, wishes):
            return choice
    return best_choice(models, wishes, gpu, costs)


def choice_of(gpu: Gpu, costs: CostModel, settings: PlanSettings, model: Model) -> Choice:
    """Compute the ledger of ``model`` with ``settings`` on ``gpu``, and the headroom that it leaves."""
    lines = costs.lines(model, gpu, settings)
    return Choice(model, settings, lines, gpu.total - sum(line.bytes for line in lines))


def headroom_beyond_margin(choice: Choice) -> int:
    """Bytes of headroom less the safety margin; negative if less than the margin stays free."""
    return choice.headroom - safety_margin(choice.lines)


class _Search:
    """Search candidates in order, and keep the one with the most headroom (``most_headroom``).

    Of those that share a context, then image tokens, and so on, the last of each model takes the least: where
    that leaves no margin and no more headroom than the best so far, the others need no ledger.
    """

    def __init__(self, gpu: Gpu, costs: CostModel) -> None:
        self._gpu = gpu
        self._costs = costs
        self.most_headroom: Choice | None = None

    def first_with_margin(self, every: list[Candidate], level: int = 0) -> Choice | None:
        """The first of ``every`` that leaves the margin, if one does; they share all above ``level``."""
        if level == len(_LEVELS):
            return next(
                (choice for each in every if headroom_beyond_margin(choice := self._choice(each)) >= 0), None
            )
        for _, group in groupby(every, _LEVELS[level]):
            alike = list(group)
            if self._may_contain_fit(alike):
                found = self.first_with_margin(alike, level + 1)
                if found is not None:
                    return found
        return None

    def _may_contain_fit(self, every: list[Candidate]) -> bool:
        if len(every) == 1:
            return True
        last = {model.name: (settings, model) for settings, model in every}
        choices = [choice_of(self._gpu, self._costs, *each) for each in last.values()]
        return any(
            headroom_beyond_margin(choice) >= 0
            or self.most_headroom is None
            or choice.headroom > self.most_headroom.headroom
            for choice in choices
        )

    def _choice(self, candidate: Candidate) -> Choice:
        choice = choice_of(self._gpu, self._costs, *candidate)
        if self.most_headroom is None or choice.headroom > self.most_headroom.headroom:
            self.most_headroom = choice
        return choice
