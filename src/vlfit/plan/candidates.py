"""Which settings a plan tries, in which order, and how much air it would like to leave.

Two floors are had before anything grows: a context of 4096 and pictures of 1024 tokens. Above them, and below
where they cannot be had, the context counts first, then image tokens, requests at once, exact weights, the
pool that the requests share, and last the tokens of a pass, which cost only time. Knows that order and the
steps. Does not know what settings take (``ledger.py``).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vlfit.checkpoint.catalog import BF16
from vlfit.errors import UsageError
from vlfit.machine.model import Gpu
from vlfit.plan.calibration import MODELLED
from vlfit.plan.ledger import NATIVE, TRANSFORMERS, VLLM, Line, Settings, ledger
from vlfit.plan.native import cost as costs
from vlfit.plan.native.ram import AUTO, count_for, counts, offload_of
from vlfit.plan.shapes import Model
from vlfit.plan.vllm.cost import LARGEST_BLOCK, kv_bytes
from vlfit.plan.vllm.flags import OfVllm

if TYPE_CHECKING:
    from vlfit.plan.wishes import Wishes


CONTEXTS = (16384, 8192, 6144, 4096, 2048)
IMAGE_TOKENS = (2560, 1280, 1024, 768, 512, 256)
SEQUENCES = (8, 4, 2, 1)
CHUNKS = (1024, 512, 256, 128)
VLLM_CHUNKS = (2048, 1024, 512)
# A picture of 1024x1024, and a question about it with a long answer, or two such pictures.
AMPLE_CONTEXT, AMPLE_IMAGE_TOKENS = 4096, 1024
# The share of what is modelled that it may be wrong by. CUDA's own memory is most of it: the one card that it
# was measured on took 704 MiB, 15 % more than the 614 MiB assumed for others.
UNSURE = 0.15
_A_CHOICE = "reserve"  # modelled by name, but air itself


def air(lines: Iterable[Line]) -> int:
    """Bytes that should stay free beside the ledger: what its modelled lines may be wrong by."""
    return round(UNSURE * modelled(lines))


def modelled(lines: Iterable[Line]) -> int:
    """Bytes of the lines that nobody measured on such a card, the reserve left out."""
    return sum(line.bytes for line in lines if line.how == MODELLED and line.line != _A_CHOICE)


def is_ample(settings: Settings, model: Model) -> bool:
    """Whether context and pictures are not below the floors."""
    return settings.context >= AMPLE_CONTEXT and settings.image_tokens >= _ample_image_tokens(model)


def _ample_image_tokens(model: Model) -> int:
    """The floor of pictures; a model without eyes needs none, and none is above a checkpoint's own limit."""
    if model.vision is None:
        return 0
    return (
        AMPLE_IMAGE_TOKENS
        if model.most_image_tokens is None
        else min(AMPLE_IMAGE_TOKENS, model.most_image_tokens)
    )


def _limits(models: Iterable[Model]) -> tuple[int, ...]:
    """Most tokens of a picture by the checkpoint's own settings, where they are known; for ``min``."""
    known = [model.most_image_tokens for model in models]
    return tuple(most for most in known if most is not None) or (max(IMAGE_TOKENS),)


def within_limits(models: Iterable[Model], wishes: "Wishes") -> tuple["Wishes", tuple[str, ...]]:
    """``wishes`` with pictures no larger than any of these checkpoints makes them, and a remark if they were.

    vLLM would make them larger than the checkpoint was trained on; the native engine keeps to the limit.
    """
    known = [model.most_image_tokens for model in models if model.vision is not None]
    most = max((each for each in known if each is not None), default=None)
    if None in known or most is None or (wishes.image_tokens or 0) <= most:
        return wishes, ()
    remark = (
        f"--image-tokens {wishes.image_tokens} is {most}: the checkpoint itself makes pictures no larger."
    )
    return replace(wishes, image_tokens=most), (remark,)


def candidates(models: list[tuple[Model, str]], wishes: "Wishes") -> list[tuple[Settings, Model, str]]:
    """All settings in the order of preference, each model with its backend, by context and so on down.

    Raises ``UsageError`` for wishes that leave nothing to try.
    """
    found = list(_candidates(models, wishes))
    if not found:
        raise _nothing_left(models, wishes)
    return found


