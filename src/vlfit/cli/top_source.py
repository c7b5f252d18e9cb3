"""What ``vlfit top`` looks at: this computer's GPUs, and the status of a server, as samples.

Knows: where a server is looked for, and the fields of ``/v1/vlfit/status``. Does not know when something is
wrong (``plan/alarms.py``) or how it is shown (``top_page.py``).
"""

import math
import socket
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from vlfit.errors import RemoteError, ServerUnreachable, UsageError, VlfitError
from vlfit.machine.model import Gpu
from vlfit.machine.watch import Watch
from vlfit.plan.actual import OURS, Pace, Row
from vlfit.plan.alarms import Limits, Sample, Work

if TYPE_CHECKING:
    import httpx

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
        from vlfit.backends.reaching import base_url

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
        from vlfit.backends.reaching import failures_in_words

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
        total=(_count(total.get("planned")), _count(total.get("actual"))),
        **{name: int(requests.get(name, 0)) for name in _REQUESTS},
        blocks=int(blocks.get("total", 0)),
        blocks_used=int(blocks.get("used", 0)),
        image_cache=int((facts.get("image_cache") or {}).get("bytes", 0)),
        expected=_pace(paces.get("expected")),
        sample=_sample(facts, card, _count(memory.get("held"))),
        # Who takes the memory of a server that sleeps does as they should.
        limits=Limits() if sleep else _limits(rows, _pace(paces.get("slowest")), bool(facts.get("spills"))),
        facts=facts,
    )


_REQUESTS = ("running", "waiting", "finished", "failed", "cancelled")


def _row(told: dict[str, Any]) -> Row:
    words = (str(told.get(name, "")) for name in ("how", "note", "remark"))
    return Row(str(told["line"]), _count(told["planned"]), _count(told["actual"]), *words)


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


def _count(value: Any) -> int | None:
    return None if value is None else int(value)
