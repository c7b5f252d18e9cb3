"""Pages of ``vlfit top``: a screen, a line for a log, JSON for a script."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vlfit.cli.printing import escape_control, terminal_width
from vlfit.cli.watcher import ServerSleep, Snapshot, WatchedServer
from vlfit.machine.desktop import unattributed_bytes
from vlfit.machine.model import record_to_json
from vlfit.plan.actual import Row, lines_over_plan, planned_bytes_of
from vlfit.plan.alarms import Alarm, Rates, latest_run, rates_between
from vlfit.plan.ledger import shown_name
from vlfit.plan.svg import COLOURS
from vlfit.units import MIB, format_bytes, format_seconds

VERSION = 1
RATE_SECONDS = 5.0  # speeds are means over this long
_BAR, _CURVE = 72, 40
_WIDTH_FOR_REMARKS = 100  # columns; narrower terminals show planned and held without them
_LEVELS = "▁▂▃▄▅▆▇█"
_MAX_MODELS = 64
_COUNTS = ("running", "waiting")
_MAX_PROGRAMS = 4  # shown per GPU


def to_json(snapshots: Sequence[Snapshot], url: str, found: Sequence[Alarm]) -> dict[str, Any]:
    """The last of ``snapshots`` as JSON, in bytes, seconds, tokens per second; ``found``: current alarms.

    ``rates`` are null without two snapshots of one server process.
    """
    snapshot = snapshots[-1]
    seen = current_rates(snapshots)
    return {
        "version": VERSION,
        "time": datetime.fromtimestamp(snapshot.time, UTC).isoformat(timespec="milliseconds"),
        "url": url,
        "server": snapshot.server.facts if snapshot.server else None,
        "trouble": snapshot.trouble,
        "gpus": [record_to_json(gpu) for gpu in snapshot.gpus],
        "no_gpu": snapshot.no_gpu,
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


def current_rates(snapshots: Sequence[Snapshot]) -> Rates | None:
    """Speeds over the last ``RATE_SECONDS``; None without two snapshots of one server process."""
    series = latest_run([snapshot.sample for snapshot in islice(reversed(snapshots), 600)][::-1])
    if len(series) < 2:
        return None
    last = series[-1]
    since = [sample for sample in series[:-1] if sample.at >= last.at - RATE_SECONDS]
    return rates_between(since[0] if since else series[-2], last)


def log_line(snapshots: Sequence[Snapshot], found: Sequence[Alarm]) -> str:
    """The last of ``snapshots`` in one line, for a log. ``found``: current alarms."""
    snapshot = snapshots[-1]
    parts = [time.strftime("%H:%M:%S", time.localtime(snapshot.time)), *map(_gpu_in_short, _cards(snapshot))]
    server, seen = snapshot.server, current_rates(snapshots)
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


def page(
    snapshots: Sequence[Snapshot], url: str, found: Sequence[Alarm], *, on_terminal: bool
) -> RenderableType:
    """The last of ``snapshots`` as a page. ``found``: current alarms.

    ``on_terminal``: with a bar and curves over all snapshots, as wide as the terminal.
    """
    snapshot = snapshots[-1]
    parts: list[RenderableType] = [Text(_head(snapshot, url), style="bold")]
    parts += [Text(f"warning: {alarm.what}\n  -> {alarm.hint}", style="bold red") for alarm in found]
    if snapshot.server is not None:
        if snapshot.server.sleep is not None:
            parts.append(Text(_sleep(snapshot.server.sleep)))
        parts += [
            Text(),
            *_memory(snapshot.server, on_terminal),
            *_models(snapshot.server.facts),
            Text(),
            *_requests_and_speed(snapshot.server, current_rates(snapshots)),
        ]
    parts += [Text(), *_gpus(snapshots, on_terminal)]
    return Group(*parts)


def _head(snapshot: Snapshot, url: str) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    server = snapshot.server
    if server is None:
        return escape_control(f"{clock}  no server: {snapshot.trouble}{snapshot.advice}", terminal=True)
    stopping = "" if server.state == "ready" else f", {server.state}"
    up = format_seconds(server.uptime_s)
    return escape_control(
        f"{clock}  {server.model} on {server.device} at {url}, up {up}{stopping}", terminal=True
    )


def _sleep(sleep: ServerSleep) -> str:
    where = f"{format_bytes(sleep.ram)} of RAM" if sleep.ram else "their files"
    return f"asleep: {format_bytes(sleep.freed)} freed, the weights are in {where}; a request wakes it"


def _models(facts: Mapping[str, Any]) -> list[RenderableType]:
    """A table of a server's models, if there are several: state, requests, and where their bytes are.

    ``facts``: the server's status, whose rows may be of a newer version: those not understood are left out.
    """
    rows = facts.get("models")
    table = Table("model", "state", "running", "waiting", "held MiB", "RAM MiB", box=None, pad_edge=False)
    for row in islice(rows if isinstance(rows, list) else (), _MAX_MODELS):
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            sizes = (f"{int(row[name]) / MIB:,.0f}" for name in ("held", "ram"))
            words = (str(row["model"])[:80], str(row["state"])[:20], *(str(int(row[n])) for n in _COUNTS))
            table.add_row(*(Text(escape_control(word, terminal=True)) for word in (*words, *sizes)))
    return [Text(), table] if table.row_count else []


# --- memory ------------------------------------------------------------------------------------------------


def _memory(server: WatchedServer, on_terminal: bool) -> Iterator[RenderableType]:
    if not server.rows:
        note = server.facts.get("note")
        yield Text(str(note) if note else "This server's backend does not report its memory.")
        return
    if on_terminal and server.card is not None:
        yield _bar(server)
    over = dict(lines_over_plan(server.rows))
    table = Table(box=None, pad_edge=False)
    place = "card" if server.card else "RAM"
    table.add_column(f"{place}, MiB", no_wrap=True)
    for name in ("planned", "held", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    is_wide = terminal_width(_WIDTH_FOR_REMARKS, on_terminal=on_terminal) == _WIDTH_FOR_REMARKS
    if is_wide:
        table.add_column("", overflow="ellipsis", no_wrap=True)
    for row in server.rows:
        signed = Text("█ " if on_terminal else "", style=COLOURS.get(row.line, ""))
        signed.append(escape_control(shown_name(row.line), terminal=True), style="default")
        style = "red" if row.line in over else ""
        # The plan is for an awake server.
        difference = "" if server.sleep else _difference(row, server.rows)
        cells = (_count(row.planned), _count(row.actual), difference)
        remark = [escape_control(row.remark, terminal=True)] if is_wide else []
        table.add_row(signed, *cells, *remark, style=style)
    planned, held = server.total
    free = f"{_mib(server.card.free)} free of {_mib(server.card.total)}" if server.card else ""
    free = free or "RAM of the whole process"
    table.add_row("total", _count(planned), _count(held), "", *([free] if is_wide else []), style="bold")
    yield table
    if not is_wide:
        yield Text(free)


def _difference(row: Row, rows: Sequence[Row]) -> str:
    """Held less planned."""
    if row.planned is None or row.actual is None:
        return ""
    return f"{round((row.actual - planned_bytes_of(row, rows)) / MIB):+,}"


def _bar(server: WatchedServer) -> Text:
    """The GPU as one row of cells: what each line holds now."""
    bar, filled, spent = Text("["), 0, 0
    width = terminal_width(_BAR + 2, on_terminal=True) - 2
    total = server.card.total if server.card else 1
    for row in server.rows:
        spent += row.actual or 0
        cells = min(round(spent * width / max(total, 1)), width) - filled
        bar.append("█" * max(cells, 0), style=COLOURS.get(row.line, ""))
        filled += max(cells, 0)
    return bar.append(" " * (width - filled) + "]")


# --- requests and speed ------------------------------------------------------------------------------------


def _requests_and_speed(server: WatchedServer, seen: Rates | None) -> Iterator[Text]:
    if "requests" not in server.facts:  # the backend has no counters
        taken = (server.facts.get("places") or {}).get("taken")
        yield Text(f"requests  {0 if taken is None else taken} running")
        return
    done = f"{server.finished} done, {server.cancelled} cancelled, {server.failed} failed"
    yield Text(f"requests  {server.running} running, {server.waiting} waiting; {done}")
    blocks = f"{server.blocks_used} of {server.blocks} blocks in use"
    yield Text(
        f"KV cache  {blocks} ({_share(server.blocks_used, server.blocks)}); cached pictures: "
        f"{format_bytes(server.image_cache)}"
    )
    if seen is None:
        yield Text("speed     (from the second update on)")
        return
    words = f"speed     {seen.tokens:.1f} tokens/s decode, {seen.prompt_tokens:.1f} tokens/s prefill"
    if seen.step_s is not None:
        words += f"; a decode step takes {format_seconds(seen.step_s)}"
        slowest = server.limits.slowest
        if server.expected is not None and slowest is not None:
            usual, most = server.expected.step(seen.cached), slowest.step(seen.cached)
            words += f" (planned: {format_seconds(usual)}, at most {format_seconds(most)})"
    yield Text(words)


# --- cards -------------------------------------------------------------------------------------------------


def _cards(snapshot: Snapshot) -> list[tuple[str, int, int, int]]:
    """Name, total, free and desktop bytes of each GPU; of a server's own GPU as the server reports it."""
    server = snapshot.server
    if server is not None and server.card is not None:
        card = server.card
        return [(card.name, card.total, card.free, card.desktop)]
    if server is not None and not server.local:
        return []
    return [(gpu.name, gpu.total, gpu.free, gpu.desktop) for gpu in snapshot.gpus]


