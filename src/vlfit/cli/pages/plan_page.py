"""Plans and ledgers as text: settings, a stacked bar, the ledger, the verdict, speed, what to change."""

import io
import math
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from vlfit.checkpoint.catalog import BF16
from vlfit.cli.printing import escape_control, terminal_width
from vlfit.machine.cards import has_bf16, has_fp8
from vlfit.plan.backends import CPU, cost_model_of
from vlfit.plan.ledger import held_by_others, shown_name
from vlfit.plan.native.cpu_cost import SMALL_PICTURE
from vlfit.plan.needs import CONVERSION_CORES
from vlfit.plan.processors import Ram, describe_processor
from vlfit.plan.recommend import Advice, commands_to_type, is_ready_made, short_family
from vlfit.plan.speed import decode_bounds, rounded_bounds
from vlfit.plan.svg import COLOURS, LETTERS
from vlfit.units import MIB, format_bandwidth, format_bytes

if TYPE_CHECKING:
    from vlfit.checkpoint.any_model import AnyCheckpoint
    from vlfit.machine.model import Gpu, Processor
    from vlfit.plan.ledger import Line
    from vlfit.plan.plans import Plan
    from vlfit.plan.speed import Range, Speed


_BAR = 72
_WHAT_IF_WIDTH = 130  # of a file or pipe: each machine stays on one line
MAX_WIDTH = 110
_ORDINALS = ("first", "second", "third")
_NUMBERS = ("context", "image tokens", "at once", "left MiB", "tokens/s")
_TABLE_WIDTH = 1000  # to measure how wide a table would be
_NO_CARD = (99, 0)  # RAM in place of a card
_LONG_SECONDS = 10.0  # to the first token of the largest picture


def page(plan: "Plan", *, on_terminal: bool | None = None) -> str:
    """A plan with its ledger, speed, changes, flags and remarks, for a server that is being started.

    ``on_terminal``: with colours; None: if stdout is a terminal.
    """
    console = new_console(on_terminal=on_terminal)
    _print_ledger(console, plan)
    console.print(_verdict(plan))
    for line in _speed(plan):
        console.print(line)
    _print_changes(console, plan)
    for line in _start(plan):
        console.print(line)
    if plan.flags:
        console.print(_flags(plan))
    for remark in plan.remarks:
        console.print(escape_control(remark, terminal=True))
    return text_of(console)


def model_page(plan: "Plan", advice: Advice, others: "Sequence[Plan]" = ()) -> str:
    """The page of ``vlfit plan MODEL``: what to take, whether it fits, what to type; the ledger.

    ``others``: other plans that fit, as a table at the end.
    """
    console = new_console()
    if plan.fits:
        _print_summary(console, plan, advice)
    else:
        _print_refusal(console, plan, advice)
    console.print()
    _print_ledger(console, plan)
    for line in _roof(plan):
        console.print(line)
    if plan.flags:
        for line in _start(plan):
            console.print(line)
        console.print(_flags(plan))
    for remark in plan.remarks:
        console.print(escape_control(remark, terminal=True))
    if others:
        console.print()
        console.print(_catalog_table(others, console, plan.gpu, "also fits"))
    return text_of(console)


def table_page(
    plans: "Sequence[Plan]", best: "Plan | None", advice: Advice, *, with_text_models: bool = False
) -> str:
    """The page of ``vlfit plan``: what to take of the catalog, what to type; what else fits; what does not.

    ``best``: the plan to take; None: none fits, and the page says what would help. Text-only models are left
    out unless ``with_text_models``.
    """
    console = new_console()
    shown = [plan for plan in plans if with_text_models or plan.model.vision is not None]
    if best is not None:
        _print_summary(console, best, advice)
        if best.model.vision is None and not with_text_models:
            _print_labelled(console, "Note", "it takes no pictures: no model that does fits here")
        for remark in best.remarks:
            _print_labelled(console, "Note", remark)
    elif plans:
        _print_refusal(console, max(shown or plans, key=lambda plan: plan.headroom), advice, one_of_many=True)
    console.print()
    fitting = [plan for plan in shown if plan.fits and plan is not best]
    if fitting:
        console.print(_catalog_table(fitting, console, plans[0].gpu, "also fits"))
    too_large = _too_large([plan for plan in shown if not plan.fits])
    if too_large:
        console.print(too_large)
    hidden = "" if with_text_models else "Text-only models: --all. "
    console.print(f"{hidden}Where each MiB goes: vlfit plan MODEL.")
    return text_of(console)


