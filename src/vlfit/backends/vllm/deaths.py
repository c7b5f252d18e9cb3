"""What a vLLM that served has died of, for the process that starts it again: with less, if memory ran out.

Knows: which causes are a want of memory, and the file by which one process tells the next. Does not know what
is cheaper (``plan/vllm/step_down.py``) or who starts it again (``server/keeper.py``).
"""

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vlfit.backends.vllm.planning import Planned
from vlfit.plan.ledger import Settings
from vlfit.plan.search import Plan
from vlfit.plan.vllm.cases import Failure
from vlfit.plan.vllm.rebuild import again_with
from vlfit.plan.vllm.settings import OfVllm
from vlfit.plan.vllm.step_down import broken_words, next_plan

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
