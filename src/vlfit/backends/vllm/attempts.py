"""Starts of vLLM, one after the other, until one serves or nothing cheaper is left.

Knows: what is said between two starts. Does not know what a log means (handed in, as the doctor is above this
floor) nor what the next cheaper plan is (``plan/vllm/step_down.py``).
"""

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vlfit.backends.vllm.planning import Planned, as_it_is_now, check, native_offer
from vlfit.backends.vllm.serve_command import (
    Command,
    Diagnosis,
    Front,
    ReadFailure,
    Tell,
    added_among,
    assemble,
)
from vlfit.backends.vllm.starting import WAITS, Progress, Started, start
from vlfit.errors import VllmFailed
from vlfit.plan.ledger import Settings
from vlfit.plan.search import Plan
from vlfit.plan.vllm.flags import OfVllm
from vlfit.plan.vllm.step_down import HANG, Failure, Step, again_with, broken_words, next_plan

MOST_STARTS = 8  # each takes a minute or more; plans that help are found in the first few
_PORTS = 3  # tries of a port that somebody took in the meantime
_LAST_LINES = 12
_KILLED = 128 + 9
PORT_IN_USE = "port.in_use"
_NOT_TAKEN = ("vllm.unknown_flag", "vllm.bad_value")


@dataclass(frozen=True, slots=True)
class Serving:
    """A vLLM that answers: with which plan, where, and the plans that failed before it, in their order."""

    started: Started
    plan: Plan
    front: Front
    failed: tuple[Plan, ...] = ()


@dataclass(frozen=True, slots=True)
class Attempts:
    """How to start ``planned`` until it serves. ``new_front`` says where to listen, anew for each start.
    ``model``: what to load. ``retry``: whether to go on after a failure.
    """

    planned: Planned
    new_front: Callable[[], Front]
    model: str
    retry: bool
    read_failure: "ReadFailure | None"
    tell: Tell
    progress: Progress

    def run(self) -> Serving:
        """Start it. Raises ``DoesNotFit`` for a plan that cannot be tried, ``VllmFailed`` with the cause."""
        check(self.planned)
        tried: list[Plan] = [self.planned.plan]
        ports, left_out = _PORTS, frozenset[str]()
        while True:
            front = self.new_front()
            command = self._command(tried[-1], front, left_out)
            several = tried[-1].settings.vllm.cards > 1
            started = start(command, (front.host, front.port), self.progress, self.tell, may_hang=several)
            if not started.ended:
                return Serving(started, tried[-1], front, tuple(tried[:-1]))
            failure, diagnosis = read(started, self.read_failure)
            if failure.id == PORT_IN_USE and ports:
                ports -= 1
                continue
            refused = _refused(failure) - left_out
            if refused:
                left_out |= refused
                self.tell(
                    f"started again without {', '.join(sorted(refused))}, which this vLLM does not take"
                )
                continue
            step = self._step(failure, tried)
            if step is None:
                raise self._failed(started, diagnosis)
            self.tell(f"vLLM did not start: {in_words(started, diagnosis)}")
            self.tell(f"started again: {step.what_changed}")
            for words in broken_words(step):
                self.tell(words)
            tried.append(step.plan)

    def _command(self, plan: Plan, front: Front, left_out: frozenset[str]) -> Command:
        planned = self.planned
        command = assemble(
            plan,
            planned.installed.program,
            front,
            planned.own,
            self.model,
            planned.unset,
            left_out,
            planned.pinned,
        )
        for word in command.overrides:
            self.tell(f"planned {word} gives way to what you typed")
        return command

    def _step(self, failure: Failure, tried: list[Plan]) -> Step | None:
        if not self.retry or not failure.id or len(tried) >= MOST_STARTS:
            return None
        planned = self.planned
        return next_plan(failure, tried, as_it_is_now(planned.machine), planned.wishes, planned.own)

    def _failed(self, started: Started, diagnosis: Diagnosis | None) -> VllmFailed:
        hints = [] if diagnosis is None else [diagnosis.remedy]
        hints.append(f"its log is {started.log.path}")
        offer = native_offer(self.planned)
        if offer is not None and offer.command is not None:
            hints.append(f"the native engine has a plan that fits: {' '.join(offer.command)}")
        elif not self.planned.machine.gpus:
            name = self.planned.plan.model.name
            hints.append(f"the native engine runs without a GPU, too: vlfit serve {name}")
        return VllmFailed(f"vLLM did not start: {in_words(started, diagnosis)}", "\n".join(hints))


