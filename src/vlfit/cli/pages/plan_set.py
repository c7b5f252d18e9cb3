"""``vlfit plan`` with several models: what fits together and what sleeps in RAM, or all side by side."""

import shlex
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.catalog_quality import BENCHMARKS, GOOD_FOR, Quality, published_quality, series_of
from vlfit.checkpoint.quantization import FP8
from vlfit.cli.printing import Printer, escape_control, terminal_width, wrap, wrap_command
from vlfit.errors import UsageError
from vlfit.plan.ledger import held_by_others
from vlfit.plan.preference import keeps_floors
from vlfit.plan.recommend import commands_to_type, is_ready_made, short_name
from vlfit.plan.speed import decode_bounds
from vlfit.units import GIB, MIB

if TYPE_CHECKING:
    from vlfit.machine.model import Machine
    from vlfit.plan.model_lookup import NamedModels
    from vlfit.plan.native.model_set import SetPlan
    from vlfit.plan.plans import Plan
    from vlfit.plan.wishes import Wishes


MAX_MODELS = 4  # columns of one screen
_WIDTH = 80
_UNLIMITED = 10_000  # columns without a terminal
_LABEL = 15
_VERDICT = len("Fits  ")
_PIXELS_PER_TOKEN = 32 * 32  # 16 pixels a patch, 2 x 2 patches a token, as in all models of the catalog
_UNKNOWN = "-"
_CONTEXTS = (
    *(2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536, 98304, 131072, 196608, 262144),
)


def print_set(
    names: Sequence[str],
    machine: "Machine",
    wishes: "Wishes",
    printer: Printer,
    *,
    json: bool,
    elsewhere: bool = False,
) -> bool:
    """Plan the models ``names`` for one server and print it; returns whether each fits alone.

    ``elsewhere``: ``machine`` is not this computer, so what was converted here is not there.

    Raises ``UsageError`` for another backend than the native one, and what ``find_plan`` raises.
    """
    from vlfit.plan.model_lookup import find_models
    from vlfit.plan.native.model_set import plan_set

    if wishes.backend not in (None, "native"):
        raise UsageError(
            f"--backend {wishes.backend} serves one model, and {len(names)} are named",
            "Name one, or leave --backend out.",
        )
    if wishes.offload is not None:
        raise UsageError(
            f"--offload does not go with {len(names)} models",
            "Leave it out: what does not fit sleeps in RAM.",
        )
    plan = plan_set([find_models(name, wishes.weights) for name in names], machine, wishes)
    if json:
        printer.data(set_to_json(plan))
    else:
        for line in set_lines(plan, elsewhere=elsewhere):
            printer.line(line)
    return plan.fits


def set_to_json(plan: "SetPlan") -> dict[str, Any]:
    """``plan`` as a JSON object; ``models`` has what ``vlfit plan MODEL --json`` prints of each."""
    from vlfit.plan.native.model_set import own_bytes
    from vlfit.plan.report import plan_to_json

    return {
        "version": 1,
        "fits": plan.fits,
        "models": [{**plan_to_json(each), "own_bytes": own_bytes(each.ledger)} for each in plan.plans],
        "together": list(plan.together),
        "missing": plan.missing,
        "ram": {"asleep": plan.ram, "available": plan.ram_available, "enough": plan.ram_is_enough},
        "command": _command(plan) if plan.fits else None,
    }


