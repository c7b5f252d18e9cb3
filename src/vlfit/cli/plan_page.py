"""Plans and ledgers as text: settings, a stacked bar, the ledger, the verdict, speed, what to change."""

import io
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from vlfit.checkpoint.catalog import BF16
from vlfit.cli.printing import Printer, escape_control, terminal_width
from vlfit.machine.survey import BFLOAT16_CAPABILITY
from vlfit.plan.actual import Row, off_plan, planned_for
from vlfit.plan.svg import COLOURS
from vlfit.units import MIB, format_bandwidth, format_bytes, format_seconds

if TYPE_CHECKING:
    from vlfit.checkpoint.any_model import AnyCheckpoint
    from vlfit.machine.model import Gpu, Machine
    from vlfit.plan.ledger import Line, PlanSettings
    from vlfit.plan.plans import Plan
    from vlfit.plan.speed import Speed
    from vlfit.plan.wishes import Wishes


_LEGEND = (
    "Negative: does not fit, even with the smallest settings. Instruct and Thinking have the same size. "
    "Ledger of a model: vlfit plan MODEL. What is not on the hub is made by vlfit convert."
)
_BAR = 72
_WIDTH = 110
_ORDINALS = ("first", "second", "third")
_TABLE_WIDTH = 130  # model names must not be cut
# Letters of the bar, without colours.
LETTERS = {
    "desktop": "d",
    "context": "c",
    "peers": "p",
    "weights.text": "T",
    "weights.vision": "V",
    "weights.embedding": "E",
    "weights.offload": "o",
    "kv_cache": "k",
    "vision_workspace": "v",
    "text_workspace": "t",
    "graphs": "g",
    "growth": "G",
    "reserve": "r",
}


def page(plan: "Plan", *, on_terminal: bool | None = None) -> str:
    """A plan as a page; ``on_terminal``: with colours; None: if stdout is a terminal."""
    console = new_console(on_terminal=on_terminal)
    console.print(Text(_head(plan), style="bold"))
    console.print(_settings(plan))
    console.print()
    console.print(_bar(plan))
    console.print(_ledger(plan))
    console.print(_verdict(plan))
    for line in _speed(plan):
        console.print(line)
    for line in _advice(plan):
        console.print(line)
    if plan.flags:
        console.print(_flags(plan))
    for remark in plan.remarks:
        console.print(escape_control(remark, terminal=True))
    return text_of(console)


