"""What ``vlfit top`` shows: a page for a screen or a single look, a line for a log, facts for a script.

Knows words and columns. Does not know how anything is seen (``cli/top.py``) or when it is wrong
(``plan/alarms.py``).
"""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vlfit.cli.printing import plain
from vlfit.cli.top import Look, Server, Sleep
from vlfit.machine.desktop import untold
from vlfit.machine.model import encode
from vlfit.plan.actual import Row, over_plan, planned_for
from vlfit.plan.alarms import Alarm, Rates, one_run, rates
from vlfit.plan.svg import COLOURS
from vlfit.units import MIB, format_bytes, format_seconds

VERSION = 1
RATE_SECONDS = 5.0  # of the past that speeds are the mean of
_BAR, _CURVE = 72, 40
_LEVELS = "▁▂▃▄▅▆▇█"
_HOLDERS = 4  # programs that are named


def facts(looks: Sequence[Look], url: str, found: Sequence[Alarm]) -> dict[str, Any]:
    """The last look as JSON has it: bytes, seconds, tokens per second."""
    look = looks[-1]
    seen = current_rates(looks)
    return {
        "version": VERSION,
        "time": datetime.fromtimestamp(look.time, UTC).isoformat(timespec="milliseconds"),
        "url": url,
        "server": look.server.facts if look.server else None,
        "trouble": look.trouble,
        "gpus": [encode(gpu) for gpu in look.gpus],
        "no_gpu": look.no_gpu,
        "rates": None if seen is None else _rate_facts(seen),
        "alarms": [{"id": alarm.id, "what": alarm.what, "hint": alarm.hint} for alarm in found],
    }


def _rate_facts(seen: Rates) -> dict[str, Any]:
    step = None if seen.step_s is None else round(seen.step_s, 6)
    return {
        "tokens_per_s": round(seen.tokens, 2),
        "prompt_tokens_per_s": round(seen.prompt_tokens, 2),
        "decode_step_s": step,
    }


def current_rates(looks: Sequence[Look]) -> Rates | None:
    """Speeds over the last seconds; None without two looks at one server process."""
    series = one_run([look.sample for look in islice(reversed(looks), 600)][::-1])
    if len(series) < 2:
        return None
    last = series[-1]
    since = [sample for sample in series[:-1] if sample.at >= last.at - RATE_SECONDS]
    return rates(since[0] if since else series[-2], last)


def line(looks: Sequence[Look], found: Sequence[Alarm]) -> str:
    """One look in one line."""
    look = looks[-1]
    parts = [time.strftime("%H:%M:%S", time.localtime(look.time)), *map(_gpu_in_short, _cards(look))]
    server, seen = look.server, current_rates(looks)
    if server is not None:
        if server.card is None and server.sample.held is not None:
            parts.append(f"held {_mib(server.sample.held)}")
        parts += ["asleep"] if server.sleep else []
        parts.append(f"{server.running} running, {server.waiting} waiting")
        parts.append(f"KV {_share(server.blocks_used, server.blocks)}")
    else:
        parts.append("no server")
    if seen is not None:
        parts.append(f"{seen.tokens:.1f} tokens/s")
    parts += [f"warning: {alarm.id}" for alarm in found]
    return "  ".join(parts)


def page(looks: Sequence[Look], url: str, found: Sequence[Alarm], *, lively: bool) -> RenderableType:
    """All of it; ``lively``: on a terminal, with bars and curves."""
    look = looks[-1]
    parts: list[RenderableType] = [Text(_head(look, url), style="bold")]
    parts += [Text(f"warning: {alarm.what}\n  -> {alarm.hint}", style="bold red") for alarm in found]
    if look.server is not None:
        if look.server.sleep is not None:
            parts.append(Text(_sleep(look.server.sleep)))
        parts += [Text(), *_memory(look.server, lively), Text(), *_work(look.server, current_rates(looks))]
    parts += [Text(), *_gpus(looks, lively)]
    return Group(*parts)


def _head(look: Look, url: str) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(look.time))
    server = look.server
    if server is None:
        return plain(f"{clock}  no server to look at: {look.trouble}", terminal=True)
    stopping = "" if server.state == "ready" else f", {server.state}"
    up = format_seconds(server.uptime_s)
    return plain(f"{clock}  {server.model} on {server.device} at {url}, up {up}{stopping}", terminal=True)


def _sleep(sleep: Sleep) -> str:
    where = f"{format_bytes(sleep.ram)} of RAM" if sleep.ram else "their files"
    return f"asleep: {format_bytes(sleep.freed)} given back, the weights are in {where}; a request wakes it"


# --- memory ------------------------------------------------------------------------------------------------


def _memory(server: Server, lively: bool) -> Iterator[RenderableType]:
    if not server.rows:
        note = server.facts.get("note")
        yield Text(str(note) if note else "This server's backend gives no account of its memory.")
        return
    if lively and server.card is not None:
        yield _bar(server)
    over = dict(over_plan(server.rows))
    table = Table(box=None, pad_edge=False)
    place = "card" if server.card else "RAM"
    table.add_column(f"{place}, MiB", no_wrap=True)
    for name in ("planned", "held", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="ellipsis", no_wrap=True)
    for row in server.rows:
        signed = Text("█ " if lively else "", style=COLOURS.get(row.line, ""))
        signed.append(plain(row.line, terminal=True), style="default")
        style = "red" if row.line in over else ""
        # Asleep it holds next to nothing, as it should: the plan is of when it is awake.
        difference = "" if server.sleep else _difference(row, server.rows)
        cells = (_count(row.planned), _count(row.actual), difference)
        table.add_row(signed, *cells, plain(row.remark, terminal=True), style=style)
    planned, held = server.total
    free = f"{_mib(server.card.free)} free of {_mib(server.card.total)}" if server.card else ""
    free = free or "RAM of the whole process"
    table.add_row("total", _count(planned), _count(held), "", free, style="bold")
    yield table


