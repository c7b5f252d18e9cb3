"""``vlfit top``: memory line by line, the plan beside it, requests and speed, for as long as one looks.

Knows: the loop, and how it ends without leaving marks on the terminal. Does not know where numbers come from
(``cli/top.py``), what is wrong (``plan/alarms.py``) or how it looks (``top_page.py``).
"""

import math
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

import typer

from vlfit.cli.printing import Printer
from vlfit.cli.signals import terminated_as_interrupted
from vlfit.errors import RemoteError, ServerUnreachable, UsageError, VlfitError
from vlfit.machine.model import Gpu
from vlfit.machine.survey import Watch
from vlfit.plan.actual import OURS, Pace, Row
from vlfit.plan.alarms import Limits, Sample, Work

if TYPE_CHECKING:
    import httpx

    from vlfit.plan.alarms import Alarm


EXAMPLES = """\b
Examples:
  vlfit top
  vlfit top --url http://192.168.1.20:8000 --interval 5
  vlfit top --once --json
  vlfit top --json --interval 10 >> top.jsonl
"""

REMEMBERED = 3600  # looks; the alarms and the curve need minutes


def top(
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="The server to look at; its key goes into VLFIT_API_KEY.  [default: the one on this"
            " computer; env VLFIT_SERVER]",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600, help="Time between two looks."),
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one page and end; speeds take two looks at a server.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one line for each look, in bytes and seconds.")
    ] = False,
) -> None:
    """Watch GPU memory and a running `vlfit serve`: each line of its ledger, planned and held.

    Works without a server: it then shows who holds the GPU. Looking never wakes or slows the server. Warns
    when memory spills into RAM, when it grows without requests, and when other programs eat into the reserve.
    Ctrl-C ends it, with exit code 0. Where stdout is no terminal, each look is one line.
    """
    from vlfit.settings import read_settings

    settings = read_settings(server=url)
    where = settings.server or default_url(settings.host, settings.port)
    key = settings.api_key.get_secret_value() if settings.api_key else None
    printer = Printer(json=as_json)
    with Source(where, key, named=settings.server is not None) as source:
        if once:
            _once(source, interval, printer, as_json=as_json)
            return
        try:
            with terminated_as_interrupted():
                if as_json or not sys.stdout.isatty():
                    _lines(source, interval, printer, as_json=as_json)
                else:
                    _screen(source, interval)
        except KeyboardInterrupt:
            return  # the way to end it


def _once(source: "Source", interval: float, printer: Printer, *, as_json: bool) -> None:
    from vlfit.cli.top_page import facts, page

    looks = [source.look()]
    if looks[0].server is not None:
        time.sleep(interval)
        looks.append(source.look())
    found = _alarms(looks)
    if as_json:
        printer.data(facts(looks, source.url, found))
        return
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    lively = sys.stdout.isatty()
    if not lively:
        console.width = max(console.width, 120)  # nothing is cut in a file
    console.print(page(looks, source.url, found, lively=lively))


def _looks(source: "Source", interval: float) -> "Iterator[Sequence[Look]]":
    """All looks so far, once for each new one, ``interval`` seconds after the one before."""
    looks: deque[Look] = deque(maxlen=REMEMBERED)
    following = time.monotonic()
    while True:
        looks.append(source.look())
        yield looks
        # A look that takes longer than the interval is not made up for.
        following = max(following + interval, time.monotonic())
        time.sleep(following - time.monotonic() if following > time.monotonic() else 0)


def _lines(source: "Source", interval: float, printer: Printer, *, as_json: bool) -> None:
    from vlfit.cli.top_page import facts, line

    told: set[str] = set()
    for looks in _looks(source, interval):
        found = _alarms(looks)
        if as_json:
            printer.data(facts(looks, source.url, found))
            continue
        printer.line(line(looks, found))
        for alarm in found:
            if alarm.id not in told:
                printer.note(f"warning: {alarm.what}\n  -> {alarm.hint}")
        told = {alarm.id for alarm in found}


def _screen(source: "Source", interval: float) -> None:
    """The page on the terminal's other screen, which is gone afterwards, however it ends."""
    from rich.console import Console
    from rich.live import Live

    from vlfit.cli.top_page import page

    console = Console(highlight=False, emoji=False, markup=False)
    looks = _looks(source, interval)
    first = next(looks)  # what keeps it from looking at all is told on the screen that stays
    with Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(page(first, source.url, _alarms(first), lively=True), refresh=True)
        for seen in looks:
            live.update(page(seen, source.url, _alarms(seen), lively=True), refresh=True)


