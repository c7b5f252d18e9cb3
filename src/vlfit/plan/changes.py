"""What to change when a plan does not fit, and what each change frees.

The cheapest for the person come first: memory of other programs, requests at once, the backend, a KV cache in
FP8, weights of fewer bits, smaller pictures, a shorter context, and another model last.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from vlfit.checkpoint.catalog_quality import series_of
from vlfit.machine.desktop import memory_advice
from vlfit.machine.model import Gpu, Host
from vlfit.plan import calibration
from vlfit.plan.cost_model import CostModel
from vlfit.plan.ledger import PlanSettings, held_by_others, total_bytes
from vlfit.plan.plans import Change
from vlfit.plan.processors import is_ram
from vlfit.plan.shapes import Model

SHOWN = 3
# Options of ``vlfit convert`` that save bytes at the cost of exactness.
_TABLE, _HEAD, _TOWER, _GROUPS, _COARSE_HEAD = (
    "--embedding int8",
    "--head int8",
    "--vision int8",
    "--group-size ",
    "--head int4",
)


@dataclass(frozen=True, slots=True)
class RefusedChoice:
    """A model and settings whose ledger is ``deficit`` bytes too large for ``gpu``.

    ``cost_model``: of the backend that was chosen; ``native_cost_model``: of the native engine. ``models``:
    other models, and other formats of this one, that may be proposed instead.
    """

    model: Model
    gpu: Gpu
    host: Host
    cost_model: CostModel
    native_cost_model: CostModel
    settings: PlanSettings
    deficit: int
    models: tuple[Model, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of all lines of the refused ledger."""
        return self.total_of(self.model, self.settings)

    def total_of(self, model: Model, settings: PlanSettings) -> int:
        """Bytes that the ledger of ``model`` with ``settings`` would have on the same card and backend."""
        return total_bytes(self.cost_model.lines(model, self.gpu, settings))


def freeable_bytes(gpu: Gpu, host: Host) -> int:
    """At most how many bytes of ``gpu`` closing all other programs would free.

    What is not free now, less the driver's own share or, if larger, what WSL2 hides from Linux
    (``calibration.WSL2_HIDES``).
    """
    kept = max(gpu.reserved, calibration.WSL2_HIDES.bytes if host.wsl2 else 0)
    return max(held_by_others(gpu) - kept, 0)


def cheapest_changes(
    refused: RefusedChoice,
    contexts: Iterable[int],
    image_tokens: Iterable[int],
    sequences: Iterable[int],
    *,
    limit: int = SHOWN,
) -> tuple[Change, ...]:
    """Up to ``limit`` changes: those that are enough alone, the cheapest first; then others, by bytes freed.

    ``contexts``, ``image_tokens``, ``sequences``: values to propose, if below the refused setting; doubles of
    the largest value are proposed, too. Changes that free nothing are left out.
    """
    every = _all_changes(refused, tuple(contexts), tuple(image_tokens), tuple(sequences))
    changes = [replace(each, enough=each.frees >= refused.deficit) for each in every if each.frees > 0]
    enough = [change for change in changes if change.enough]
    rest = sorted((change for change in changes if not change.enough), key=lambda change: -change.frees)
    return tuple([*enough, *rest][:limit])


def enough_together(changes: Iterable[Change], deficit: int) -> tuple[Change, Change] | None:
    """The first two of ``changes`` that free ``deficit`` bytes together but not alone; None if no pair does.

    The first changes a setting, the second frees memory of other programs (``Change.other_programs``): what
    two settings free need not add up. Changes that are ``enough`` alone are ignored.
    """
    rest = [change for change in changes if not change.enough]
    for own in (change for change in rest if not change.other_programs):
        for other in (change for change in rest if change.other_programs):
            if own.frees + other.frees >= deficit:
                return own, other
    return None


def _all_changes(
    refused: RefusedChoice,
    contexts: tuple[int, ...],
    image_tokens: tuple[int, ...],
    sequences: tuple[int, ...],
) -> Iterator[Change]:
    yield from _desktop_changes(refused)
    settings = refused.settings
    yield from _setting_change(refused, "sequences", settings.sequences, sequences)
    yield from _own_engine_change(refused)
    yield from _backend_changes(refused)
    yield from _format_changes(refused)
    yield from _setting_change(refused, "image tokens", settings.image_tokens, image_tokens)
    yield from _setting_change(refused, "context", settings.context, contexts)
    yield from _model_changes(refused)


def _desktop_changes(refused: RefusedChoice) -> Iterator[Change]:
    """Single programs whose memory the driver reports; last, everything that can be freed."""
    if is_ram(refused.gpu):
        yield Change("close other programs, at most", held_by_others(refused.gpu), other_programs=True)
        return
    everything = "no desktop on this card (log out, or the screen on another GPU)"
    if not refused.gpu.driver:  # of the table of cards
        everything = "no desktop on that card (--desktop 0)"
    if refused.host.wsl2:  # the desktop is that of Windows
        everything = "in Windows, the screen on another GPU and nothing open on this one"
    for tip in memory_advice(refused.gpu, refused.host):
        if tip.freed_bytes is not None:
            yield Change(tip.action, tip.freed_bytes, other_programs=True)
        elif tip.kind in ("windows", "outside"):
            everything = tip.action
    yield Change(f"{everything}, at most", freeable_bytes(refused.gpu, refused.host), other_programs=True)