def _difference(row: Row, rows: Sequence[Row]) -> str:
    """Held less planned."""
    if row.planned is None or row.actual is None:
        return ""
    return f"{round((row.actual - planned_for(row, rows)) / MIB):+,}"


def _bar(server: Server) -> Text:
    """The card as one row of cells: what each line holds of it now."""
    bar, filled, spent = Text("["), 0, 0
    total = server.card.total if server.card else 1
    for row in server.rows:
        spent += row.actual or 0
        cells = min(round(spent * _BAR / max(total, 1)), _BAR) - filled
        bar.append("█" * max(cells, 0), style=COLOURS.get(row.line, ""))
        filled += max(cells, 0)
    return bar.append(" " * (_BAR - filled) + "]")


# --- requests and speed ------------------------------------------------------------------------------------


def _work(server: Server, seen: Rates | None) -> Iterator[Text]:
    if "requests" not in server.facts:  # whoever runs the model tells nobody what it does
        taken = (server.facts.get("places") or {}).get("taken")
        yield Text(f"requests  {0 if taken is None else taken} under way")
        return
    done = f"{server.finished} done, {server.cancelled} cancelled, {server.failed} failed"
    yield Text(f"requests  {server.running} running, {server.waiting} waiting; {done}")
    blocks = f"{server.blocks_used} of {server.blocks} blocks in use"
    yield Text(
        f"KV cache  {blocks} ({_share(server.blocks_used, server.blocks)}); pictures kept: "
        f"{format_bytes(server.image_cache)}"
    )
    if seen is None:
        yield Text("speed     (from the second look on)")
        return
    words = f"speed     {seen.tokens:.1f} tokens/s written, {seen.prompt_tokens:.1f} tokens/s read"
    if seen.step_s is not None:
        words += f"; a decode step takes {format_seconds(seen.step_s)}"
        slowest = server.limits.slowest
        if server.expected is not None and slowest is not None:
            usual, most = server.expected.step(seen.cached), slowest.step(seen.cached)
            words += f" (planned: {format_seconds(usual)}, at most {format_seconds(most)})"
    yield Text(words)


# --- cards -------------------------------------------------------------------------------------------------


def _cards(look: Look) -> list[tuple[str, int, int, int]]:
    """Name, total, free and what others hold of each card: the server's word for its own, if it has one."""
    server = look.server
    if server is not None and server.card is not None:
        card = server.card
        return [(card.name, card.total, card.free, card.desktop)]
    if server is not None and not server.local:
        return []
    return [(gpu.name, gpu.total, gpu.free, gpu.desktop) for gpu in look.gpus]


def _gpu_in_short(card: tuple[str, int, int, int]) -> str:
    name, total, free, desktop = card
    short = plain(name, terminal=True).removeprefix("NVIDIA ").removeprefix("GeForce ")
    return f"{short}: {_mib(free)} free of {_mib(total)}, others {_mib(desktop)}"


def _gpus(looks: Sequence[Look], lively: bool) -> Iterator[Text]:
    look = looks[-1]
    cards = _cards(look)
    for number, (name, total, free, desktop) in enumerate(cards):
        yield Text(f"{plain(name, terminal=True)}: {_mib(free)} free of {_mib(total)}", style="bold")
        series = [
            others[number][3]
            for past in islice(reversed(looks), 600)
            if len(others := _cards(past)) == len(cards) and others[number][0] == name
        ][::-1]
        curve = f"  {_curve(series, total)}" if lively and len(series) > 1 else ""
        span = f"; {_count(min(series))} to {_count(max(series))} seen" if len(series) > 1 else ""
        yield Text(f"desktop   {_mib(desktop)} held by others ({_share(desktop, total)}{span}){curve}")
    if look.server is None or look.server.local:
        yield from _holders(look)


def _holders(look: Look) -> Iterator[Text]:
    if not look.gpus:
        if look.server is None:
            yield Text(f"GPU: none. {plain(look.no_gpu, terminal=True)}")
        return
    own = look.server.pid if look.server else -1
    for gpu in look.gpus:
        shown = [_holder(process.bytes, process.name, process.pid, own) for process in gpu.processes]
        rest = untold(gpu)
        if gpu.driver and rest >= MIB and look.server is None:
            shown.append(f"{_mib(rest)} not told by the driver")
        if shown:
            more = [f"{len(shown) - _HOLDERS} more"] if len(shown) > _HOLDERS else []
            place = f" on GPU {gpu.index}" if len(look.gpus) > 1 else ""
            yield Text(f"programs{place}  " + ", ".join([*shown[:_HOLDERS], *more]))


def _holder(count: int | None, name: str, pid: int, own: int) -> str:
    shown = "this server" if pid == own else plain(name, terminal=True) or f"process {pid}"
    return f"{shown} {'N/A' if count is None else _mib(count)}"


def _curve(series: Sequence[int], total: int) -> str:
    """The last looks as a row of little bars, from the least to the most seen; even ones are one height."""
    last = series[-_CURVE:]
    low, high = min(last), max(last)
    # Less than a hundredth of the card is drawn flat: noise should not look like mountains.
    scale = max(high - low, total // 100, 1)
    return "".join(_LEVELS[min(7, (count - low) * 8 // scale)] for count in last)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _mib(count: int) -> str:
    return f"{_count(count)} MiB"


def _count(count: int | None) -> str:
    return "-" if count is None else f"{round(count / MIB):,}"
