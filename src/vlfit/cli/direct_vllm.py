"""``vlfit serve --backend vllm --direct``: vLLM itself answers clients, started and watched by us.

Knows: the order of starting and stopping. Does not know what is planned (``serving_vllm.py``).
"""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from vlfit.cli.printing import Printer
from vlfit.cli.records import recorded
from vlfit.cli.serve_options import OfServe
from vlfit.cli.serving import CRASHED, keys_of
from vlfit.cli.serving_vllm import (
    planned_for,
    show_held,
    show_native,
    show_plan,
    starting,
    vllm_options,
)
from vlfit.cli.signals import terminated_as_interrupted
from vlfit.errors import UsageError, VllmFailed

if TYPE_CHECKING:
    from vlfit.backends.phases import Phases
    from vlfit.backends.vllm.attempts import Serving
    from vlfit.settings import Settings

_NO_PORT = "vLLM's own server listens on the port that it is told"


def serve_directly(settings: "Settings", asked: OfServe, *, json_line: bool, quiet: bool) -> None:
    """Until a signal ends it (code 0), or vLLM ends itself (code 70)."""
    from vlfit.backends.phases import Phases
    from vlfit.server.address import address_of, bind
    from vlfit.server.log import log_to_stderr

    phases = Phases()
    printer = Printer(json=json_line, stream=False, quiet=quiet)
    log_to_stderr(quiet, settings.log_format)
    keys = keys_of(settings)
    if len(keys) > 1:
        raise UsageError(f"vLLM's own server asks for one key, and {len(keys)} are given", "give it one")
    if settings.port == 0:
        raise UsageError(f"--port 0: {_NO_PORT}", "name one")
    with bind(settings.host, settings.port) as listener:
        url = address_of(listener)  # taken by others: known now, not after a minute
    with terminated_as_interrupted():
        serving = _started(settings, asked, keys, printer, phases)
        ended = False
        try:
            phases.end()
            with suppress(KeyboardInterrupt), recorded(url, serving.front.name, settings.drain):
                _announce(serving, url, printer, phases, json_line)
                serving.started.guarded.wait(None)
                ended = True
        finally:
            serving.started.guarded.stop()
    if ended:
        _tell_end(serving, printer)
        sys.exit(CRASHED)
    printer.note("stopped")


def _started(
    settings: "Settings", asked: OfServe, keys: tuple[str, ...], printer: Printer, phases: "Phases"
) -> "Serving":
    from vlfit.backends.vllm import account
    from vlfit.backends.vllm.attempts import Attempts
    from vlfit.backends.vllm.command import Front
    from vlfit.checkpoint.source import locate
    from vlfit.machine.survey import survey

    planned = planned_for(settings, asked, printer.note)
    show_plan(planned, printer)
    name, folder = locate(planned.plan.model.place)
    front = Front(settings.host, settings.port, name, keys[0] if keys else "", direct=True)
    try:
        with starting(printer, phases) as (tell, progress):
            options = vllm_options(settings, asked, tell)
            attempts = Attempts(
                planned, lambda: front, str(folder), options.retry, options.read_failure, tell, progress
            )
            serving = attempts.run()
    except VllmFailed:
        show_native(planned, printer)
        raise
    lost = account.lost_since(serving.plan, survey())
    told = serving.started.told
    account.keep(serving.plan, told, lost)
    show_held(serving, account.rows_of(serving.plan, told, lost), lost, printer)
    return serving


def _announce(serving: "Serving", url: str, printer: Printer, phases: "Phases", json_line: bool) -> None:
    context = serving.plan.settings.context
    printer.note(
        f"ready: {serving.front.name} under vLLM itself, context {context} tokens, at {url}/v1\n"
        f"after {phases.in_words()}"
    )
    if json_line:
        facts = {"url": url, "model": serving.front.name, "context": context, "backend": "vllm"}
        printer.data({**facts, "ready_s": round(phases.total, 3), "log": str(serving.started.log.path)})


def _tell_end(serving: "Serving", printer: Printer) -> None:
    from vlfit.backends.vllm import attempts
    from vlfit.cli.printing import print_error
    from vlfit.doctor.failure import read_failure

    _, diagnosis = attempts.read(serving.started, read_failure)
    words = attempts.in_words(serving.started, diagnosis)
    hint = f"{diagnosis.remedy} " if diagnosis else ""
    log = serving.started.log.path
    print_error(VllmFailed(f"vLLM ended while it served: {words}", f"{hint}Its log is {log}"))