def _gpu_in_short(card: tuple[str, int, int, int]) -> str:
    name, total, free, desktop = card
    short = escape_control(name, terminal=True).removeprefix("NVIDIA ").removeprefix("GeForce ")
    return f"{short}: {_mib(free)} free of {_mib(total)}, others {_mib(desktop)}"


def _gpus(snapshots: Sequence[Snapshot], on_terminal: bool) -> Iterator[Text]:
    snapshot = snapshots[-1]
    cards = _cards(snapshot)
    for number, (name, total, free, desktop) in enumerate(cards):
        yield Text(f"{escape_control(name, terminal=True)}: {_mib(free)} free of {_mib(total)}", style="bold")
        series = [
            others[number][3]
            for past in islice(reversed(snapshots), 600)
            if len(others := _cards(past)) == len(cards) and others[number][0] == name
        ][::-1]
        curve = f"  {_curve(series, total)}" if on_terminal and len(series) > 1 else ""
        span = f"; {_count(min(series))} to {_count(max(series))} so far" if len(series) > 1 else ""
        yield Text(f"desktop   {_mib(desktop)} held by others ({_share(desktop, total)}{span}){curve}")
    if snapshot.server is None or snapshot.server.local:
        yield from _programs(snapshot)


def _programs(snapshot: Snapshot) -> Iterator[Text]:
    if not snapshot.gpus:
        if snapshot.server is None:
            yield Text(f"GPU: none. {escape_control(snapshot.no_gpu, terminal=True)}")
        return
    own = snapshot.server.pid if snapshot.server else -1
    for gpu in snapshot.gpus:
        shown = [_program(process.bytes, process.name, process.pid, own) for process in gpu.processes]
        rest = unattributed_bytes(gpu)
        if gpu.driver and rest >= MIB and snapshot.server is None:
            shown.append(f"{_mib(rest)} not reported by the driver")
        if shown:
            more = [f"{len(shown) - _MAX_PROGRAMS} more"] if len(shown) > _MAX_PROGRAMS else []
            place = f" on GPU {gpu.index}" if len(snapshot.gpus) > 1 else ""
            yield Text(f"programs{place}  " + ", ".join([*shown[:_MAX_PROGRAMS], *more]))


def _program(count: int | None, name: str, pid: int, own: int) -> str:
    shown = "this server" if pid == own else escape_control(name, terminal=True) or f"process {pid}"
    return f"{shown} {'N/A' if count is None else _mib(count)}"


def _curve(series: Sequence[int], total: int) -> str:
    """Sparkline of the last values, scaled from the least to the most."""
    last = series[-_CURVE:]
    low, high = min(last), max(last)
    # Changes below 1 % of the GPU are drawn flat, so that noise is not blown up.
    scale = max(high - low, total // 100, 1)
    return "".join(_LEVELS[min(7, (count - low) * 8 // scale)] for count in last)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _mib(count: int) -> str:
    return f"{_count(count)} MiB"


def _count(count: int | None) -> str:
    return "-" if count is None else f"{round(count / MIB):,}"
