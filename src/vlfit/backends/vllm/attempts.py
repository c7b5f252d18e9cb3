"""Start vLLM again and again, each time with the next cheaper plan, until it serves.

Also records why a serving vLLM died, so that the process that restarts it can plan with less memory.
"""

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vlfit.api.progress import LoadProgress, StatusCallback
from vlfit.backends.vllm.planning import PlannedStart, check_fits, native_alternative, resurvey
from vlfit.backends.vllm.serve_command import (
    DiagnoseLog,
    Diagnosis,
    ServeCommand,
    VllmAddress,
    build_command,
    refused_additions,
)
from vlfit.backends.vllm.starting import HANG_LINE, StartedVllm, start_vllm
from vlfit.errors import VllmFailed
from vlfit.plan.plans import Plan
from vlfit.plan.vllm.args import VllmArgs, VllmSettings, args_of, vllm_settings
from vlfit.plan.vllm.step_down import HANG, Failure, NextPlan, describe_broken, next_plan, replan

MAX_STARTS = 8  # each takes a minute or more; plans that help are among the first few
_PORT_RETRIES = 3  # if another program took the free port in the meantime
_LAST_LINES = 12
_KILLED = 128 + 9
PORT_IN_USE = "port.in_use"
_REFUSED_ARGUMENT = ("vllm.unknown_flag", "vllm.bad_value")


@dataclass(frozen=True, slots=True)
class ServingVllm:
    """A vLLM that answers: its process, plan and address, and the plans that failed before, in order."""

    started: StartedVllm
    plan: Plan
    address: VllmAddress
    failed: tuple[Plan, ...] = ()


@dataclass(frozen=True, slots=True)
class StartAttempts:
    """``new_address`` gives a new address for each start. ``model``: what to load. ``retry``: go on after a
    failure.
    """

    planned: PlannedStart
    new_address: Callable[[], VllmAddress]
    model: str
    retry: bool
    diagnose_log: "DiagnoseLog | None"
    on_status: StatusCallback
    progress: LoadProgress

    def run(self) -> ServingVllm:
        """Start until it serves. Raises ``DoesNotFit`` for the first plan, ``VllmFailed`` with the cause."""
        check_fits(self.planned)
        tried: list[Plan] = [self.planned.plan]
        port_retries, left_out = _PORT_RETRIES, frozenset[str]()
        while True:
            address = self.new_address()
            command = self._command(tried[-1], address, left_out)
            several = args_of(tried[-1].settings).cards > 1
            started = start_vllm(
                command, (address.host, address.port), self.progress, self.on_status, may_hang=several
            )
            if not started.ended:
                return ServingVllm(started, tried[-1], address, tuple(tried[:-1]))
            failure, diagnosis = diagnose(started, self.diagnose_log)
            if failure.id == PORT_IN_USE and port_retries:
                port_retries -= 1
                continue
            refused = _refused_flags(failure) - left_out
            if refused:
                left_out |= refused
                self.on_status(
                    f"started again without {', '.join(sorted(refused))}, which this vLLM does not know"
                )
                continue
            step = self._step(failure, tried)
            if step is None:
                raise self._failed(started, diagnosis)
            self.on_status(f"vLLM did not start: {describe_failure(started, diagnosis)}")
            self.on_status(f"started again: {step.what_changed}")
            for words in describe_broken(step):
                self.on_status(words)
            tried.append(step.plan)

    def _command(self, plan: Plan, address: VllmAddress, left_out: frozenset[str]) -> ServeCommand:
        planned = self.planned
        command = build_command(
            plan,
            planned.installed.program,
            address,
            planned.extra_args,
            self.model,
            planned.unset,
            left_out,
            planned.pinned,
        )
        for word in command.overrides:
            self.on_status(f"the planned {word} is replaced by what you typed")
        return command

    def _step(self, failure: Failure, tried: list[Plan]) -> NextPlan | None:
        if not self.retry or not failure.id or len(tried) >= MAX_STARTS:
            return None
        planned = self.planned
        return next_plan(failure, tried, resurvey(planned.machine), planned.wishes, planned.extra_args)

    def _failed(self, started: StartedVllm, diagnosis: Diagnosis | None) -> VllmFailed:
        hints = [] if diagnosis is None else [diagnosis.remedy]
        hints.append(f"Its log is {started.log.path}.")
        offer = native_alternative(self.planned)
        if offer is not None and offer.command is not None:
            hints.append(f"Run {' '.join(offer.command)} instead: the native engine has a plan that fits.")
        elif not self.planned.machine.gpus:
            name = self.planned.plan.model.name
            hints.append(f"Run vlfit serve {name} instead: the native engine needs no GPU.")
        return VllmFailed(f"vLLM did not start: {describe_failure(started, diagnosis)}", "\n".join(hints))