def least(models: list[tuple[Model, str]], wishes: "Wishes") -> list[tuple[Settings, Model, str]]:
    """Of each model the last of ``candidates``, which is the least of each step: if it does not fit, none do.

    Raises ``UsageError`` as ``candidates`` does.
    """
    found: dict[str, tuple[Settings, Model, str]] = {}
    for candidate in _candidates(models, wishes, reversed):
        found.setdefault(candidate[1].name, candidate)
        if len(found) == len(models):
            return list(found.values())
    if not found:
        raise _nothing_left(models, wishes)
    return list(found.values())


def tiers(
    every: list[tuple[Settings, Model, str]], wishes: "Wishes"
) -> Iterator[list[tuple[Settings, Model, str]]]:
    """Those of ``candidates`` that keep to the floors, then those below one; of each those with vLLM's CUDA
    graphs first, without which a word takes longer than anything else is worth: ten times as long on an H100.
    """
    kept = [(each, keeps_floors(each[0], each[1], wishes)) for each in every]
    for floors in (True, False):
        for graphs in (True, False):
            yield [each for each, keeps in kept if keeps == floors and each[0].graphs == graphs]


def keeps_floors(settings: Settings, model: Model, wishes: "Wishes") -> bool:
    """Whether context and pictures are above the floors; what was wished for is no matter of floors."""
    context = wishes.context is not None or settings.context >= AMPLE_CONTEXT
    pictures = wishes.image_tokens is not None or settings.image_tokens >= _ample_image_tokens(model)
    return context and pictures