def read(started: Started, read_failure: "ReadFailure | None") -> tuple[Failure, Diagnosis | None]:
    """What its log says about why it ended."""
    if read_failure is None:
        return Failure(""), None
    text = started.log.text
    if started.ran_out_of_ram:
        text += b"\nOut of memory: Killed process 0 (vllm)\n"  # as the kernel's log has it, for root alone
    elif started.guarded.code == _KILLED:
        text += b"\nKilled\n"  # as a shell would have said
    if not started.hung:
        return read_failure(io.BytesIO(text), None)
    failure, diagnosis = read_failure(io.BytesIO(text + f"\n{WAITS}\n".encode()), None)
    return (failure if failure.id else Failure(HANG)), diagnosis


def in_words(started: Started, diagnosis: Diagnosis | None) -> str:
    """The cause; where nothing is known of it, the last words."""
    if diagnosis is not None:
        return f"{diagnosis.cause}  [{diagnosis.id}]"
    said = started.log.text.decode("utf-8", "replace").strip().splitlines()
    ended = f"it ended with code {started.guarded.code}"
    return (
        "\n".join([f"{ended}. Its last words:", *said[-_LAST_LINES:]]) if said else f"{ended} without a word"
    )


def _refused(failure: Failure) -> frozenset[str]:
    """Flags that vlfit adds beside the plan's and that this version of vLLM does not take."""
    if failure.id not in _NOT_TAKEN:
        return frozenset()
    return added_among(f"{failure.values.get('flags', '')} {failure.values.get('flag', '')}")


# What a vLLM that served has died of, for the process that starts it again: with less, if memory ran out.
#
# Knows: which causes are a want of memory, and the file by which one process tells the next. Does not know
# what is cheaper (``plan/vllm/step_down.py``) or who starts it again (``server/supervisor.py``).


# Without a proof that the kernel ended it for want of RAM a kill is none: people and systems kill, too.
_OF_MEMORY = {
    *("torch.oom", "cuda.oom", "cuda.graph_oom", "nccl.out_of_memory"),
    *("kernel.oom_kill", "kernel.cgroup_oom"),
}


@dataclass(frozen=True, slots=True)
class Death:
    """A plan that served, what ended it, and the ``place`` of its model."""

    place: str
    settings: Settings
    failure: Failure


def remember(file: Path, plan: Plan, failure: Failure) -> None:
    """Add this death to those in ``file``. Where that cannot be written the next start knows of none."""
    deaths = [*_read(file), Death(plan.model.place, plan.settings, failure)]
    with contextlib.suppress(OSError):
        file.write_text(json.dumps([asdict(death) for death in deaths], default=sorted), "utf-8")


def after_deaths(planned: Planned, file: Path) -> Planned:
    """``planned`` as it is to be started after the deaths in ``file``: the next cheaper plan after one for
    want of memory, else what served before. What does not fit any more is planned anew.
    """
    deaths = [death for death in _read(file) if death.place == planned.plan.model.place]
    if not deaths:
        return planned
    tried = [again_with(planned.plan, death.settings, planned.machine) for death in deaths]
    failure = deaths[-1].failure
    if failure.id not in _OF_MEMORY:
        return replace(planned, plan=tried[-1]) if tried[-1].fits else planned
    step = next_plan(failure, tried, planned.machine, planned.wishes, planned.own)
    if step is None or not step.plan.fits:
        return planned
    said = (
        f"vLLM ended while it served, for want of memory  [{failure.id}]",
        f"started again: {step.what_changed}",
        *broken_words(step),
    )
    return replace(planned, plan=step.plan, said=(*planned.said, *said))


def _read(file: Path) -> list[Death]:
    """None of a file that is not there; it is written by this module alone."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return []
    return [Death(each["place"], _settings(each["settings"]), Failure(**each["failure"])) for each in found]


def _settings(facts: dict[str, Any]) -> Settings:
    told = facts["vllm"]
    sets = {name: frozenset(told[name]) for name in ("left_out", "variables")}
    return Settings(**{**facts, "vllm": OfVllm(**{**told, **sets})})