def _alarms(looks: "Sequence[Look]") -> "tuple[Alarm, ...]":
    from vlfit.plan.alarms import Limits, alarms

    server = looks[-1].server
    return alarms([look.sample for look in looks], server.limits if server else Limits())


# What ``vlfit top`` looks at: this computer's GPUs, and the status of a server, as samples.
#
# Knows: where a server is looked for, and the fields of ``/v1/vlfit/status``. Does not know when something
# is wrong (``plan/alarms.py``) or how it is shown (``top_page.py``).


VERSION = 1  # of the status that is understood
CONNECT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Card:
    """The GPU that a server is on, in bytes."""

    name: str
    total: int
    free: int
    desktop: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """A server sleeps: its weights wait in ``park`` (``ram``, where they take ``ram`` bytes, or ``files``)
    and ``freed`` bytes were given back.
    """

    park: str
    ram: int
    freed: int


@dataclass(frozen=True, slots=True)
class Server:
    """A server's status, checked. ``facts`` is what it said, whole; ``rows`` are empty if it tells none."""

    url: str
    local: bool
    model: str
    device: str
    state: str
    sleep: Sleep | None
    pid: int
    uptime_s: float
    card: Card | None
    rows: tuple[Row, ...]
    total: tuple[int | None, int | None]
    running: int
    waiting: int
    finished: int
    failed: int
    cancelled: int
    blocks: int
    blocks_used: int
    image_cache: int
    expected: Pace | None
    sample: Sample
    limits: Limits
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Look:
    """All that was seen at one moment. ``trouble`` says why there is no server, "" if there is one."""

    time: float
    gpus: tuple[Gpu, ...]
    no_gpu: str
    server: Server | None
    trouble: str

    @property
    def sample(self) -> Sample:
        """For the alarms: of the server, or of the first GPU without one."""
        if self.server is not None:
            return self.server.sample
        if not self.gpus:
            return Sample(self.time)
        gpu = self.gpus[0]
        return Sample(self.time, "", gpu.total, gpu.free, gpu.desktop)


class Source:
    """A context manager; ``look`` does not fail but for a server that was named and is not there at first.

    ``url`` is the server to ask; ``named``: a person gave it, so that it has to answer. Raises ``UsageError``
    for what is no URL.
    """

    def __init__(self, url: str, api_key: str | None, *, named: bool) -> None:
        from vlfit.backends.server_url import base_url

        self.url = base_url(url).removesuffix("/v1")
        try:
            parts = urlsplit(self.url)
            self._address = (parts.hostname or "", parts.port or 80)
        except ValueError as error:
            raise UsageError(f"{url} is no URL of a server: {error}", "use http://host:port") from None
        self.local = self._address[0] in _LOOPBACK
        self._named = named
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client: httpx.Client | None = None
        self._watch = Watch()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.close()
        if self._client is not None:
            self._client.close()

    def look(self) -> Look:
        """Raises what keeps a server that was named from answering, the first time."""
        server, trouble = None, ""
        try:
            server = read_status(self._ask(), self.url, self.local)
            self._named = False  # from now on it may go away and come back
        except VlfitError as error:
            if self._named:
                raise
            trouble = error.message
        gpus, problems = self._watch.look()
        no_gpu = "" if gpus else " ".join(problem.sentences for problem in problems)
        return Look(time.time(), gpus, no_gpu, server, trouble)

    def _ask(self) -> Any:
        if not self._named and self._client is None:
            self._knock()
        import httpx

        from vlfit.backends.openai_replies import error_from
        from vlfit.backends.server_url import failures_in_words

        with failures_in_words(self.url, SILENCE_SECONDS):
            if self._client is None:
                self._client = httpx.Client(
                    headers=self._headers,
                    timeout=httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
                    trust_env=not self.local,  # a proxy's 127.0.0.1 is another computer
                )
            answer = self._client.get(f"{self.url}/v1/vlfit/status")
        if answer.status_code == 404:
            raise _not_ours(self.url)
        if answer.status_code != 200:
            raise error_from(answer.status_code, answer.text)
        try:
            return answer.json()
        except ValueError:
            raise _not_ours(self.url) from None

    def _knock(self) -> None:
        """Raises unless something listens there, which is known before a whole client is imported."""
        try:
            socket.create_connection(self._address, CONNECT_SECONDS).close()
        except OSError:
            raise ServerUnreachable(f"none listens at {self.url}", "start one with `vlfit serve`") from None