def table_page(plans: "list[Plan]", gpu: "Gpu") -> str:
    """The catalog: what fits, best first, then what does not and by how much."""
    console = new_console(_TABLE_WIDTH)
    console.print(
        Text(
            f"{escape_control(gpu.name, terminal=True)}: {_mib(gpu.free)} free of {_mib(gpu.total)}",
            style="bold",
        )
    )
    console.print()
    table = Table(box=None, pad_edge=False)
    for name in ("model", "weights", "backend"):
        table.add_column(name, no_wrap=True)
    for name in ("context", "image tokens", "at once", "total MiB", "left MiB", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for plan in plans:
        settings = plan.settings
        chosen = [f"{settings.context}", f"{settings.image_tokens or '-'}", f"{settings.sequences}"]
        row = [_short(plan), settings.weights, plan.backend, *(chosen if plan.fits else ["-"] * 3)]
        row += [_count(plan.total), _count(plan.headroom), _range_text(plan.speed) if plan.fits else "-"]
        table.add_row(*row, style="" if plan.fits else "dim")
    _give_up_columns(table, console)
    console.print(table)
    console.print()
    console.print(_LEGEND)
    return text_of(console)


def _give_up_columns(table: Table, console: Console) -> None:
    """Remove columns of the catalog, least needed first, until it is no wider than the terminal."""
    options = console.options.update(max_width=_TABLE_WIDTH)
    for name in ("backend", "at once", "weights", "total MiB", "image tokens", "context"):
        if Measurement.get(console, options, table).maximum < console.width:
            return
        table.columns = [column for column in table.columns if column.header != name]


def what_if_page(rows: "list[tuple[str, Plan]]") -> str:
    """The best plan on other machines."""
    console = new_console(_TABLE_WIDTH)
    console.print(Text("What if", style="bold"))
    table = Table(box=None, pad_edge=False)
    for name in ("machine", "best", "weights"):
        table.add_column(name, no_wrap=True)
    for name in ("context", "image tokens", "left MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for what, plan in rows:
        settings = plan.settings
        best = _short(plan) if plan.fits else f"{_short(plan)} does not fit"
        numbers = (str(settings.context), str(settings.image_tokens or "-"), _count(plan.headroom))
        table.add_row(what, best, settings.weights, *numbers)
    console.print(table)
    return text_of(console)


def new_console(width: int = _WIDTH, *, on_terminal: bool | None = None) -> Console:
    """A console that prints to memory; ``on_terminal``: with colours; None: if stdout is a terminal."""
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
    """What was printed on ``new_console``."""
    file = console.file
    written = file.getvalue() if isinstance(file, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in written.splitlines())


def _short(plan: "Plan") -> str:
    return escape_control(plan.model.name.rpartition("/")[2], terminal=True)


def _head(plan: "Plan") -> str:
    place = " under WSL2" if plan.wsl2 else ""
    return escape_control(
        f"{plan.model.name} on {plan.gpu.name}{place}, {plan.backend} backend", terminal=True
    )


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
    from vlfit.plan.vllm.args import args_of

    vllm = args_of(plan.settings)
    copies = f", {vllm.data} copies" if vllm.data > 1 else ""
    return f"{copies}{f', {vllm.tensor} GPUs per model' if vllm.tensor > 1 else ''}"


def _bar(plan: "Plan") -> Text:
    """The GPU as one row of cells; ``|`` marks its end if the plan does not fit."""
    on_terminal = sys.stdout.isatty()
    width = terminal_width(_BAR + 2) - 2
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


def _ledger(plan: "Plan") -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("line", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    table.add_column("known", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    on_terminal = sys.stdout.isatty()
    for line in plan.ledger:
        sign = Text("█" if on_terminal else LETTERS[line.line], style=COLOURS[line.line])
        table.add_row(sign, line.line, f"{line.bytes / MIB:,.0f}", line.how, line.note)
    table.add_row("", "total", f"{plan.total / MIB:,.0f}", "", f"of {plan.gpu.total / MIB:,.0f}")
    return table


def _verdict(plan: "Plan") -> Text:
    from vlfit.plan.vllm.lines import kv_cache_problem

    if plan.fits and (words := kv_cache_problem(plan)):
        return Text(f"{_mib(plan.headroom)} are left, but {words}", style="bold red")
    if plan.fits:
        return Text(f"Fits, with {_mib(plan.headroom)} left.", style="bold green")
    return Text(f"Does not fit: {_mib(-plan.headroom)} too much.", style="bold red")


def _speed(plan: "Plan") -> list[str]:
    from vlfit.plan.vllm.args import args_of

    speed = plan.speed
    if speed is None:
        return [f"Speed: unknown, {_why_unknown(plan.settings)}."]
    each = " each" if args_of(plan.settings).tensor > 1 else ""
    first = speed.first_token
    lines = [
        f"Speed, predicted: {_range_text(speed)} tokens/s; first token after {format_seconds(first.low)} to "
        f"{format_seconds(first.high)}.",
        f"  {format_bytes(speed.bytes_per_token)} are read per token; {_cards_possessive(plan)} limit is "
        f"{speed.roof:.0f} tokens/s, with each weight read once "
        f"({format_bandwidth(plan.gpu.bandwidth or 0)}{each}).",
    ]
    if speed.offload is not None:
        lines.append(
            f"  With {format_bytes(speed.offloaded)} of weights in RAM, read over PCIe for each token: at"
            f" most {speed.offload:.1f} tokens/s{_offload_hint(plan)}."
        )
    if plan.gpu.compute_capability < BFLOAT16_CAPABILITY:
        untried = "; vlfit was never tried on such a card" if plan.backend == "native" else ""
        lines.append(f"  This card has no bfloat16: it computes in float16{untried}. Expect less.")
    return lines


def _cards_possessive(plan: "Plan") -> str:
    from vlfit.plan.vllm.args import args_of

    cards = args_of(plan.settings).tensor
    return "the card's" if cards == 1 else f"{cards} cards'"


def _offload_hint(plan: "Plan") -> str:
    if plan.backend == "native":
        return ": add --offload auto"
    return "; the native engine does that, with --offload auto"


def _range_text(speed: "Speed | None") -> str:
    if speed is None:
        return "?"
    digits = 0 if speed.decode.high >= 10 else 1
    return f"{speed.decode.low:.{digits}f}-{speed.decode.high:.{digits}f}"


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


def _why_unknown(settings: "PlanSettings") -> str:
    from vlfit.plan.vllm.args import args_of

    vllm = args_of(settings)
    if vllm.on_cpu or vllm.dtype == "float32":
        return f"nothing was measured {'on a CPU' if vllm.on_cpu else 'in float32'}"
    link = " or PCIe bandwidth" if settings.offload else ""
    return f"as the card's memory bandwidth{link} is not known"


def _advice(plan: "Plan") -> list[str]:
    lines = _changes(plan)
    if plan.fits and plan.model.converted_from:
        # vLLM does not look into vlfit's store of models: there the copy goes into the current folder.
        out = f" --out {shlex.quote(plan.model.source)}" if plan.backend == "vllm" else ""
        lines.append(f"Make it with: {escape_control(plan.model.convert_command + out, terminal=True)}")
    if plan.flags:
        lines += ["Start it with:", *_command_of_many_lines(plan)]
    elif plan.command is not None:
        variables = [f"{name}={shlex.quote(value)}" for name, value in plan.environment.items()]
        words = " ".join([*variables, shlex.join(plan.command)])
        lines.append(f"Start it with: {escape_control(words, terminal=True)}")
    return lines


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


# --- the ledger of a running server, planned and held -----------------------------------------------------


def ledger_page(found: Sequence[Row], total: Mapping[str, int | None], place: str) -> str:
    """Ledger with planned and held MiB. ``total``: bytes planned and actual. ``place``: of which memory."""
    page = new_console(on_terminal=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("line", no_wrap=True)
    for name in ("planned MiB", "held MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("known", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for row in found:
        words = escape_control("; ".join(part for part in (row.note, row.remark) if part), terminal=True)
        sign = LETTERS.get(row.line, "")
        table.add_row(sign, row.line, _mib_or_blank(row.planned), _mib_or_blank(row.actual), row.how, words)
    table.add_row("", "total", _mib_or_blank(total["planned"]), _mib_or_blank(total["actual"]), "", place)
    page.print(table)
    return text_of(page)


def differences(found: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Lines that hold over 3 % more than planned, and over 3 % less, as sentences."""
    more: list[str] = []
    less: list[str] = []
    planned = {row.line: planned_for(row, found) for row in found}
    for line, count in off_plan(found):
        who = f"{line} holds" if line != "text_workspace" else "vision_workspace and text_workspace hold"
        words = f"{who} {_mib_or_blank(abs(count))} MiB {'more' if count > 0 else 'less'} than the "
        words += f"{_mib_or_blank(planned[line])} MiB planned" if planned[line] else "plan"
        (more if count > 0 else less).append(words)
    return more, less


def _mib_or_blank(count: int | None) -> str:
    return "-" if count is None else f"{count / MIB:,.0f}"


# --- --backend transformers, for models that the native engine does not know ------------------------------


_PROMPT_TOKENS = 128  # question and chat template, left free by the backend too
_BF16_BYTES = 2
_GUESSED = "Memory of forward passes is a guess: vlfit serve measures it when it starts."


def plan_any(name: str, machine: "Machine", wishes: "Wishes", printer: Printer, *, json: bool) -> bool:
    """Print the ledger of ``name`` in bfloat16 on the emptiest GPU; returns whether it fits.

    Raises what reading config and headers raises; does not download weights.
    """
    from vlfit.plan.gpus import emptiest
    from vlfit.plan.transformers.cost import RunOptions, context_of, lines_on_gpu, text_shape

    gpu = emptiest(machine)
    checkpoint = _headers_of(name)
    shape = text_shape(checkpoint.config)
    context = context_of(shape, wishes.context)
    wish = RunOptions(context, min(wishes.image_tokens or context, context - _PROMPT_TOKENS), _BF16_BYTES)
    lines = lines_on_gpu(checkpoint, shape, gpu, wish)
    total = sum(line.bytes for line in lines)
    fits = total <= gpu.total
    if json:
        printer.data(_any_facts(checkpoint, gpu, wish.image_tokens, context, lines))
    else:
        printer.line(_any_page(checkpoint, name, gpu, context, lines))
    return fits


def _headers_of(name: str) -> "AnyCheckpoint":
    from vlfit.checkpoint import hub
    from vlfit.checkpoint.any_model import read_any
    from vlfit.checkpoint.remote_headers import read_remote_any
    from vlfit.checkpoint.source import resolve_name

    one = resolve_name(name)[0]
    folder = one.local_folder(hub.transformers_files(lambda _: None))
    return read_any(one.name, folder) if folder is not None else read_remote_any(one.name)


def _any_facts(
    checkpoint: "AnyCheckpoint", gpu: "Gpu", image_tokens: int, context: int, lines: "tuple[Line, ...]"
) -> dict[str, Any]:
    total = sum(line.bytes for line in lines)
    return {
        "version": 1,
        "model": checkpoint.name,
        "backend": "transformers",
        "fits": total <= gpu.total,
        "machine": {"gpu": gpu.name, "total": gpu.total, "free": gpu.free},
        "settings": {"context": context, "image_tokens": image_tokens, "sequences": 1, "dtype": "bfloat16"},
        "ledger": [
            {"line": line.line, "bytes": line.bytes, "how": line.how, "note": line.note} for line in lines
        ],
        "total": total,
        "headroom": gpu.total - total,
        "remarks": [_GUESSED],
    }


def _any_page(
    checkpoint: "AnyCheckpoint", name: str, gpu: "Gpu", context: int, lines: "tuple[Line, ...]"
) -> str:
    page = new_console()
    kind, card = (
        escape_control(checkpoint.model_type or "?", terminal=True),
        escape_control(gpu.name, terminal=True),
    )
    page.print(
        f"{escape_control(checkpoint.name, terminal=True)} ({kind}) with transformers in bfloat16 on {card}"
    )
    page.print(f"context {context} tokens, one request at a time\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("line", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    table.add_column("known", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for line in lines:
        sign = LETTERS.get(line.line, "")
        table.add_row(
            sign, line.line, f"{line.bytes / MIB:,.0f}", line.how, escape_control(line.note, terminal=True)
        )
    total = sum(line.bytes for line in lines)
    table.add_row("", "total", f"{total / MIB:,.0f}", "", f"of {gpu.total / MIB:,.0f} MiB")
    page.print(table)
    left = (gpu.total - total) / MIB
    page.print(
        f"\nFits, with {left:,.0f} MiB left." if left >= 0 else f"\nDoes not fit: {-left:,.0f} MiB too much."
    )
    page.print(_GUESSED)
    command = f"vlfit serve {shlex.quote(name)} --backend transformers --context {context}"
    page.print(
        f"Start it with: {escape_control(command, terminal=True)}{'' if left >= 0 else ' --offload auto'}"
    )
    return text_of(page)