# --- the first lines: take, fits, type ---------------------------------------------------------------------

_LABEL = 6  # columns


def _print_summary(console: Console, plan: "Plan", advice: Advice) -> None:
    """What to take, that it fits, what to type; then what that needs, its speed, and notes."""
    from vlfit.plan.vllm.lines import kv_cache_problem

    ready = _is_ready(plan, advice)
    made = "" if ready else ", which vlfit convert makes"
    _print_labelled(console, "Take", f"{_short(plan)}{made}", "bold green")
    settings = plan.settings
    pictures = f"{settings.image_tokens} image tokens, " if settings.image_tokens else ""
    free = plan.gpu.total - held_by_others(plan.gpu)
    _print_labelled(
        console,
        "Fits",
        f"{_mib(plan.headroom)} left of {_count(free)} free; context {settings.context}, {pictures}"
        f"{settings.sequences} at once",
        "bold green",
    )
    if problem := kv_cache_problem(plan):
        _print_labelled(console, "But", problem, "bold red")
    for number, words in enumerate(commands_to_type(plan, ready=ready)):
        _print_command(console, "Type" if number == 0 else "", words)
    console.print()
    _print_labelled(console, "Get", _needs(plan, advice, ready=ready))
    _print_labelled(console, "Speed", _pace(plan))
    if instead := _smaller_pictures(plan):
        _print_labelled(console, "Or", instead)
    _print_card(console, plan, advice)
    for text in _contexts(plan, advice):
        _print_labelled(console, "More", text)
    if advice.ready is not None:
        other = advice.ready
        instead = f"{_short(other)}, context {other.settings.context}, {_mib(other.headroom)} left"
        _print_labelled(console, "Or", f"without a conversion: {instead}")
        _print_command(console, "", commands_to_type(other, ready=True)[0])
    if advice.other_series:
        _print_labelled(console, "Or", advice.other_series)


def _print_refusal(console: Console, plan: "Plan", advice: Advice, *, one_of_many: bool = False) -> None:
    """That nothing fits, by how much, and the cheapest changes."""
    free = plan.gpu.total - held_by_others(plan.gpu)
    needs = f"{_short(plan)} needs" if one_of_many else "it needs"
    _print_labelled(
        console,
        "No",
        f"{'model of the catalog fits' if one_of_many else f'{_short(plan)} does not fit'}: {needs} "
        f"{_mib(-plan.headroom)} more than the {_count(free)} free",
        "bold red",
    )
    _print_changes(console, plan)
    if advice.shorter:
        longest = advice.shorter[-1].settings.context
        _print_labelled(console, "Or", f"the longest context that fits is {longest}: --context {longest}")
    console.print()
    if not one_of_many:
        _print_labelled(console, "Speed", _pace(plan))
    _print_card(console, plan, advice)


