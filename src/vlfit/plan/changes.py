"""What to change when a plan does not fit, and what each change frees.

Knows: the changes that there are, in the order of what they cost a person: nothing of the answers first, then
requests at once, a rounding of the KV cache, of the weights, smaller pictures, a shorter context, and another
model last. Does not know how a plan was chosen.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from vlfit.checkpoint.quantization import FP8
from vlfit.machine.desktop import advice
from vlfit.machine.model import Gpu, Host
from vlfit.plan import calibration
from vlfit.plan.ledger import NATIVE, VLLM, Settings, held_by_others, ledger
from vlfit.plan.shapes import Model

# What options of `vlfit convert` mean for the answers, in words. Knows the options; does not know sizes.


_TABLE, _HEAD, _TOWER, _GROUPS, _COARSE_HEAD = (
    "--embedding int8",
    "--head int8",
    "--vision int8",
    "--group-size ",
    "--head int4",
)


def in_words(options: str) -> str:
    """``options`` of a conversion as a person says them: ``embedding and vision tower in int8, ...``."""
    eight = [("embedding", _TABLE), ("output head", _HEAD), ("vision tower", _TOWER)]
    parts = [name for name, option in eight if option in options]
    said = [f"{', '.join(parts[:-1])}{' and ' if len(parts) > 1 else ''}{parts[-1]} in int8"] if parts else []
    if _GROUPS in options:
        said.append(f"{options.partition(_GROUPS)[2].split()[0]} weights to a scale")
    if _COARSE_HEAD in options:
        said.append("the output head in int4 too")
    return ", ".join(said)


def cost_of(options: str) -> str:
    """What is known of the loss: measured on mini by ``benchmarks/rounding.py``, and on no larger model."""
    if _COARSE_HEAD in options:
        return "Each word is chosen from scores of 4 bits; how much worse answers become was not measured."
    if _GROUPS in options:
        return "Measured on mini alone: int8 there changes next to nothing, larger groups are coarser."
    return "Measured on mini alone: that changes next to nothing."


SHOWN = 3
_LEAST_CHUNK = 128  # the fewest tokens of a pass that plans of the native engine have


@dataclass(frozen=True, slots=True)
class Change:
    """``what`` to change, in words, the bytes that it ``frees``, and whether that is ``enough`` alone.

    ``others``: what is freed is other programs', so that it comes on top of any other change.
    """

    what: str
    frees: int
    enough: bool = False
    others: bool = False


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


def can_be_freed(gpu: Gpu, host: Host) -> int:
    """The most bytes of what others hold that a person can get back.

    The driver keeps its own share. Under WSL2 a Linux process never sees all of the card, whatever Windows
    does (``calibration.WSL2_HIDES``).
    """
    kept = max(gpu.reserved, calibration.WSL2_HIDES.bytes if host.wsl2 else 0)
    return max(held_by_others(gpu) - kept, 0)


def cheapest(
    refused: Refused,
    contexts: Iterable[int],
    image_tokens: Iterable[int],
    sequences: Iterable[int],
    *,
    most: int = SHOWN,
) -> tuple[Change, ...]:
    """The cheapest changes that each make it fit; where fewer do, those that free the most besides.

    ``contexts``, ``image_tokens`` and ``sequences`` are the steps that may be gone down to; above the largest
    of them every double of it is a step too.
    """
    found = _all(refused, tuple(contexts), tuple(image_tokens), tuple(sequences))
    changes = [replace(each, enough=each.frees >= refused.deficit) for each in found if each.frees > 0]
    enough = [change for change in changes if change.enough]
    rest = sorted((change for change in changes if not change.enough), key=lambda change: -change.frees)
    return tuple([*enough, *rest][:most])


def enough_together(changes: Iterable[Change], deficit: int) -> tuple[Change, Change] | None:
    """Two changes that only together free ``deficit`` bytes; None where there are none, or one is enough.

    One of them is of other programs: of two settings nothing says that their bytes add up.
    """
    rest = [change for change in changes if not change.enough]
    for own in (change for change in rest if not change.others):
        for other in (change for change in rest if change.others):
            if own.frees + other.frees >= deficit:
                return own, other
    return None


def _all(
    refused: Refused, contexts: tuple[int, ...], image_tokens: tuple[int, ...], sequences: tuple[int, ...]
) -> Iterator[Change]:
    yield from _desktop(refused)
    settings = refused.settings
    yield from _setting(refused, "sequences", settings.sequences, sequences)
    yield from _own_engine(refused)
    yield from _narrow_cache(refused)
    yield from _formats(refused)
    yield from _setting(refused, "image tokens", settings.image_tokens, image_tokens)
    yield from _setting(refused, "context", settings.context, contexts)
    yield from _models(refused)


def _desktop(refused: Refused) -> Iterator[Change]:
    """Single programs where the driver tells what they hold; else, and last, everything that can go."""
    everything = "no desktop on this card (log out, or the screen on another GPU)"
    if refused.host.wsl2:  # there is no desktop in WSL2 to log out of: it is Windows'
        everything = "in Windows, the screen on another GPU and nothing open on this one"
    for tip in advice(refused.gpu, refused.host):
        if tip.frees is not None:
            yield Change(tip.what, tip.frees, others=True)
        elif tip.kind in ("windows", "outside"):
            everything = tip.what
    yield Change(f"{everything}, at most", can_be_freed(refused.gpu, refused.host), others=True)


def _setting(refused: Refused, name: str, now: int, steps: tuple[int, ...]) -> Iterator[Change]:
    """The largest step down that is enough; where none is, the last."""
    field = name.replace(" ", "_")
    best: Change | None = None
    for step in _below(now, steps):
        smaller = replace(refused.settings, **{field: step})  # type: ignore[arg-type]
        best = Change(f"{name} {now} -> {step}", _freed(refused, refused.model, smaller))
        if best.frees >= refused.deficit:
            break
    if best is not None:
        yield best


def _below(now: int, steps: tuple[int, ...]) -> list[int]:
    """Steps below ``now``, the largest first, with the doubles of the largest that are below it too."""
    doubles, double = [], 2 * max(steps)
    while double < now:
        doubles.append(double)
        double *= 2
    return sorted({*doubles, *(step for step in steps if step < now)}, reverse=True)


def _own_engine(refused: Refused) -> Iterator[Change]:
    """The same settings without what only vLLM takes."""
    if refused.backend == VLLM and refused.model.vision is not None:
        settings = replace(refused.settings, chunk=_LEAST_CHUNK, graphs=False)
        before = total(refused.model, refused.gpu, VLLM, refused.settings)
        freed = before - total(refused.model, refused.gpu, NATIVE, settings)
        yield Change("vlfit's own engine instead of vLLM (leave out --backend)", freed)


def _narrow_cache(refused: Refused) -> Iterator[Change]:
    """Of the native engine, which has it on every card."""
    settings = refused.settings
    if refused.backend == NATIVE and settings.kv_dtype != FP8:
        narrow = replace(settings, kv_dtype=FP8)
        what = f"KV cache {settings.kv_dtype} -> {FP8} (--kv-dtype {FP8})"
        yield Change(what, _freed(refused, refused.model, narrow))


def _formats(refused: Refused) -> Iterator[Change]:
    """Each smaller format; where none is enough, what more options make of one stands for it."""
    model = refused.model
    smaller = [
        other
        for other in refused.models
        if other.family == model.family and other.weight_bytes < model.weight_bytes
    ]
    plain = {
        other.weights: Change(
            f"weights {model.weights} -> {other.weights} ({other.made_by or other.name})",
            _instead(refused, other),
        )
        for other in smaller
        if not other.convert_options
    }
    coarser = [other for other in smaller if other.convert_options]
    if refused.backend == NATIVE and coarser and all(each.frees < refused.deficit for each in plain.values()):
        other, change = _rounded_more(refused, coarser)
        plain[other.weights] = change
    yield from plain.values()


def _rounded_more(refused: Refused, variants: list[Model]) -> tuple[Model, Change]:
    """The mildest of ``variants`` that is enough, else the smallest; with the loss that it means."""
    now = refused.model.weights
    found = []
    for other in sorted(variants, key=lambda each: -each.weight_bytes):
        begun = f"{now} rounded further" if now == other.weights else f"weights {now} -> {other.weights}"
        what = f"{begun}, {in_words(other.convert_options)} ({other.made_by})"
        found.append((other, Change(what, _instead(refused, other))))
    return next((each for each in found if each[1].frees >= refused.deficit), found[-1])


def _models(refused: Refused) -> Iterator[Change]:
    """A smaller model of the same kind, the largest first, in its most exact format that is enough."""
    model = refused.model
    smaller = [
        other
        for other in refused.models
        if other.family != model.family
        and not other.convert_options
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