def _candidates(
    models: list[tuple[Model, str]],
    wishes: "Wishes",
    turn: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Iterator[tuple[Settings, Model, str]]:
    """Settings in the order of preference, each with every format before the next step down.

    ``turn``: ``reversed`` for the other way round.
    """
    sees = [model.vision is not None for model, _ in models]
    if not all(sees) and wishes.image_tokens is not None:
        raise UsageError(
            f"{models[sees.index(False)][0].name} is a text-only model and takes no pictures",
            "leave out --image-tokens",
        )
    at_once = (1,) if wishes.backend == TRANSFORMERS else SEQUENCES
    told = {model.name: _told(model, wishes) for model, _ in models}
    for context in turn(_steps(wishes.context, _contexts(models))):
        for image_tokens in turn(_steps(wishes.image_tokens, _pictures(models) if all(sees) else (0,))):
            for sequences in turn(_steps(wishes.sequences, at_once)):
                for model, backend in models:
                    if not _possible(model, context, image_tokens, wishes):
                        continue
                    passes = tuple(_passes(backend, context, wishes))
                    for tight in turn(_pools(backend, context, sequences)):
                        for chunk, graphs in turn(passes):
                            # Spelled out: replace() takes five times as long, and these are thousands.
                            settings = Settings(
                                model.weights,
                                context,
                                image_tokens,
                                sequences,
                                chunk,
                                graphs=graphs,
                                tight=tight,
                                kv_dtype=wishes.kv_dtype or BF16,
                                vllm=told[model.name],
                            )
                            yield settings, model, backend


def _told(model: Model, wishes: "Wishes") -> OfVllm:
    """What vLLM is told of its pool and of pictures, in tokens of this model."""
    tokens = wishes.kv_tokens
    if tokens is None and wishes.kv_bytes is not None:
        tokens = _whole_blocks(wishes.kv_bytes, kv_bytes(model, wishes.kv_dtype or BF16, wishes.vllm))
    return replace(wishes.vllm, kv_tokens=tokens, pictures=wishes.pictures)


def _whole_blocks(allowed: int, each: int) -> int:
    """Tokens of a pool that takes no more than ``allowed`` bytes, ``each`` of a token.

    Raises ``UsageError`` where these hold no block.
    """
    block = each * LARGEST_BLOCK
    if allowed < block:
        raise UsageError(
            f"--kv-cache-memory-bytes is {allowed}; a block of {LARGEST_BLOCK} tokens takes {block} bytes",
            f"give at least {block}, or leave it out: the plan chooses",
            param="kv_bytes",
        )
    return allowed // block * LARGEST_BLOCK


def _pools(backend: str, context: int, sequences: int) -> tuple[bool, ...]:
    """Whether requests share a smaller pool than they would by themselves; only where that is one."""
    if backend != NATIVE:
        return (False,)
    shares = (costs.TYPICAL_REQUEST, costs.TIGHT_REQUEST)
    roomy, tight = (costs.kv_tokens(context, sequences, each) for each in shares)
    return (False, True) if tight < roomy else (False,)


def _passes(backend: str, context: int, wishes: "Wishes") -> Iterator[tuple[int, bool]]:
    """Tokens of a pass, and whether there are CUDA graphs: both cost only time, and graphs are worth more."""
    if backend == TRANSFORMERS:
        yield context, False
    elif backend == NATIVE:
        yield from ((chunk, False) for chunk in CHUNKS)
    elif backend == VLLM:
        # A processor captures no graphs.
        captures = (False,) if wishes.eager or wishes.vllm.in_ram else (True, False)
        chunks = VLLM_CHUNKS if wishes.chunk is None else (wishes.chunk,)
        yield from ((chunk, graphs) for graphs in captures for chunk in chunks)


def _pictures(models: list[tuple[Model, str]]) -> tuple[int, ...]:
    """The sizes that are tried: none above the limits that the checkpoint itself sets."""
    most = max(_limits(model for model, _ in models))
    return tuple(dict.fromkeys(min(step, most) for step in IMAGE_TOKENS))


def _contexts(models: list[tuple[Model, str]]) -> tuple[int, ...]:
    """Those that are tried; all there is, of models made for less than the least of them."""
    most = max(model.text.max_position_embeddings for model, _ in models)
    return CONTEXTS if most >= min(CONTEXTS) else (most,)


def _steps(wish: int | None, steps: Iterable[int]) -> tuple[int, ...]:
    return tuple(steps) if wish is None else (wish,)


def _possible(model: Model, context: int, image_tokens: int, wishes: "Wishes") -> bool:
    most = model.text.max_position_embeddings
    if context > most and wishes.context is not None:
        raise UsageError(
            f"a context of {context} tokens was asked for; {_most_of(model)}",
            f"use --context {most} or less",
        )
    return context <= most and image_tokens < context


def _most_of(model: Model) -> str:
    """How long its context may be, and why where that is vlfit's doing, as the engine says it."""
    most = model.text.max_position_embeddings
    if model.text.window == most:
        why = f"its attention slides over {most}, which vlfit does not do"
        return f"{model.name} runs with at most {most}: {why}"
    return f"{model.name} was made for at most {most}"


def _nothing_left(models: list[tuple[Model, str]], wishes: "Wishes") -> UsageError:
    """Which limit no setting that is tried keeps to, and the way out."""
    model = max((each for each, _ in models), key=lambda each: each.text.max_position_embeddings)
    most = model.text.max_position_embeddings
    contexts = [context for context in _steps(wishes.context, _contexts(models)) if context <= most]
    if wishes.image_tokens is None:
        least = min(_pictures(models))
        return UsageError(
            f"a context of {contexts[0]} has no room for a picture of {least} tokens, the smallest that is "
            "tried",
            f"ask for a larger --context, above {least}, or say how small pictures may be: "
            f"--image-tokens {max(4, contexts[0] // 2)}",
            param="context",
        )
    larger = 1 << wishes.image_tokens.bit_length()
    return UsageError(
        f"a picture of {wishes.image_tokens} tokens fills a context of {contexts[0]}, the longest that is "
        "tried unless one is asked for",
        f"add a larger one: --context {larger}"
        if larger <= most
        else f"ask for fewer --image-tokens: {_most_of(model)}",
        param="image_tokens",
    )


# Of all settings in the order of preference the ones to take: the first that fit and leave air.
#
# Knows: how a choice is made, the air that is left for what is modelled, and how few layers may wait in
# RAM. Does not know the order (``plan/candidates.py``) or what a line costs (``ledger.py``).


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
