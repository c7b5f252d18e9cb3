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
from vlfit.backends.vllm.planning import PlannedStart, check_plan_fits, native_alternative, resurvey
from vlfit.backends.vllm.serve_command import (
    DiagnoseLog,
    StartDiagnosis,
    VllmAddress,
    VllmServeCommand,
    build_command,
    refused_added_flags,
)
from vlfit.backends.vllm.starting import HANG_LINE, StartedVllm, start_vllm
from vlfit.errors import VllmFailed
from vlfit.plan.plans import Plan
from vlfit.plan.vllm.args import VllmArgs, VllmSettings, as_vllm_settings, vllm_args_of
from vlfit.plan.vllm.step_down import HANG, Failure, NextPlan, broken_wish_warnings, next_plan, replan

MAX_STARTS = 8  # each takes a minute or more; plans that help are among the first few
_PORT_RETRIES = 3  # if another program took the free port in the meantime
_LAST_LINES = 12
_KILLED = 128 + 9
PORT_IN_USE = "port.in_use"
_REFUSED_ARGUMENT = ("vllm.unknown_flag", "vllm.bad_value")


@dataclass(frozen=True, slots=True)
class ServingVllm:
    """A vLLM that answers, the plan that it serves with, and its address.

    ``failed_plans``: plans whose starts failed before ``plan``'s, in the order of the attempts.
    """

    started: StartedVllm
    plan: Plan
    address: VllmAddress
    failed_plans: tuple[Plan, ...] = ()


@dataclass(frozen=True, slots=True)
class StartAttempts:
    """Starts of vLLM, each with a cheaper plan than the one before; ``run`` does them.

    ``planned``: the first start. ``new_address``: returns an address with a free port, called for each start.
    ``model``: the folder to load. ``retry``: try the next cheaper plan after a failure. ``diagnose_log``:
    finds the cause of a failure; None: no retries. ``on_status``: gets sentences about failures and changes.
    """

    planned: PlannedStart
    new_address: Callable[[], VllmAddress]
    model: str
    retry: bool
    diagnose_log: "DiagnoseLog | None"
    on_status: StatusCallback
    progress: LoadProgress

    def run(self) -> ServingVllm:
        """Start vLLM until it serves, with at most ``MAX_STARTS`` plans. Blocks for minutes.

        The same plan is started again if another program took the port, or without flags that vlfit adds and
        this vLLM does not know. Raises ``DoesNotFit`` if the first plan does not fit, ``VllmFailed`` with the
        cause of the last failure.
        """
        check_plan_fits(self.planned)
        tried: list[Plan] = [self.planned.plan]
        port_retries, left_out = _PORT_RETRIES, frozenset[str]()
        while True:
            address = self.new_address()
            command = self._command(tried[-1], address, left_out)
            several = vllm_args_of(tried[-1].settings).cards > 1
            started = start_vllm(
                command, (address.host, address.port), self.progress, self.on_status, may_hang=several
            )
            if not started.ended:
                return ServingVllm(started, tried[-1], address, tuple(tried[:-1]))
            failure, diagnosis = diagnose_failure(started, self.diagnose_log)
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
            for words in broken_wish_warnings(step):
                self.on_status(words)
            tried.append(step.plan)

    def _command(self, plan: Plan, address: VllmAddress, left_out: frozenset[str]) -> VllmServeCommand:
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

    def _failed(self, started: StartedVllm, diagnosis: StartDiagnosis | None) -> VllmFailed:
        hints = [] if diagnosis is None else [diagnosis.remedy]
        hints.append(f"Its log is {started.log.path}.")
        offer = native_alternative(self.planned)
        if offer is not None and offer.command is not None:
            hints.append(f"Run {' '.join(offer.command)} instead: the native engine has a plan that fits.")
        elif not self.planned.machine.gpus:
            name = self.planned.plan.model.name
            hints.append(f"Run vlfit serve {name} instead: the native engine needs no GPU.")
        return VllmFailed(f"vLLM did not start: {describe_failure(started, diagnosis)}", "\n".join(hints))


def diagnose_failure(
    started: StartedVllm, diagnose_log: "DiagnoseLog | None"
) -> tuple[Failure, StartDiagnosis | None]:
    """Why a vLLM ended, by its log, exit code and the kernel's OOM kills.

    The failure is for choosing the next plan (``id`` "": unknown), the diagnosis for a person (None:
    unknown). ``diagnose_log`` None: both are unknown.
    """
    if diagnose_log is None:
        return Failure(""), None
    text = started.log.kept_output
    if started.ran_out_of_ram:
        text += (
            b"\nOut of memory: Killed process 0 (vllm)\n"  # as in the kernel's log, which only root may read
        )
    elif started.process.exit_code == _KILLED:
        text += b"\nKilled\n"  # as a shell reports it
    if not started.hung:
        return diagnose_log(io.BytesIO(text), None)
    failure, diagnosis = diagnose_log(io.BytesIO(text + f"\n{HANG_LINE}\n".encode()), None)
    return (failure if failure.id else Failure(HANG)), diagnosis


def describe_failure(started: StartedVllm, diagnosis: StartDiagnosis | None) -> str:
    """Why ``started`` failed, in words for an error message.

    ``diagnosis``: the cause that the doctor found; None: the exit code and the last lines of the log are
    quoted.
    """
    if diagnosis is not None:
        return f"{diagnosis.cause}  [{diagnosis.id}]"
    said = started.log.kept_output.decode("utf-8", "replace").strip().splitlines()
    ended = f"it ended with code {started.process.exit_code}"
    return (
        "\n".join([f"{ended}. Its last lines:", *said[-_LAST_LINES:]])
        if said
        else f"{ended} and logged nothing"
    )


def _refused_flags(failure: Failure) -> frozenset[str]:
    """Flags added by vlfit that this version of vLLM does not know."""
    if failure.id not in _REFUSED_ARGUMENT:
        return frozenset()
    return refused_added_flags(f"{failure.values.get('flags', '')} {failure.values.get('flag', '')}")


# Deaths of a serving vLLM, written to a file that the next process, started by the supervisor, reads.

# A plain kill does not count: people and service managers kill, too.
_OUT_OF_MEMORY = {
    *("torch.oom", "cuda.oom", "cuda.graph_oom", "nccl.out_of_memory"),
    *("kernel.oom_kill", "kernel.cgroup_oom"),
}


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a serving vLLM: the ``source`` of its model, its plan's settings, and the cause."""

    model_source: str
    settings: VllmSettings
    failure: Failure


def record_death(file: Path, plan: Plan, failure: Failure) -> None:
    """Append the death of a vLLM that served with ``plan`` to ``file``; does nothing if writing fails."""
    deaths = [*_read_deaths(file), Death(plan.model.source, as_vllm_settings(plan.settings), failure)]
    with contextlib.suppress(OSError):
        file.write_text(json.dumps([asdict(death) for death in deaths], default=sorted), "utf-8")


def adapt_to_deaths(planned: PlannedStart, file: Path) -> PlannedStart:
    """Choose a start's plan by the deaths that ``record_death`` wrote to ``file`` for the same model.

    After a vLLM that ran out of memory: the next cheaper plan, with notes that say so. After another death:
    the plan that served last. ``planned`` itself if that plan does not fit, or without deaths.
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
        *broken_wish_warnings(step),
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