def default_url(host: str, port: int) -> str:
    """Where `vlfit serve` listens on this computer unless told otherwise."""
    host = _ANY_ADDRESS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_status(facts: Any, url: str, local: bool) -> Server:
    """The status that the server at ``url`` told. Raises ``RemoteError`` for anything that is none."""
    if not isinstance(facts, dict) or "vlfit" not in facts:
        raise _not_ours(url)
    if facts.get("version") != VERSION:
        raise RemoteError(
            f"the server at {url} tells its status in version {facts.get('version')}; this vlfit reads "
            f"version {VERSION}",
            "update the older of the two",
        )
    try:
        return _server(facts, url, local)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RemoteError(
            f"the status of the server at {url} cannot be read: {type(error).__name__} {error}",
            "are both of the same version of vlfit?",
        ) from None


def _not_ours(url: str) -> RemoteError:
    return RemoteError(
        f"a server answers at {url}, but it tells no status as vlfit's does",
        "another program, or an older vlfit; --url names another server",
    )


def _server(facts: dict[str, Any], url: str, local: bool) -> Server:
    memory = facts.get("memory") or {}
    requests = facts.get("requests") or {}
    blocks = facts.get("kv_blocks") or {}
    total = facts.get("total") or {}
    rows = tuple(_row(each) for each in facts.get("ledger") or ())
    paces = facts.get("decode_step") or {}
    gpu = memory.get("gpu")
    card = None
    if gpu:
        card = Card(str(gpu["name"]), int(gpu["total"]), int(gpu["free"]), int(gpu["desktop"]))
    told = facts.get("sleep")
    sleep = None if told is None else Sleep(str(told["park"]), int(told["ram"]), int(told["freed"]))
    return Server(
        url=url,
        local=local,
        model=str(facts["model"]),
        device=str(facts.get("device", "")),
        state=str(facts["state"]),
        sleep=sleep,
        pid=int(facts["pid"]),
        uptime_s=_real(facts["uptime_s"]),
        card=card,
        rows=rows,
        total=(_whole(total.get("planned")), _whole(total.get("actual"))),
        **{name: int(requests.get(name, 0)) for name in _REQUESTS},
        blocks=int(blocks.get("total", 0)),
        blocks_used=int(blocks.get("used", 0)),
        image_cache=int((facts.get("image_cache") or {}).get("bytes", 0)),
        expected=_pace(paces.get("expected")),
        sample=_sample(facts, card, _whole(memory.get("held"))),
        # Who takes the memory of a server that sleeps does as they should.
        limits=Limits() if sleep else _limits(rows, _pace(paces.get("slowest")), bool(facts.get("spills"))),
        facts=facts,
    )


_REQUESTS = ("running", "waiting", "finished", "failed", "cancelled")


def _row(told: dict[str, Any]) -> Row:
    words = (str(told.get(name, "")) for name in ("how", "note", "remark"))
    return Row(str(told["line"]), _whole(told["planned"]), _whole(told["actual"]), *words)


def _sample(facts: dict[str, Any], card: Card | None, held: int | None) -> Sample:
    run = str(facts["run"])
    total, free, desktop = (card.total, card.free, card.desktop) if card else (None, None, None)
    requests, tokens, steps = facts.get("requests"), facts.get("tokens"), facts.get("steps")
    if not (requests and tokens and steps):
        return Sample(_real(facts["uptime_s"]), run, total, free, desktop, held)
    work = Work(
        busy=int(requests["running"]) + int(requests["waiting"]) > 0,
        requests=sum(int(requests[name]) for name in ("finished", "failed", "cancelled")),
        prompt_tokens=int(tokens["prompt"]),
        tokens=int(tokens["generated"]),
        decode_steps=int(steps["decode_count"]),
        decode_seconds=_real(steps["decode_seconds"]),
        decode_cached=int(steps["decode_cached_tokens"]),
    )
    return Sample(_real(facts["engine_s"]), run, total, free, desktop, held, work)


def _limits(rows: tuple[Row, ...], slowest: Pace | None, spills: bool) -> Limits:
    planned = {row.line: row.planned for row in rows}
    ours = [count for line, count in planned.items() if line in OURS]  # not every plan has all of them
    known = [count for count in ours if count is not None]
    return Limits(
        ours=sum(known) if known and len(known) == len(ours) else None,
        desktop=planned.get("desktop"),
        reserve=planned.get("reserve"),
        slowest=slowest,
        spills=spills,
    )


def _pace(told: Any) -> Pace | None:
    return None if told is None else Pace(_real(told["base_s"]), _real(told["per_cached_token_s"]))


def _real(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} where a number should be")
    return number


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