def _print_card(console: Console, plan: "Plan", advice: Advice) -> None:
    """The card, what is free of it, and what it lacks."""
    gpu, cards = plan.gpu, len(advice.machine.gpus)
    if gpu.compute_capability == _NO_CARD:
        held = held_by_others(gpu)
        text = f"{_mib(gpu.total)}; {_count(held)} held by other programs, {_count(gpu.total - held)} free"
        _print_labelled(console, "RAM", text)
        if isinstance(gpu, Ram) and cost_model_of(plan) is CPU:
            _print_processor(console, gpu.processor, advice)
        return
    place = " under WSL2" if plan.wsl2 else ""
    held = held_by_others(gpu)
    how = {"typed": "as typed", "assumed": "assumed: --desktop SIZE sets it"}.get(gpu.desktop_how, "measured")
    count = f"{cards} x " if cards > 1 and len({each.name for each in advice.machine.gpus}) == 1 else ""
    each = " each" if count else ""
    _print_labelled(
        console,
        "Card",
        f"{count}{gpu.name}{place}: {_mib(gpu.total)}{each}; {_count(held)} held by the desktop ({how}), "
        f"{_count(gpu.total - held)} free",
    )
    for note in _card_notes(plan, advice):
        _print_labelled(console, "Note", note)


def _print_processor(console: Console, processor: "Processor", advice: Advice) -> None:
    """The processor, its speed, and why no GPU is used, unless the processor was asked for."""
    words = describe_processor(processor)
    _print_labelled(console, "CPU", words)
    if not advice.elsewhere and processor.measured and not processor.quiet:
        note = (
            "other programs ran while the processor was measured: it may be faster than this. The next plan "
            "measures it again."
        )
        _print_labelled(console, "Note", note)
    reason = advice.machine.no_gpu_reason
    if reason and not advice.cpu_wanted:
        _print_labelled(console, "Note", f"no GPU: {reason}")


def _card_notes(plan: "Plan", advice: Advice) -> list[str]:
    capability = plan.gpu.compute_capability
    notes = []
    if not has_bf16(capability):
        notes.append(
            "this card has no bf16 and no FP8 units: vlfit computes in float16 and dequantizes FP8 weights. "
            "It was never tried on such a card: expect less."
        )
    elif not has_fp8(capability):
        notes.append(
            "this card has no FP8 units: FP8 weights take half the memory, and are dequantized to compute in "
            "bf16"
        )
    cards = [gpu for gpu in advice.machine.gpus if gpu.name == plan.gpu.name]
    if len(cards) > 1 and plan.backend != "vllm":
        notes.append(
            f"vlfit's own engine uses one of the {len(cards)} cards; vLLM shares a model among them "
            "(--backend vllm)"
        )
    return notes


def _needs(plan: "Plan", advice: Advice, *, ready: bool) -> str:
    """Download, disk and RAM, and the time of a conversion."""
    needs = plan.needs
    ram = f"{format_bytes(needs.ram)} of RAM"
    if not advice.elsewhere and needs.ram > advice.machine.host.ram_available:
        ram += f" ({format_bytes(advice.machine.host.ram_available)} are available)"
    if ready:
        if not needs.download or plan.model.converted_from or _is_downloaded(plan, advice):
            return f"nothing to download, it is on this computer; {ram}"
        return f"{format_bytes(needs.download)} to download, as much disk, {ram}"
    download = f"{format_bytes(needs.download)} to download" if needs.download else "nothing to download"
    minutes = max(math.ceil((needs.conversion_s or 0) / 60), 1)
    return (
        f"{download}, {format_bytes(needs.disk)} of disk, {ram}; the conversion takes about {minutes} min "
        f"(estimated for {CONVERSION_CORES} cores)"
    )


def _is_ready(plan: "Plan", advice: Advice) -> bool:
    return not plan.model.converted_from or (not advice.elsewhere and is_ready_made(plan))


def _is_downloaded(plan: "Plan", advice: Advice) -> bool:
    if advice.elsewhere:
        return False
    from vlfit.checkpoint import hub

    return hub.is_hub_name(plan.model.source) and hub.cached_folder(plan.model.source) is not None


