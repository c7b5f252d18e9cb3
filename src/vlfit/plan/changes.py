"""What to change when a plan does not fit, and what each change frees.

Knows: the changes that there are, in the order of what they cost a person: nothing of the answers first, then
requests at once, a rounding of the weights, smaller pictures, a shorter context, and another model last. Does
not know how a plan was chosen.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from vlfit.machine.desktop import advice
from vlfit.machine.model import Gpu, Host
from vlfit.plan.ledger import NATIVE, VLLM, Settings, held_by_others, ledger
from vlfit.plan.model import Model

SHOWN = 3
_LEAST_CHUNK = 128  # the fewest tokens of a pass that plans of the native engine have


@dataclass(frozen=True, slots=True)
class Change:
    """``what`` to change, in words, and the bytes that it ``frees``."""

    what: str
    frees: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A plan that is ``deficit`` bytes short, and the other ``models`` that could be taken instead."""

    model: Model
    gpu: Gpu
    host: Host
    backend: str
    settings: Settings
    deficit: int
    models: tuple[Model, ...] = ()


def total(model: Model, gpu: Gpu, backend: str, settings: Settings) -> int:
    """Bytes of all lines of the ledger."""
    return sum(line.bytes for line in ledger(model, gpu, backend, settings))


def cheapest(
    refused: Refused, contexts: Iterable[int], image_tokens: Iterable[int], *, most: int = SHOWN
) -> tuple[Change, ...]:
    """The cheapest changes that each make it fit; where fewer do, those that free the most besides.

    ``contexts`` and ``image_tokens`` are the steps that may be gone down to.
    """
    changes = [change for change in _all(refused, tuple(contexts), tuple(image_tokens)) if change.frees > 0]
    enough = [change for change in changes if change.frees >= refused.deficit]
    rest = sorted((c for c in changes if c.frees < refused.deficit), key=lambda change: -change.frees)
    return tuple([*enough, *rest][:most])


def _all(refused: Refused, contexts: tuple[int, ...], image_tokens: tuple[int, ...]) -> Iterator[Change]:
    yield from _desktop(refused)
    settings = refused.settings
    yield from _setting(refused, "sequences", settings.sequences, (1,))
    yield from _own_engine(refused)
    yield from _formats(refused)
    yield from _setting(refused, "image tokens", settings.image_tokens, image_tokens)
    yield from _setting(refused, "context", settings.context, contexts)
    yield from _models(refused)


def _desktop(refused: Refused) -> Iterator[Change]:
    for tip in advice(refused.gpu, refused.host):
        if tip.frees is not None:
            yield Change(tip.what, tip.frees)
    held = held_by_others(refused.gpu)
    everything = "no desktop on this card (log out, or the screen on another GPU), at most"
    yield Change(everything, held - refused.gpu.reserved)


def _setting(refused: Refused, name: str, now: int, steps: tuple[int, ...]) -> Iterator[Change]:
    """One step down that is enough, the smallest such; else the largest step there is."""
    lower = sorted((step for step in steps if step < now), reverse=True)
    field = name.replace(" ", "_")
    best: Change | None = None
    for step in lower:
        smaller = replace(refused.settings, **{field: step})  # type: ignore[arg-type]
        best = Change(f"{name} {now} -> {step}", _freed(refused, refused.model, smaller))
        if best.frees >= refused.deficit:
            break
    if best is not None:
        yield best


def _own_engine(refused: Refused) -> Iterator[Change]:
    """The same settings without what only vLLM takes."""
    if refused.backend == VLLM and refused.model.vision is not None:
        settings = replace(refused.settings, chunk=_LEAST_CHUNK, graphs=False)
        before = total(refused.model, refused.gpu, VLLM, refused.settings)
        freed = before - total(refused.model, refused.gpu, NATIVE, settings)
        yield Change("vlfit's own engine instead of vLLM (leave out --backend)", freed)


def _formats(refused: Refused) -> Iterator[Change]:
    model = refused.model
    for other in refused.models:
        if other.family == model.family and other.weight_bytes < model.weight_bytes:
            source = other.converted_from
            made = f"vlfit convert {source} --weights {other.weights}" if source else other.name
            yield Change(f"weights {model.weights} -> {other.weights} ({made})", _instead(refused, other))


def _models(refused: Refused) -> Iterator[Change]:
    """A smaller model of the same kind, the largest first, in its most exact format that is enough."""
    model = refused.model
    smaller = [
        other
        for other in refused.models
        if other.family != model.family
        and other.parameters < model.parameters
        and (other.vision is None) == (model.vision is None)
    ]
    for other in sorted(smaller, key=lambda each: (-each.parameters, -each.weight_bytes)):
        freed = _instead(refused, other)
        if freed >= refused.deficit:
            yield Change(f"{other.name} instead", freed)
            return


def _instead(refused: Refused, other: Model) -> int:
    return _freed(refused, other, replace(refused.settings, weights=other.weights))


def _freed(refused: Refused, model: Model, settings: Settings) -> int:
    before = total(refused.model, refused.gpu, refused.backend, refused.settings)
    return before - total(model, refused.gpu, refused.backend, settings)