def set_lines(plan: "SetPlan", *, elsewhere: bool = False) -> list[str]:
    """The page of ``vlfit plan MODEL MODEL...``, line by line. ``elsewhere``: as for ``print_set``."""
    gpu = plan.plans[0].gpu
    free = gpu.total - held_by_others(gpu)
    names = [short_name(each.model.name) for each in plan.plans]
    width = max(len("model"), *map(len, names))
    heads = ["takes MiB", "left MiB", "context", "image tokens", "at once"]
    rows = [[f"{'model':<{width}}", *heads]]
    for name, each in zip(names, plan.plans, strict=True):
        settings = each.settings
        figures = [_mib(_taken(each)), _mib(each.headroom), settings.context, settings.image_tokens]
        cells = zip([*figures, settings.sequences], heads, strict=True)
        rows.append([f"{name:<{width}}", *(f"{cell:>{len(head)}}" for cell, head in cells)])
    # Of a narrow terminal the columns on the right are left out; what does not fit is in the verdict, too.
    shown = len(rows[0])
    while shown > 2 and len("  ".join(rows[0][:shown])) > terminal_width(_UNLIMITED):
        shown -= 1
    lines = [wrap(f"{gpu.name}: {_mib(free)} MiB free; one server with these models:")]
    for row, fits in zip(rows, (True, *(each.fits for each in plan.plans)), strict=True):
        line = "  ".join(row[:shown])
        remark = "" if fits else "  does not fit"
        lines.append(line + (remark if len(line + remark) <= terminal_width(_UNLIMITED) else ""))
    lines += [wrap(line[_VERDICT:], line[:_VERDICT]) for line in _verdict(plan)]
    if plan.fits:
        commands = [*_conversions(plan, elsewhere=elsewhere), shlex.join(_command(plan))]
        lines += [wrap_command(each, "      " if n else "Type  ") for n, each in enumerate(commands)]
    return lines


def _verdict(plan: "SetPlan") -> list[str]:
    unfit = [short_name(each.model.name) for each in plan.plans if not each.fits]
    if unfit:
        return [
            f"No    {', '.join(unfit)} would not fit even alone: vlfit plan {unfit[0]} says what would help."
        ]
    together = [short_name(name) for name in plan.together]
    if not plan.missing:
        return [f"Fits  all {len(plan.plans)} at once: no model ever sleeps for another."]
    lines = []
    if len(together) > 1:
        lines.append(f"Fits  {' and '.join(together)} at once; the others take turns with them.")
    else:
        lines.append("Fits  one at a time; the others sleep, and wake when a request names them.")
    where = (
        f"{_mib(plan.ram)} MiB of RAM at most, of {_mib(plan.ram_available)} available"
        if plan.ram_is_enough
        else f"{_mib(plan.ram)} MiB of RAM, and {_mib(plan.ram_available)} are available: some are read from"
        " their files again, which takes longer"
    )
    lines.append(f"RAM   sleeping weights take {where}.")
    lines.append(f"More  for all at once {_mib(plan.missing)} MiB more of the card would be needed.")
    return lines


def _taken(plan: "Plan") -> int:
    return plan.total - held_by_others(plan.gpu)


def _conversions(plan: "SetPlan", *, elsewhere: bool) -> list[str]:
    """The ``vlfit convert`` commands for the models that do not exist yet."""
    missing = [
        each for each in plan.plans if each.model.converted_from and (elsewhere or not is_ready_made(each))
    ]
    return [" ".join(commands_to_type(each, ready=False)[0]) for each in missing]


def _command(plan: "SetPlan") -> list[str]:
    """``vlfit serve`` with the sizes that all share; pictures are as large as fits for each model."""
    settings = plan.plans[0].settings
    models = [each.model for each in plan.plans]
    # Of a folder the path: its own name would be looked for on the hub.
    names = [short_name(each.name) if each.source == each.name else each.source for each in models]
    chunk = min(each.settings.chunk for each in plan.plans)
    sizes = ["--context", str(settings.context), "--sequences", str(settings.sequences)]
    sizes += ["--chunk", str(chunk)] if chunk != EngineOptions().max_num_batched_tokens else []
    narrow = ["--kv-dtype", settings.kv_dtype] if settings.kv_dtype != "bf16" else []
    return ["vlfit", "serve", *names, *sizes, *narrow]


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f}"