def _pace(plan: "Plan") -> str:
    speed = plan.speed
    if speed is None:
        return f"unknown, {_why_unknown(plan)}"
    words = f"{'measured here' if speed.measured else 'predicted'}: {_range_text(speed)} tokens/s"
    likely = speed.likely_first_token
    small = speed.small_picture
    if small is not None:
        words += f"; first token of a picture of 512x512 after about {_seconds(small)}"
        if likely is not None and likely.expected > small.expected:
            words += f", of one of {plan.settings.image_tokens} image tokens after {_seconds(likely)}"
    elif likely is not None:
        words += f"; first token after about {_seconds(likely)}"
    return words


def _seconds(range_: "Range") -> str:
    """A range of seconds: ``2.1 s (1.7 to 2.6)``."""
    unit, scale = ("ms", 1000) if range_.high < 1 else ("s", 1)
    low, high = rounded_bounds(range_.low * scale, range_.high * scale, digits=2)
    middle = float(f"{range_.expected * scale:.2g}")
    return f"{middle:g} {unit} ({low:g} to {high:g})"


def _smaller_pictures(plan: "Plan") -> str:
    """On a CPU where a large picture takes long: what smaller ones take; else ""."""
    speed = plan.speed
    if speed is None or speed.small_picture is None or speed.first_token.expected < _LONG_SECONDS:
        return ""
    if plan.settings.image_tokens <= SMALL_PICTURE:
        return ""
    return (
        f"all pictures scaled down to 512x512, without small details: --image-tokens {SMALL_PICTURE}, first "
        f"token after about {_seconds(speed.small_picture)}"
    )


def _contexts(plan: "Plan", advice: Advice) -> list[str]:
    """Longer contexts that fit, some steps of them."""
    texts = []
    if advice.longer:
        steps = [_context_step(each, plan) for each in _some(advice.longer)]
        texts.append(f"longer contexts fit, too, as --context N: {', '.join(steps)}")
    longest = advice.longer[-1].settings.context if advice.longer else plan.settings.context
    beyond = [each for each in advice.longer_fp8 if each.settings.context > longest]
    if beyond:
        steps = [_context_step(each, plan) for each in _some(beyond)]
        part = "a quarter of" if isinstance(plan.gpu, Ram) else "half"
        texts.append(f"with --kv-dtype fp8 ({part} the KV cache, less exact): {', '.join(steps)}")
    return texts


