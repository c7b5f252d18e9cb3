"""Snapshots of this computer's GPUs and of a server's status, for ``vlfit top``."""

import math
import socket
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from vlfit.errors import RemoteError, ServerUnreachable, UsageError, VlfitError
from vlfit.machine.model import Gpu
from vlfit.machine.survey import GpuMonitor
from vlfit.plan.actual import OURS, Row, StepTime
from vlfit.plan.alarms import Limits, Sample, WorkCounters

if TYPE_CHECKING:
    import httpx


VERSION = 1  # of /v1/vlfit/status
CONNECT_SECONDS = 1.0
READ_SECONDS = 5.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class ServerCard:
    """The GPU of a server, as the server reports it, in bytes; ``desktop``: held by other programs."""

    name: str
    total: int
    free: int
    desktop: int


@dataclass(frozen=True, slots=True)
class ServerSleep:
    """Where the weights of a sleeping server are, and what sleep has freed.

    ``park``: where the weights are, "ram" or "files". ``ram``: bytes of RAM that they take. ``freed``: bytes
    released on the GPU (on a CPU, of RAM).
    """

    park: str
    ram: int
    freed: int


@dataclass(frozen=True, slots=True)
class WatchedServer:
    """A server's status, checked.

    ``facts``: the JSON it was read from. ``rows``: its ledger; may be empty. ``total``: bytes planned and
    held; None: unknown. ``local``: on this computer. ``sleep``: None while awake. ``card``: the server's
    GPU; None on a CPU, or if unknown. ``running`` to ``cancelled``: numbers of requests. ``blocks``,
    ``blocks_used``: of the KV cache. ``image_cache``: bytes. ``expected``: planned duration of a decode
    step; None: no plan.
    """

    url: str
    local: bool
    model: str
    device: str
    state: str
    sleep: ServerSleep | None
    pid: int
    uptime_s: float
    card: ServerCard | None
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
    expected: StepTime | None
    sample: Sample
    limits: Limits
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of GPUs and server at one moment.

    ``time``: Unix time. ``gpus``: of this computer; ``no_gpu``: why there are none, else empty. ``server``:
    None if it gave no status; ``trouble``: why, else empty. ``advice``: what starts one if none listens,
    in brackets after a space, else empty.
    """

    time: float
    gpus: tuple[Gpu, ...]
    no_gpu: str
    server: WatchedServer | None
    trouble: str
    advice: str = ""

    @property
    def sample(self) -> Sample:
        """Sample for alarms: the server's, else the first GPU's, else one with a time only."""
        if self.server is not None:
            return self.server.sample
        if not self.gpus:
            return Sample(self.time)
        gpu = self.gpus[0]
        return Sample(self.time, "", gpu.total, gpu.free, gpu.desktop)


class Watcher:
    """Takes snapshots of this computer's GPUs and of the server at ``url``; a context manager.

    ``api_key`` None: send no key. ``named``: the user gave ``url``, so ``snapshot`` raises until the server
    has answered once. Raises ``UsageError`` for a wrong URL.
    """

    def __init__(self, url: str, api_key: str | None, *, named: bool) -> None:
        from vlfit.backends.server_url import api_base_url

        self.url = api_base_url(url).removesuffix("/v1")
        try:
            parts = urlsplit(self.url)
            self._address = (parts.hostname or "", parts.port or 80)
        except ValueError as error:
            raise UsageError(f"{url} is not a server URL: {error}", "Use http://host:port.") from None
        self.local = self._address[0] in _LOOPBACK
        self._named = named
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client: httpx.Client | None = None
        self._watch = GpuMonitor()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.close()
        if self._client is not None:
            self._client.close()

    def snapshot(self) -> Snapshot:
        """Read the GPUs and ask the server for its status, and return both.

        A server that does not answer is the snapshot's ``trouble``, not an error, but for one that the user
        named and that has never answered: then ``VlfitError`` is raised.
        """
        server, trouble, advice = None, "", ""
        try:
            server = read_status(self._get_status(), self.url, self.local)
            self._named = False  # later it may go away and come back
        except VlfitError as error:
            if self._named:
                raise
            trouble = error.message
            advice = " (vlfit serve starts one)" if isinstance(error, ServerUnreachable) else ""
        gpus, problems = self._watch.read()
        no_gpu = "" if gpus else " ".join(problem.text for problem in problems)
        return Snapshot(time.time(), gpus, no_gpu, server, trouble, advice)

    def _get_status(self) -> Any:
        if not self._named and self._client is None:
            self._check_listening()
        import httpx

        from vlfit.backends.openai_replies import reply_error
        from vlfit.backends.server_url import translate_httpx_errors

        with translate_httpx_errors(self.url, READ_SECONDS):
            if self._client is None:
                self._client = httpx.Client(
                    headers=self._headers,
                    timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
                    trust_env=not self.local,  # a proxy's 127.0.0.1 is another computer
                )
            answer = self._client.get(f"{self.url}/v1/vlfit/status")
        if answer.status_code == 404:
            raise _not_ours(self.url)
        if answer.status_code != 200:
            raise reply_error(answer.status_code, answer.text)
        try:
            return answer.json()
        except ValueError:
            raise _not_ours(self.url) from None

    def _check_listening(self) -> None:
        """Raise ``ServerUnreachable`` if nothing listens, before importing an HTTP client."""
        try:
            socket.create_connection(self._address, CONNECT_SECONDS).close()
        except OSError:
            raise ServerUnreachable(f"nothing listens at {self.url}", "Start one with vlfit serve.") from None


def local_server_url(host: str, port: int) -> str:
    """URL of a server on this computer that listens on ``host`` and ``port``; loopback for ``0.0.0.0``."""
    host = _ANY_ADDRESS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_status(facts: Any, url: str, local: bool) -> WatchedServer:
    """Parse ``facts``, the JSON of ``/v1/vlfit/status``. Raises ``RemoteError`` if it is no such status.

    ``url``: the server's, for errors and the result. ``local``: whether it is on this computer.
    """
    if not isinstance(facts, dict) or "vlfit" not in facts:
        raise _not_ours(url)
    if facts.get("version") != VERSION:
        raise RemoteError(
            f"the server at {url} sends status version {facts.get('version')}, and this vlfit reads"
            f" version {VERSION}",
            "Update the older of the two.",
        )
    try:
        return _server(facts, url, local)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RemoteError(
            f"cannot read the status of the server at {url}: {type(error).__name__} {error}",
            "Use the same version of vlfit on both sides.",
        ) from None


def _not_ours(url: str) -> RemoteError:
    return RemoteError(
        f"the server at {url} has no vlfit status",
        "It is another program or an older vlfit: name another server with --url.",
    )


def _server(facts: dict[str, Any], url: str, local: bool) -> WatchedServer:
    memory = facts.get("memory") or {}
    requests = facts.get("requests") or {}
    blocks = facts.get("kv_blocks") or {}
    total = facts.get("total") or {}
    rows = tuple(_row(each) for each in facts.get("ledger") or ())
    paces = facts.get("decode_step") or {}
    gpu = memory.get("gpu")
    card = None
    if gpu:
        card = ServerCard(str(gpu["name"]), int(gpu["total"]), int(gpu["free"]), int(gpu["desktop"]))
    slept = facts.get("sleep")
    sleep = None if slept is None else ServerSleep(str(slept["park"]), int(slept["ram"]), int(slept["freed"]))
    return WatchedServer(
        url=url,
        local=local,
        model=str(facts["model"]),
        device=str(facts.get("device", "")),
        state=str(facts["state"]),
        sleep=sleep,
        pid=int(facts["pid"]),
        uptime_s=_finite_float(facts["uptime_s"]),
        card=card,
        rows=rows,
        total=(_optional_int(total.get("planned")), _optional_int(total.get("actual"))),
        **{name: int(requests.get(name, 0)) for name in _REQUESTS},
        blocks=int(blocks.get("total", 0)),
        blocks_used=int(blocks.get("used", 0)),
        image_cache=int((facts.get("image_cache") or {}).get("bytes", 0)),
        expected=_pace(paces.get("expected")),
        sample=_sample(facts, card, _optional_int(memory.get("held"))),
        # While a server sleeps, others may use its memory: no limits.
        limits=Limits() if sleep else _limits(rows, _pace(paces.get("slowest")), bool(facts.get("spills"))),
        facts=facts,
    )


_REQUESTS = ("running", "waiting", "finished", "failed", "cancelled")


def _row(facts: dict[str, Any]) -> Row:
    words = (str(facts.get(name, "")) for name in ("how", "note", "remark"))
    return Row(str(facts["line"]), _optional_int(facts["planned"]), _optional_int(facts["actual"]), *words)


def _sample(facts: dict[str, Any], card: ServerCard | None, held: int | None) -> Sample:
    run = str(facts["run"])
    total, free, desktop = (card.total, card.free, card.desktop) if card else (None, None, None)
    requests, tokens, steps = facts.get("requests"), facts.get("tokens"), facts.get("steps")
    if not (requests and tokens and steps):
        return Sample(_finite_float(facts["uptime_s"]), run, total, free, desktop, held)
    work = WorkCounters(
        busy=int(requests["running"]) + int(requests["waiting"]) > 0,
        requests=sum(int(requests[name]) for name in ("finished", "failed", "cancelled")),
        prompt_tokens=int(tokens["prompt"]),
        tokens=int(tokens["generated"]),
        decode_steps=int(steps["decode_count"]),
        decode_seconds=_finite_float(steps["decode_seconds"]),
        decode_cached=int(steps["decode_cached_tokens"]),
    )
    return Sample(_finite_float(facts["engine_s"]), run, total, free, desktop, held, work)


def _limits(rows: tuple[Row, ...], slowest: StepTime | None, spills: bool) -> Limits:
    planned = {row.line: row.planned for row in rows}
    ours = [count for line, count in planned.items() if line in OURS]  # not every plan has all lines
    known = [count for count in ours if count is not None]
    return Limits(
        ours=sum(known) if known and len(known) == len(ours) else None,
        desktop=planned.get("desktop"),
        reserve=planned.get("reserve"),
        slowest=slowest,
        spills=spills,
    )


def _pace(facts: Any) -> StepTime | None:
    return (
        None
        if facts is None
        else StepTime(_finite_float(facts["base_s"]), _finite_float(facts["per_cached_token_s"]))
    )


def _finite_float(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is not a number")
    return number


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)