# --- vlfit plan --compare -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """A model of the comparison: ``name`` as typed, its plan, and what was published of it.

    ``longest``: the longest context that fits with pictures above the floor, with fewer requests or more
    parts quantized where these make room; ``longest_fp8``: the same with a KV cache in FP8. 0: none fits.
    """

    name: str
    plan: "Plan"
    longest: int
    longest_fp8: int
    quality: tuple[Quality, ...]


def print_comparison(
    names: Sequence[str], machine: "Machine", wishes: "Wishes", printer: Printer, *, json: bool
) -> bool:
    """Plan each of ``names`` alone and print all side by side; returns whether any fits.

    Raises ``UsageError`` for fewer than 2 or more than ``MAX_MODELS`` models, and what ``find_plan`` raises.
    """
    if not 2 <= len(names) <= MAX_MODELS:
        raise UsageError(
            f"--compare takes 2 to {MAX_MODELS} models, and {len(names)} are named",
            "Write vlfit plan --compare 8B 9B.",
        )
    compared = [_compare(name, machine, wishes) for name in names]
    if json:
        printer.data(comparison_to_json(compared))
    else:
        for line in comparison_lines(compared):
            printer.line(line)
    return any(each.plan.fits for each in compared)


def _compare(name: str, machine: "Machine", wishes: "Wishes") -> Compared:
    from vlfit.plan.model_lookup import find_models
    from vlfit.plan.planner import find_plan

    found = find_models(name, wishes.weights)
    plan = find_plan(found.exact, machine, wishes, smaller_variants=found.smaller_variants)
    return Compared(
        name,
        plan,
        _longest(found, machine, wishes),
        _longest(found, machine, replace(wishes, kv_dtype=FP8)),
        published_quality(plan.model.name),
    )


def _longest(found: "NamedModels", machine: "Machine", wishes: "Wishes") -> int:
    """The longest context of ``_CONTEXTS`` that fits; 0 if none does."""
    from vlfit.plan.planner import find_plan

    most = found.exact[0].text.max_position_embeddings
    contexts = [context for context in _CONTEXTS if context <= most]

    def is_too_long(context: int) -> bool:
        asked = replace(wishes, context=context)
        try:
            plan = find_plan(found.exact, machine, asked, smaller_variants=found.smaller_variants)
        except UsageError:  # no room for the picture that was asked for
            return context > (wishes.image_tokens or 0)
        return not (plan.fits and keeps_floors(plan.settings, plan.model, asked))

    fitting = bisect_left(contexts, True, key=is_too_long)
    return contexts[fitting - 1] if fitting else 0


def comparison_to_json(compared: Sequence[Compared]) -> dict[str, Any]:
    """``compared`` as a JSON object; ``plan`` has what ``vlfit plan MODEL --json`` prints."""
    from vlfit.plan.report import plan_to_json

    return {
        "version": 1,
        "models": [
            {
                "name": each.name,
                "good_for": _good_for(each) or None,
                "longest_context": each.longest or None,
                "longest_context_fp8": each.longest_fp8 or None,
                "quality": [
                    {
                        "benchmark": figure.benchmark,
                        "score": figure.score,
                        "thinking": figure.thinking,
                        "source": figure.source,
                    }
                    for figure in each.quality
                ],
                "plan": plan_to_json(each.plan),
            }
            for each in compared
        ],
    }


def comparison_lines(compared: Sequence[Compared]) -> list[str]:
    """The page of ``vlfit plan --compare``, as wide as the terminal and at most 80 columns."""
    gpu = compared[0].plan.gpu
    place = " under WSL2" if compared[0].plan.wsl2 else ""
    width = (terminal_width(_WIDTH) - _LABEL) // len(compared)
    sources: dict[tuple[str, bool], str] = {}  # with the letter of its footnote
    rows = [("", [_cut(each.name, width) for each in compared])]
    rows += _plan_rows(compared, width)
    for benchmark in BENCHMARKS:
        rows.append((f"{benchmark} %", [_score(each, benchmark, sources) for each in compared]))
    lines = [f"{gpu.name}{place}: {_mib(gpu.total - held_by_others(gpu))} MiB free", ""]
    lines += [
        f"{label:<{_LABEL}}{''.join(f'{cell:<{width}}' for cell in cells)}".rstrip() for label, cells in rows
    ]
    for (source, thinking), letter in sources.items():
        lines.append(f"{letter}  {source}{', thinking' if thinking else ', without thinking'}")
    lines.append("Scores are of 16-bit weights; with thinking, answers take far more tokens.")
    good = dict.fromkeys((series_of(each.plan.model.family), _good_for(each)) for each in compared)
    lines += [f"{series} is for {what}." for series, what in good if what]
    if any(each.plan.model.converted_from for each in compared):
        lines.append("*  vlfit convert makes it of the download.")
    lines.append("What to type for one of them, and where each MiB goes: vlfit plan MODEL.")
    start = 2 + len(rows)  # of the words below the table
    return [*lines[:start], *(wrap(line) for line in lines[start:])]


def _plan_rows(compared: Sequence[Compared], width: int) -> list[tuple[str, list[str]]]:
    def row(
        label: str, cell: Callable[[Compared], str], *, only_fitting: bool = True
    ) -> tuple[str, list[str]]:
        return label, [
            _cut(cell(each), width) if each.plan.fits or not only_fitting else _UNKNOWN for each in compared
        ]

    return [
        row("weights", lambda each: _weights(each.plan), only_fitting=False),
        row("fits", lambda each: _fits(each.plan), only_fitting=False),
        row("context", lambda each: f"{each.plan.settings.context:,}"),
        row("  at most", lambda each: f"{each.longest:,}" if each.longest else _UNKNOWN),
        row("  KV in FP8", lambda each: f"{each.longest_fp8:,}" if each.longest_fp8 else _UNKNOWN),
        row("picture", lambda each: _picture(each.plan)),
        row("at once", lambda each: str(each.plan.settings.sequences)),
        row("tokens/s", lambda each: _tokens_per_s(each.plan)),
        row("first token", lambda each: _first_token(each.plan)),
        row("download GiB", lambda each: _download(each.plan), only_fitting=False),
    ]


def _weights(plan: "Plan") -> str:
    """The format, with the parts that are quantized too: ``int4-e8``."""
    model = plan.model
    made = model.converted_from.rpartition("/")[2]
    whole = model.name.rpartition("/")[2]
    return f"{whole.removeprefix(f'{made}-').lower()} *" if made else model.weights


def _fits(plan: "Plan") -> str:
    return f"{_mib(plan.headroom)} MiB left" if plan.fits else f"no, {_mib(-plan.headroom)} short"


def _picture(plan: "Plan") -> str:
    tokens = plan.settings.image_tokens
    return f"{tokens:,} = {tokens * _PIXELS_PER_TOKEN / 1e6:.1f} MP" if tokens else "none"


def _tokens_per_s(plan: "Plan") -> str:
    if plan.speed is None:
        return _UNKNOWN
    return "-".join(decode_bounds(plan.speed.decode.low, plan.speed.decode.high))


def _first_token(plan: "Plan") -> str:
    likely = plan.speed.likely_first_token if plan.speed is not None else None
    if likely is None:
        return _UNKNOWN
    if likely.expected >= 1:
        return f"{likely.expected:.1f} s"
    return f"{float(f'{likely.expected * 1000:.2g}'):g} ms"


def _download(plan: "Plan") -> str:
    return f"{plan.needs.download / GIB:.2f}" if plan.needs.download else "none"


def _good_for(each: Compared) -> str:
    return GOOD_FOR.get(series_of(each.plan.model.family), "")


def _score(each: Compared, benchmark: str, sources: dict[tuple[str, bool], str]) -> str:
    figure = next((figure for figure in each.quality if figure.benchmark == benchmark), None)
    if figure is None:
        return _UNKNOWN
    letter = sources.setdefault((figure.source, figure.thinking), chr(ord("a") + len(sources)))
    return f"{figure.score:.1f} {letter}"


def _cut(text: str, width: int) -> str:
    shown = escape_control(text, terminal=True)
    return shown if len(shown) < width else f"{shown[: width - 2]}~"