def _some(plans: "Sequence[Plan]") -> "list[Plan]":
    """The first, the middle and the last."""
    return [plans[index] for index in sorted({0, (len(plans) - 1) // 2, len(plans) - 1})]


def _context_step(longer: "Plan", plan: "Plan") -> str:
    now, then = plan.settings, longer.settings
    changes = []
    if then.image_tokens != now.image_tokens:
        changes.append(f"{then.image_tokens} image tokens")
    if then.sequences != now.sequences:
        changes.append(f"{then.sequences} at once")
    return f"{then.context}{f' ({chr(44).join(changes)})' if changes else ''}".replace(",", ", ")


def _print_labelled(console: Console, label: str, text: str, style: str = "") -> None:
    wrapped = textwrap.wrap(text, console.width - _LABEL, break_long_words=False, break_on_hyphens=False) or [
        ""
    ]
    for number, line in enumerate(wrapped):
        shown = Text(f"{label if number == 0 else '':<{_LABEL}}", style="bold")
        shown.append(escape_control(line, terminal=True), style=style or "not bold")
        console.print(shown, overflow="fold", soft_wrap=False)


def _print_command(console: Console, label: str, words: list[str]) -> None:
    """A command, continued with backslashes before options where it is wider than the terminal."""
    groups: list[str] = []  # an option stays with its value
    for before, word in zip(["", *words], words, strict=False):
        if before.startswith("-") and not word.startswith("-"):
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    lines: list[str] = []
    line = ""
    width = console.width - _LABEL - 2
    for group in groups:
        longer = f"{line} {group}" if line else group
        if line and len(longer) > width - (2 if lines else 0):
            lines.append(line)
            line = group
        else:
            line = longer
    lines.append(line)
    for number, each in enumerate(lines):
        indent = "" if number == 0 else "  "
        end = " \\" if number < len(lines) - 1 else ""
        shown = Text(f"{label if number == 0 else '':<{_LABEL}}", style="bold")
        shown.append(escape_control(f"{indent}{each}{end}", terminal=True), style="cyan")
        console.print(shown, overflow="fold")


# --- tables of plans ---------------------------------------------------------------------------------------


def _catalog_table(plans: "Sequence[Plan]", console: Console, gpu: "Gpu", title: str) -> Table:
    """Plans that fit: ready-made checkpoints, those to be converted, then text-only models."""
    has_units = has_fp8(gpu.compute_capability)
    rows: list[dict[str, str]] = []
    for heading, chosen in _sections(plans):
        rows += [{title: heading}] if heading else []
        for plan in chosen:
            settings = plan.settings
            rows.append(
                {
                    title: _short(plan),
                    "weights": settings.weights,
                    "computes in": _compute_dtype(gpu),
                    "context": str(settings.context),
                    "image tokens": str(settings.image_tokens or "-"),
                    "at once": str(settings.sequences),
                    "left MiB": _count(plan.headroom),
                    "tokens/s": _range_text(plan.speed),
                    "download": format_bytes(plan.needs.download) if plan.needs.download else "-",
                }
            )
    columns = [title, "weights", *([] if has_units else ["computes in"]), *_NUMBERS, "download"]
    dropped = ("weights", "at once", "download", "image tokens", "computes in", "context", "tokens/s")
    return _table_that_fits(console, columns, rows, dropped)


def _table_that_fits(
    console: Console,
    columns: list[str],
    rows: list[dict[str, str]],
    dropped: Sequence[str],
    *,
    least: int = 0,
) -> Table:
    """A table without as many columns of ``dropped``, in that order, as make it narrower than the terminal.

    The first column is wrapped down to ``least`` characters; 0: never.
    """
    options = console.options.update(max_width=_TABLE_WIDTH)
    for number in range(len(dropped) + 1):
        shown = [name for name in columns if name not in dropped[:number]]
        table = Table(box=None, pad_edge=False)
        for name in shown:
            is_first = name == shown[0]
            table.add_column(
                name,
                justify="right" if name in (*_NUMBERS, "download") else "left",
                no_wrap=not (is_first and least),
                min_width=least if is_first else None,
            )
        for row in rows:
            table.add_row(*(row.get(name, "") for name in shown))
        width = Measurement.get(console, options, table)
        if (width.minimum if least else width.maximum) <= console.width:
            break
    return table


def _sections(plans: "Sequence[Plan]") -> "list[tuple[str, list[Plan]]]":
    parts: dict[str, list[Plan]] = {"": [], "after vlfit convert:": [], "text only:": []}
    parts["text only, after vlfit convert:"] = []
    for plan in plans:
        heading = "text only" if plan.model.vision is None else ""
        if not is_ready_made(plan):
            heading += ", after vlfit convert" if heading else "after vlfit convert"
        parts[f"{heading}:" if heading else ""].append(plan)
    return [(heading, chosen) for heading, chosen in parts.items() if chosen]


def _compute_dtype(gpu: "Gpu") -> str:
    return "bf16" if has_bf16(gpu.compute_capability) else "fp16, never tried"


def _too_large(plans: "Sequence[Plan]") -> str:
    """One line: what does not fit at any settings."""
    formats: dict[str, list[str]] = {}
    for plan in plans:
        name = plan.model.family
        formats.setdefault(short_family(name), []).append(plan.settings.weights)
    models = [f"{escape_control(name, terminal=True)} ({', '.join(each)})" for name, each in formats.items()]
    return f"Too large: {', '.join(models)}." if models else ""


def what_if_page(rows: "list[tuple[str, Plan]]") -> str:
    """A table of ``rows``: descriptions of machines, such as other cards, and the best plan on each."""
    console = new_console(_WHAT_IF_WIDTH)
    console.print(Text("What if", style="bold"))
    found = []
    for what, plan in rows:
        settings = plan.settings
        found.append(
            {
                "machine": what,
                "best": _short(plan) if plan.fits else f"{_short(plan)} does not fit",
                "weights": settings.weights,
                "context": str(settings.context),
                "image tokens": str(settings.image_tokens or "-"),
                "left MiB": _count(plan.headroom),
            }
        )
    dropped = ("weights", "image tokens", "context", "left MiB")
    console.print(_table_that_fits(console, list(found[0]) if found else [], found, dropped, least=16))
    return text_of(console)


def _print_ledger(console: Console, plan: "Plan") -> None:
    console.print(Text(_head(plan), style="bold"))
    console.print(_settings(plan))
    console.print()
    console.print(_bar(plan))
    console.print(_ledger(plan.ledger, plan.gpu))


def new_console(width: int = MAX_WIDTH, *, on_terminal: bool | None = None) -> Console:
    """A console that prints to memory, at most ``width`` columns wide.

    ``on_terminal``: with colours; None: if stdout is a terminal. ``text_of`` returns what was printed.
    """
    on_terminal = sys.stdout.isatty() if on_terminal is None else on_terminal
    width = terminal_width(width, on_terminal=on_terminal)
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=on_terminal,
        color_system="auto" if on_terminal else None,
        highlight=False,
        emoji=False,
        markup=False,
    )


def text_of(console: Console) -> str:
    """What was printed on a console made by ``new_console``, without spaces at line ends."""
    file = console.file
    written = file.getvalue() if isinstance(file, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in written.splitlines())


def _short(plan: "Plan") -> str:
    if plan.model.gguf_type and plan.model.source:  # with its program, or its path, it can be typed
        return escape_control(plan.model.source, terminal=True)
    return escape_control(plan.model.name.rpartition("/")[2], terminal=True)


def _head(plan: "Plan") -> str:
    place = " under WSL2" if plan.wsl2 else ""
    is_ours = isinstance(plan.gpu, Ram) and cost_model_of(plan) is CPU
    name = plan.gpu.processor.name if is_ours and isinstance(plan.gpu, Ram) else plan.gpu.name
    return escape_control(f"{plan.model.name} on {name}{place}, {plan.backend} backend", terminal=True)


def _settings(plan: "Plan") -> str:
    settings = plan.settings
    pictures = f", {settings.image_tokens} image tokens" if settings.image_tokens else ""
    kv_cache = f", KV cache in {settings.kv_dtype}" if settings.kv_dtype != BF16 else ""
    return (
        f"{settings.weights} weights, context {settings.context}{pictures}, {settings.sequences} at once, "
        f"{settings.chunk} tokens per pass{kv_cache}{_parallelism(plan)}"
    )


def _parallelism(plan: "Plan") -> str:
    """Tensor and data parallelism, if there are several GPUs."""
    from vlfit.plan.vllm.args import vllm_args_of

    vllm = vllm_args_of(plan.settings)
    copies = f", {vllm.data} copies" if vllm.data > 1 else ""
    return f"{copies}{f', {vllm.tensor} GPUs per model' if vllm.tensor > 1 else ''}"


def _bar(plan: "Plan") -> Text:
    """The GPU as one row of cells; ``|`` marks its end if the plan does not fit."""
    on_terminal = sys.stdout.isatty()
    width = terminal_width(_BAR + 2) - 2 - (not plan.fits)  # brackets, and the mark of the card's end
    scale = width / max(plan.total, plan.gpu.total)
    bar, filled, spent = Text("["), 0, 0
    edge = round(plan.gpu.total * scale)
    for line in plan.ledger:
        spent += line.bytes
        cells = round(spent * scale) - filled
        sign = "█" if on_terminal else LETTERS[line.line]
        for _ in range(cells):
            if filled == edge and not plan.fits:
                bar.append("|")
            bar.append(sign, style=COLOURS[line.line])
            filled += 1
    bar.append(" " * (width - filled))
    bar.append("]")
    return bar


def _ledger(lines: "Sequence[Line]", gpu: "Gpu") -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("line", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    table.add_column("known", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    on_terminal = sys.stdout.isatty()
    place = "in RAM" if gpu.compute_capability == _NO_CARD else "on the card"
    for line in lines:
        sign = Text("█" if on_terminal else LETTERS[line.line], style=COLOURS[line.line])
        how = gpu.desktop_how if line.line == "desktop" else line.how
        note = escape_control(line.note, terminal=True)
        table.add_row(sign, shown_name(line.line), f"{line.bytes / MIB:,.0f}", how, note)
    total = sum(line.bytes for line in lines)
    table.add_row("", "total", f"{total / MIB:,.0f}", "", f"of {gpu.total / MIB:,.0f} {place}")
    return table


def _verdict(plan: "Plan") -> Text:
    from vlfit.plan.vllm.lines import kv_cache_problem

    if plan.fits and (words := kv_cache_problem(plan)):
        return Text(f"{_mib(plan.headroom)} are left, but {words}", style="bold red")
    if plan.fits:
        return Text(f"Fits, with {_mib(plan.headroom)} left.", style="bold green")
    return Text(f"Does not fit: {_mib(-plan.headroom)} too much.", style="bold red")


def _speed(plan: "Plan") -> list[str]:
    return [f"Speed {_pace(plan)}.", *_roof(plan)]


def _roof(plan: "Plan") -> list[str]:
    """What limits the speed."""
    from vlfit.plan.vllm.args import vllm_args_of

    speed = plan.speed
    if speed is None:
        return []
    each = " each" if vllm_args_of(plan.settings).tensor > 1 else ""
    lines = [
        f"{format_bytes(speed.bytes_per_token)} are read per token; {_cards_possessive(plan)} limit is "
        f"{speed.roof:.0f} tokens/s, with each weight read once "
        f"({format_bandwidth(plan.gpu.bandwidth or 0)}{each}).",
    ]
    if speed.offload_tokens_per_s is not None:
        lines.append(
            f"With {format_bytes(speed.offloaded_bytes)} of weights in RAM, read over PCIe for each token: at"
            f" most {speed.offload_tokens_per_s:.1f} tokens/s{_offload_hint(plan)}."
        )
    return lines


def _cards_possessive(plan: "Plan") -> str:
    from vlfit.plan.vllm.args import vllm_args_of

    cards = vllm_args_of(plan.settings).tensor
    if isinstance(plan.gpu, Ram):
        return "the memory's"
    return "the card's" if cards == 1 else f"{cards} cards'"


def _offload_hint(plan: "Plan") -> str:
    if plan.backend == "native":
        return ": add --offload auto"
    return "; the native engine does that, with --offload auto"


def _range_text(speed: "Speed | None") -> str:
    if speed is None:
        return "?"
    return "-".join(decode_bounds(speed.decode.low, speed.decode.high))


def _print_changes(console: Console, plan: "Plan") -> None:
    for line in _changes(plan):
        for wrapped in textwrap.wrap(line, console.width, subsequent_indent="    ", break_on_hyphens=False):
            console.print(wrapped)


def _changes(plan: "Plan") -> list[str]:
    """What to change: changes that are enough alone, those that are not, and two that are enough together."""
    from vlfit.plan.changes import enough_together

    enough = [change for change in plan.changes if change.enough]
    rest = [change for change in plan.changes if not change.enough]
    lines = []
    for title, changes in (("Change any one of:", enough), ("Not enough alone:", rest)):
        if changes:
            lines.append(title)
            lines += [
                f"  {escape_control(change.what, terminal=True)}: {_mib(change.frees)}" for change in changes
            ]
    both = enough_together(rest, -plan.headroom)
    if both is not None:
        first, second = sorted(rest.index(change) for change in both)
        freed = _mib(sum(change.frees for change in both))
        lines.append(f"The {_ORDINALS[first]} and the {_ORDINALS[second]} together are enough: {freed}.")
    return lines


def _why_unknown(plan: "Plan") -> str:
    from vlfit.plan.vllm.args import vllm_args_of

    settings = plan.settings
    vllm = vllm_args_of(settings)
    if cost_model_of(plan) is CPU:
        return "as the processor was not measured: vlfit machine --save FILE does that there"
    if vllm.on_cpu or vllm.dtype == "float32":
        return f"nothing was measured {'on a CPU' if vllm.on_cpu else 'in float32'}"
    link = " or PCIe bandwidth" if settings.offloaded_layers else ""
    return f"as the card's memory bandwidth{link} is not known"


def _start(plan: "Plan") -> list[str]:
    """The command that starts exactly this plan; of vLLM's a flag per line."""
    if plan.flags:
        return ["Start it with:", *_command_of_many_lines(plan)]
    if plan.command is None:
        return []
    variables = [f"{name}={shlex.quote(value)}" for name, value in plan.environment.items()]
    words = " ".join([*variables, shlex.join(plan.command)])
    return [f"Start it with: {escape_control(words, terminal=True)}"]


def _command_of_many_lines(plan: "Plan") -> list[str]:
    """A command with one flag per line, to be copied."""
    words = plan.command or ()
    lines = [f"{name}={shlex.quote(value)}" for name, value in plan.environment.items()]
    lines.append(shlex.join(words[:3]))
    lines += ["  " + shlex.join(flag.words) for flag in plan.flags if flag.flag not in plan.environment]
    return [f"  {escape_control(line, terminal=True)}" + " \\" * (line is not lines[-1]) for line in lines]


def _flags(plan: "Plan") -> Table:
    """Each flag with the ledger line it changes, and why."""
    table = Table(box=None, pad_edge=False)
    table.add_column("flag", no_wrap=True)
    table.add_column("moves", no_wrap=True)
    table.add_column("why", overflow="fold")
    for flag in plan.flags:
        table.add_row(flag.flag, flag.line, escape_control(flag.why, terminal=True))
    return table


def _mib(count: int) -> str:
    return f"{_count(count)} MiB"


def _count(count: int) -> str:
    return f"{round(count / MIB):,}"


# --- --backend transformers, for models that the native engine does not know ------------------------------


GUESSED = "Memory of forward passes is a guess: vlfit serve measures it when it starts."


def transformers_page(
    checkpoint: "AnyCheckpoint", name: str, gpu: "Gpu", context: int, lines: "tuple[Line, ...]"
) -> str:
    """The page of ``vlfit plan`` for a model that only transformers can run, on ``gpu``.

    ``name``: as typed, for the command to start it. ``context``: tokens. ``lines``: the ledger.
    """
    page = new_console()
    kind, card = (
        escape_control(checkpoint.model_type or "?", terminal=True),
        escape_control(gpu.name, terminal=True),
    )
    page.print(
        f"{escape_control(checkpoint.name, terminal=True)} ({kind}) with transformers in bfloat16 on {card}"
    )
    page.print(f"context {context} tokens, one request at a time\n")
    page.print(_ledger(lines, gpu))
    left = (gpu.total - sum(line.bytes for line in lines)) / MIB
    page.print(
        f"\nFits, with {left:,.0f} MiB left." if left >= 0 else f"\nDoes not fit: {-left:,.0f} MiB too much."
    )
    page.print(GUESSED)
    command = f"vlfit serve {shlex.quote(name)} --backend transformers --context {context}"
    page.print(
        f"Start it with: {escape_control(command, terminal=True)}{'' if left >= 0 else ' --offload auto'}"
    )
    return text_of(page)