def diagnose(started: StartedVllm, read_failure: "DiagnoseLog | None") -> tuple[Failure, Diagnosis | None]:
    """Why it ended, by its log and exit code."""
    if read_failure is None:
        return Failure(""), None
    text = started.log.text
    if started.ran_out_of_ram:
        text += (
            b"\nOut of memory: Killed process 0 (vllm)\n"  # as in the kernel's log, which only root may read
        )
    elif started.process.code == _KILLED:
        text += b"\nKilled\n"  # as a shell reports it
    if not started.hung:
        return read_failure(io.BytesIO(text), None)
    failure, diagnosis = read_failure(io.BytesIO(text + f"\n{HANG_LINE}\n".encode()), None)
    return (failure if failure.id else Failure(HANG)), diagnosis


def describe_failure(started: StartedVllm, diagnosis: Diagnosis | None) -> str:
    """The cause; if unknown, the exit code and the last lines of the log."""
    if diagnosis is not None:
        return f"{diagnosis.cause}  [{diagnosis.id}]"
    said = started.log.text.decode("utf-8", "replace").strip().splitlines()
    ended = f"it ended with code {started.process.code}"
    return (
        "\n".join([f"{ended}. Its last lines:", *said[-_LAST_LINES:]])
        if said
        else f"{ended} and logged nothing"
    )


def _refused_flags(failure: Failure) -> frozenset[str]:
    """Flags added by vlfit that this version of vLLM does not know."""
    if failure.id not in _REFUSED_ARGUMENT:
        return frozenset()
    return refused_additions(f"{failure.values.get('flags', '')} {failure.values.get('flag', '')}")


# Deaths of a serving vLLM, passed in a file to the process that the supervisor starts next.

# A plain kill does not count: people and service managers kill, too.
_OUT_OF_MEMORY = {
    *("torch.oom", "cuda.oom", "cuda.graph_oom", "nccl.out_of_memory"),
    *("kernel.oom_kill", "kernel.cgroup_oom"),
}


@dataclass(frozen=True, slots=True)
class Death:
    """Settings of a plan that served, what ended it, and the ``source`` of its model."""

    model_source: str
    settings: VllmSettings
    failure: Failure


def record_death(file: Path, plan: Plan, failure: Failure) -> None:
    """Append this death to ``file``; if that fails, the next start does without."""
    deaths = [*_read_deaths(file), Death(plan.model.source, vllm_settings(plan.settings), failure)]
    with contextlib.suppress(OSError):
        file.write_text(json.dumps([asdict(death) for death in deaths], default=sorted), "utf-8")


def after_deaths(planned: PlannedStart, file: Path) -> PlannedStart:
    """``planned``, adapted to the deaths in ``file``.

    After a death by lack of memory: the next cheaper plan; else the plan that served. ``planned`` itself if
    those do not fit any more.
    """
    deaths = [death for death in _read_deaths(file) if death.model_source == planned.plan.model.source]
    if not deaths:
        return planned
    tried = [replan(planned.plan, death.settings, planned.machine) for death in deaths]
    failure = deaths[-1].failure
    if failure.id not in _OUT_OF_MEMORY:
        return replace(planned, plan=tried[-1]) if tried[-1].fits else planned
    step = next_plan(failure, tried, planned.machine, planned.wishes, planned.extra_args)
    if step is None or not step.plan.fits:
        return planned
    said = (
        f"vLLM ran out of memory while it served  [{failure.id}]",
        f"started again: {step.what_changed}",
        *describe_broken(step),
    )
    return replace(planned, plan=step.plan, notes=(*planned.notes, *said))


def _read_deaths(file: Path) -> list[Death]:
    """The deaths in ``file``, which this module writes; none if it does not exist."""
    try:
        deaths = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return []
    return [
        Death(each["model_source"], _parse_settings(each["settings"]), Failure(**each["failure"]))
        for each in deaths
    ]


def _parse_settings(facts: dict[str, Any]) -> VllmSettings:
    args = facts["vllm"]
    sets = {name: frozenset(args[name]) for name in ("omitted_flags", "environment")}
    return VllmSettings(**{**facts, "vllm": VllmArgs(**{**args, **sets})})
