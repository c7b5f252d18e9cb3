"""``vlfit sleep`` and ``vlfit wake``: a running server gives its GPU memory back, and takes it again.

Knows: how to ask, and what a person is told. Does not know: what sleeping is (``engine/sleep.py``).
"""

from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from vlfit.cli.printing import Printer
from vlfit.errors import RemoteError, UsageError
from vlfit.units import format_bytes, format_seconds

CONNECT_SECONDS = 5.0

SLEEP_EXAMPLES = """\b
Examples:
  vlfit sleep
  vlfit sleep --park files
  vlfit sleep --url http://192.168.1.20:8000
  curl -X POST http://127.0.0.1:8000/v1/vlfit/sleep
"""

WAKE_EXAMPLES = """\b
Examples:
  vlfit wake
  vlfit wake --url http://192.168.1.20:8000
  curl -X POST http://127.0.0.1:8000/v1/vlfit/wake
"""

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The server; its key goes into VLFIT_API_KEY.  [default: the one on this computer; env"
        " VLFIT_SERVER]",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print what the server answers, in bytes and seconds.")]


def sleep(
    url: Url = None,
    park: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="Where weights wait: ram, files (to be read again, which takes no RAM), or auto: RAM if"
            " there is enough.",
        ),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Let a running `vlfit serve` give the GPU back: weights wait in RAM, all but the CUDA context is freed.

    Requests that run or wait are answered first. The next request wakes the server, or `vlfit wake`; looking
    at /health, at metrics or with `vlfit top` does not.
    """
    if park not in ("auto", "ram", "files"):
        raise UsageError(f"--park is {park!r}", "use auto, ram or files")
    facts = _post("sleep", url, {"park": park})
    if facts["state"] != "asleep":
        raise RemoteError("the server is awake: it was woken while it waited to sleep", "try again")
    printer = Printer(json=as_json)
    if as_json:
        printer.data(facts)
        return
    told = facts["sleep"]
    where = f"{format_bytes(told['ram'])} of RAM" if told["ram"] else "their files"
    after = f"after {format_seconds(told['seconds'])}" if facts["changed"] else "already"
    printer.line(f"asleep {after}: {format_bytes(told['freed'])} given back, the weights are in {where}")


def wake(url: Url = None, as_json: Json = False) -> None:
    """Let a running `vlfit serve` that sleeps take its GPU memory again, before a request does.

    If others have the memory by now it says how much is missing, and sleeps on (exit code 1).
    """
    facts = _post("wake", url, {})
    printer = Printer(json=as_json)
    if as_json:
        printer.data(facts)
        return
    printer.line(f"awake after {format_seconds(facts['seconds'])}" if facts["changed"] else "awake already")


def _post(what: str, url: str | None, body: dict[str, str]) -> dict[str, Any]:
    """The server's answer, checked. It waits for as long as the server does: requests may run."""
    import httpx

    from vlfit.backends.openai_replies import error_from
    from vlfit.backends.reaching import base_url, failures_in_words
    from vlfit.cli.top_source import default_url
    from vlfit.server.settings import is_loopback
    from vlfit.settings import read_settings

    settings = read_settings(server=url)
    base = base_url(settings.server or default_url(settings.host, settings.port))
    key = settings.api_key.get_secret_value() if settings.api_key else ""
    with failures_in_words(base):
        answer = httpx.post(
            f"{base}/vlfit/{what}",
            json=body,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            trust_env=not is_loopback(urlsplit(base).hostname or ""),  # a proxy's 127.0.0.1 is another
        )
    if answer.status_code not in (200, 404, 405):
        raise error_from(answer.status_code, answer.text)
    try:
        facts: dict[str, Any] = answer.json()
        known = facts["state"] in ("asleep", "ready") and "seconds" in facts
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise RemoteError(
            f"a server answers at {base}, but it knows no {what}",
            "another program, or an older vlfit; --url names another server",
        )
    return facts
