"""What ``vlfit verify`` found on this computer, kept for later plans, for the doctor and for the next start.

One JSON file for each device, model and weights format, below ``$XDG_STATE_HOME/vlfit/verified``. Plans take
the measured speed of the same model, driver and torch in place of the predicted one. Beside them lies what
was offered, so that nobody is told twice.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

from vlfit.machine.model import Gpu
from vlfit.plan.actual import Row
from vlfit.plan.calibration import file_name_of, read_json_record, torch_version, write_atomically
from vlfit.plan.plans import Remark
from vlfit.plan.processors import Ram
from vlfit.plan.speed import TEXT_TOKENS, Range, Speed
from vlfit.units import MIB

VERSION = 1
MOST_FINDINGS = 8  # of one run that are kept
_MOST_LINES = 64
_MOST = 2**18  # bytes of a file; real ones have some thousand
_MOST_FILES = 256  # that are read of a folder
_LONGEST = 2000  # characters of a text
# A speed that was measured once is said to be right within this factor: a choice, as other programs run.
MEASURED_RANGE = 1.15
# Measured by predicted speed; what is further off was disturbed, or the model is another.
_LEAST_FACTOR, _MOST_FACTOR = 0.02, 50.0


@dataclass(frozen=True, slots=True)
class KeptFinding:
    """What differed: fields as in ``parity.findings.Finding``, all texts; ``way_around`` "": none known."""

    code: str
    component: str
    stage: str
    condition: str
    likely: str
    note: str
    way_around: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """What a model ran on: a card with its ``driver``, or a processor with its ``threads``, no driver."""

    name: str
    driver: str = ""
    threads: int = 0

    @property
    def key(self) -> str:
        """What identifies it, whatever its driver."""
        return f"{self.name}, {self.threads} threads" if self.threads else self.name


@dataclass(frozen=True, slots=True)
class KeptSpeed:
    """Speed of one request alone: ``tokens_per_s`` with ``cached_tokens`` before the token, on average.

    ``first_token_s``: of a prompt of ``prompt_tokens``, a picture of 512x512 pixels among them if
    ``has_picture``.
    """

    tokens_per_s: float
    cached_tokens: int
    first_token_s: float
    prompt_tokens: int
    has_picture: bool


@dataclass(frozen=True, slots=True)
class Verification:
    """The last run of ``vlfit verify`` for one ``model`` with its ``weights`` on one ``device``.

    ``weights``: the format as plans name it, of GGUF models the type (``Q4_K_M``); ``weights_format``: the
    checkpoint's. ``torch``, ``vlfit``: versions. ``date``: in ISO 8601. ``findings``: the first of them;
    empty if ``ok``. ``speed``: None if it was not measured, or with options that change it. ``lines``:
    planned and held bytes by ledger line; ``planned``, ``held``: their sums as the report has them.
    """

    model: str
    weights: str
    weights_format: str
    device: Device
    torch: str
    vlfit: str
    date: str
    level: str
    ok: bool
    findings: tuple[KeptFinding, ...] = ()
    speed: KeptSpeed | None = None
    planned: int = 0
    held: int = 0
    lines: tuple[tuple[str, int | None, int | None], ...] = ()


def lines_of(rows: tuple[Row, ...]) -> tuple[tuple[str, int | None, int | None], ...]:
    """Name, planned and held bytes of ``rows``."""
    return tuple((row.line, row.planned, row.actual) for row in rows[:_MOST_LINES])


def device_of(gpu: Gpu) -> Device:
    """The device that ``gpu`` is; RAM in place of a card means its processor."""
    if isinstance(gpu, Ram):
        return Device(gpu.processor.name, "", gpu.processor.threads)
    return Device(gpu.name, gpu.driver)


# --- files -------------------------------------------------------------------------------------------------


def verified_folder() -> Path:
    """``$XDG_STATE_HOME/vlfit/verified``, below ``~/.local/state`` without the variable; creates nothing."""
    base = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return base / "vlfit" / "verified"


def verified_path(device: Device, model: str, weights: str) -> Path:
    """The file of the last verification of a model on a device; it may not exist."""
    return verified_folder() / _file(device.key, model, weights)


def _file(*parts: str) -> str:
    """A file name that people can read, and no two keys share."""
    digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{file_name_of(*parts)[:150]}-{digest}.json"


def keep(found: Verification) -> Path:
    """Write ``found`` in place of what was kept before. Raises ``UsageError`` if it cannot be written."""
    path = verified_path(found.device, found.model, found.weights)
    words = json.dumps({"version": VERSION, **asdict(found)}, indent=2) + "\n"
    write_atomically(path, words, "result of vlfit verify", "XDG_STATE_HOME")
    return path


def load(device: Device, model: str, weights: str) -> Verification | None:
    """The last verification of a model on a device, whatever its driver; None without a sound file."""
    kept = _read(verified_path(device, model, weights))
    if kept is None or (kept.device.key, kept.model, kept.weights) != (device.key, model, weights):
        return None
    return kept


def kept_verifications() -> list[Verification]:
    """What is kept on this computer, the last first. Files that vlfit did not write are passed over."""
    try:
        paths = sorted(verified_folder().glob("*.json"), key=_changed, reverse=True)[:_MOST_FILES]
    except OSError:
        return []
    return [kept for kept in map(_read, paths) if kept is not None]


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read(path: Path) -> Verification | None:
    try:
        return _parse(read_json_record(path, _MOST))
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None


def _parse(facts: Any) -> Verification:
    """The record of a JSON object. Raises ``ValueError``, ``TypeError`` or ``KeyError`` if it is none."""
    if not isinstance(facts, dict) or facts.get("version") != VERSION:
        raise ValueError("not a verification of this version")
    device = facts["device"]
    findings = [KeptFinding(**_texts(each, KeptFinding)) for each in facts["findings"][:MOST_FINDINGS]]
    lines = [
        (_text(name), None if planned is None else _count(planned), None if held is None else _count(held))
        for name, planned, held in facts["lines"][:_MOST_LINES]
    ]
    date.fromisoformat(_text(facts["date"]))
    if not isinstance(facts["ok"], bool) or facts["ok"] != (not findings):
        raise ValueError("ok contradicts the findings")
    names = ("model", "weights", "weights_format", "torch", "vlfit", "date", "level")
    return Verification(
        **{name: _text(facts[name]) for name in names},
        device=Device(_text(device["name"]), _text(device["driver"]), _count(device["threads"])),
        ok=facts["ok"],
        findings=tuple(findings),
        speed=None if facts["speed"] is None else _speed(facts["speed"]),
        planned=_count(facts["planned"]),
        held=_count(facts["held"]),
        lines=tuple(lines),
    )


def _texts(facts: Any, kind: type[KeptFinding]) -> dict[str, str]:
    return {field.name: _text(facts[field.name]) for field in fields(kind)}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value[:_LONGEST]


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise TypeError("no count")
    return value


def _speed(facts: Any) -> KeptSpeed:
    tokens_per_s, first = facts["tokens_per_s"], facts["first_token_s"]
    for value in (tokens_per_s, first):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise TypeError("no number")
        if not 1e-6 <= value <= 1e7:
            raise ValueError("no speed that a model has")
    has_picture = facts["has_picture"]
    if not isinstance(has_picture, bool):
        raise TypeError("neither true nor false")
    cached, prompt = _count(facts["cached_tokens"]), _count(facts["prompt_tokens"])
    return KeptSpeed(float(tokens_per_s), cached, float(first), prompt, has_picture)


# --- offered once ------------------------------------------------------------------------------------------


def offer_once(device: Device, weights_format: str) -> bool:
    """Whether to offer a verification of models in ``weights_format`` on ``device``; True at most once.

    False if one is kept, if this was True before, or if that cannot be kept.
    """
    known = any(
        kept.device.key == device.key and kept.weights_format == weights_format
        for kept in kept_verifications()
    )
    if known:
        return False
    path = verified_folder() / "offered" / _file(device.key, weights_format)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            json.dump({"version": VERSION, "date": date.today().isoformat()}, file)
        return True
    return False


# --- in a plan ---------------------------------------------------------------------------------------------


def measured_on(gpu: Gpu, model: str, weights: str) -> Verification | None:
    """The verification of a model on ``gpu`` with its driver and the installed torch; None without one.

    None, too, for a card named on the command line, as it has no driver, and without a measured speed.
    """
    device = device_of(gpu)
    if not device.driver and not device.threads:
        return None
    kept = load(device, model, weights)
    if kept is None or kept.speed is None:
        return None
    return kept if (kept.device.driver, kept.torch) == (device.driver, torch_version()) else None


def measured_here(
    speed: Speed, kept: Verification | None, predict: Callable[[int], Speed | None]
) -> tuple[Speed, Remark] | None:
    """``speed`` as measured, and what to say of it; None if nothing was, or it does not bear on it.

    A plan's context and pictures are not those that were measured: the prediction for them is multiplied by
    what was measured, divided by what is predicted for the same request. ``predict``: the speed with a
    picture of so many tokens.
    """
    measured = None if kept is None else kept.speed
    if kept is None or measured is None:
        return None
    decoding = predict(max(measured.cached_tokens - TEXT_TOKENS, 0))
    prompt = predict(max(measured.prompt_tokens - TEXT_TOKENS, 0))
    if decoding is None or prompt is None:
        return None
    faster = measured.tokens_per_s / decoding.decode.expected
    longer = measured.first_token_s / prompt.first_token.expected
    if not all(_LEAST_FACTOR <= factor <= _MOST_FACTOR for factor in (faster, longer)):
        return None
    low, high = decoding.decode.low, decoding.decode.high
    first = _around(speed.first_token, longer)
    changed = replace(
        speed,
        decode=_around(speed.decode, faster),
        first_token=first,
        likely_first_token=first if speed.likely_first_token is not None else None,
        small_picture=None if speed.small_picture is None else _around(speed.small_picture, longer),
        measured=kept.date,
    )
    asked = "a picture of 512x512" if measured.has_picture else "text"
    memory = f"; {kept.held / MIB:,.0f} MiB held of {kept.planned / MIB:,.0f} planned" if kept.planned else ""
    text = (
        f"Measured here by vlfit verify, {kept.date}: {_number(measured.tokens_per_s)} tokens/s (predicted "
        f"{_number(low)} to {_number(high)}), first token of {asked} after {measured.first_token_s:.2f} s"
        f"{memory}."
    )
    return changed, Remark(text, "measured_here")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _around(predicted: Range, factor: float) -> Range:
    expected = predicted.expected * factor
    return Range(expected / MEASURED_RANGE, expected, expected * MEASURED_RANGE)