def _setting_change(refused: RefusedChoice, name: str, now: int, steps: tuple[int, ...]) -> Iterator[Change]:
    """The largest smaller value that is enough; if none is, the smallest."""
    field = name.replace(" ", "_")
    best: Change | None = None
    for step in _smaller_steps(now, steps):
        smaller = replace(refused.settings, **{field: step})  # type: ignore[arg-type]
        best = Change(f"{name} {now} -> {step}", _freed_bytes(refused, refused.model, smaller))
        if best.frees >= refused.deficit:
            break
    if best is not None:
        yield best


def _smaller_steps(now: int, steps: tuple[int, ...]) -> list[int]:
    """Values of ``steps`` below ``now``, the largest first, and doubles of the largest step below it."""
    doubles, double = [], 2 * max(steps)
    while double < now:
        doubles.append(double)
        double *= 2
    return sorted({*doubles, *(step for step in steps if step < now)}, reverse=True)


def _own_engine_change(refused: RefusedChoice) -> Iterator[Change]:
    """The same settings in vlfit's own engine, without what only the refused backend takes."""
    settings = refused.cost_model.as_native_settings(refused.settings)
    if settings is not None and refused.model.vision is not None:
        freed = refused.total - total_bytes(
            refused.native_cost_model.lines(refused.model, refused.gpu, settings)
        )
        yield Change(f"vlfit's own engine instead of {refused.cost_model.title} (leave out --backend)", freed)


def _backend_changes(refused: RefusedChoice) -> Iterator[Change]:
    for what, smaller in refused.cost_model.smaller_settings(refused.settings):
        yield Change(what, _freed_bytes(refused, refused.model, smaller))


def _format_changes(refused: RefusedChoice) -> Iterator[Change]:
    """Each smaller weights format; where none is enough, one that is rounded further replaces its own."""
    model = refused.model
    smaller = [
        other
        for other in refused.models
        if other.family == model.family and other.weight_bytes < model.weight_bytes
    ]
    plain = {
        other.weights: Change(
            f"weights {model.weights} -> {other.weights} ({other.convert_command or other.name})",
            _freed_by_model(refused, other),
        )
        for other in smaller
        if not other.convert_options
    }
    coarser = [other for other in smaller if other.convert_options]
    if (
        refused.cost_model.runs_quantized_parts
        and coarser
        and all(each.frees < refused.deficit for each in plain.values())
    ):
        other, change = _rounded_more(refused, coarser)
        plain[other.weights] = change
    yield from plain.values()


def _rounded_more(refused: RefusedChoice, variants: list[Model]) -> tuple[Model, Change]:
    """The mildest of ``variants`` that is enough, else the smallest."""
    now = refused.model.weights
    changes = []
    for other in sorted(variants, key=lambda each: -each.weight_bytes):
        begun = f"{now} rounded further" if now == other.weights else f"weights {now} -> {other.weights}"
        what = f"{begun}, {describe_conversion(other.convert_options)} ({other.convert_command})"
        changes.append((other, Change(what, _freed_by_model(refused, other))))
    return next((each for each in changes if each[1].frees >= refused.deficit), changes[-1])


def _model_changes(refused: RefusedChoice) -> Iterator[Change]:
    """The largest smaller model of the same kind that is enough, in its most exact format.

    One of the same series if there is one.
    """
    model = refused.model
    smaller = [
        other
        for other in refused.models
        if other.family != model.family
        and not other.convert_options
        and other.parameters < model.parameters
        and (other.vision is None) == (model.vision is None)
    ]
    series = series_of(model.family)
    for other in sorted(
        smaller,
        key=lambda each: (series_of(each.family) != series, -each.parameters, -each.weight_bytes),
    ):
        freed = _freed_by_model(refused, other)
        if freed >= refused.deficit:
            yield Change(f"{other.name} instead", freed)
            return


def _freed_by_model(refused: RefusedChoice, other: Model) -> int:
    return _freed_bytes(refused, other, replace(refused.settings, weights=other.weights))


def _freed_bytes(refused: RefusedChoice, model: Model, settings: PlanSettings) -> int:
    return refused.total - refused.total_of(model, settings)


def describe_conversion(options: str) -> str:
    """``vlfit convert`` options (one string, as typed) in words: ``embedding and vision tower in int8, ...``.

    Only those that cost exactness are named; "" if there are none.
    """
    eight = [("embedding", _TABLE), ("output head", _HEAD), ("vision tower", _TOWER)]
    parts = [name for name, option in eight if option in options]
    words = (
        [f"{', '.join(parts[:-1])}{' and ' if len(parts) > 1 else ''}{parts[-1]} in int8"] if parts else []
    )
    if _GROUPS in options:
        words.append(f"{options.partition(_GROUPS)[2].split()[0]} weights to a scale")
    if _COARSE_HEAD in options:
        words.append("the output head in int4 too")
    return ", ".join(words)


def describe_accuracy_loss(options: str) -> str:
    """A sentence on the accuracy that ``vlfit convert`` with ``options`` (one string, as typed) costs.

    Measured on the bundled mini checkpoint by ``benchmarks/quantization.py``, on no larger model.
    """
    if _COARSE_HEAD in options:
        return "Each word is chosen from scores of 4 bits; how much worse answers become was not measured."
    if _GROUPS in options:
        return "Measured on mini alone: int8 there changes next to nothing, larger groups are coarser."
    return "Measured on mini alone: that changes next to nothing."
