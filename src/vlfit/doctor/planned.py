"""What fits a machine where another program found no room: with vLLM, or with vlfit's own engine.

Knows: how the planner is asked, and how a plan is told in a sentence. Does not know how plans are made
(``vlfit.plan``).
"""

import json
import shlex
from collections.abc import Iterable
from itertools import product
from typing import Any

from vlfit.checkpoint import catalog
from vlfit.doctor.command import serve
from vlfit.doctor.facts import Facts
from vlfit.errors import VlfitError
from vlfit.machine.model import Machine
from vlfit.units import format_bytes

_SIZES = ("8B", "4B", "2B")


def own_plan(machine: Machine | None, size: str | None) -> tuple[str, str]:
    """A sentence and a command for the largest Qwen3-VL, up to ``size``, that fits ``machine``.

    What has to be converted first is: the command does both. Without a machine, or where nothing fits, the
    sentence is "" and the command is the planner's.
    """
    if machine is None or not machine.gpus:
        return "", "vlfit plan"
    from vlfit.plan.search import Wishes, plan
    from vlfit.plan.subjects import subjects

    for name in _SIZES[_SIZES.index(size) if size in _SIZES else 0 :]:
        try:
            found = plan(subjects(name), machine, Wishes())
        except VlfitError:
            continue
        if found.fits:
            settings, made_by = found.settings, found.model.made_by
            made = f", made of {found.model.converted_from} first" if made_by else ""
            says = (
                f" vlfit's own engine fits {found.model.name} there{made}: context {settings.context}, "
                f"pictures of {settings.image_tokens} tokens, {format_bytes(found.total)} of "
                f"{format_bytes(found.gpu.total)} by its plan."
            )
            start = shlex.join(found.command or ("vlfit", "plan", found.model.name))
            variables = "".join(f"{name}={shlex.quote(to)} " for name, to in found.environment.items())
            return says, f"{made_by} && {variables}{start}" if made_by else f"{variables}{start}"
    return " vlfit's own engine fits no Qwen3-VL there either, by its plan.", "vlfit plan"


def vllm_plan(
    machine: Machine | None, facts: Facts, names: Iterable[str], contexts: Iterable[int]
) -> tuple[str, str] | None:
    """A sentence and the command of the first of ``names`` that fits ``machine`` with the vLLM of the log,
    with the first of ``contexts`` that it has room for.

    Both are "" where none fits. None where the planner cannot say: without a machine, for models that are not
    in the catalog (no hub is asked here), for several GPUs. Flags that the plan says nothing of stay.
    """
    known = [name for name in names if catalog.find(name) is not None]
    if machine is None or not machine.gpus or not known or facts.whole("tensor_parallel_size", 1) > 1:
        return None
    from vlfit.plan.ledger import VLLM
    from vlfit.plan.search import Wishes, plan
    from vlfit.plan.subjects import subjects

    version = None if facts.version is None else ".".join(str(part) for part in facts.version)
    for name, context in product(known, tuple(contexts)):
        copies = facts.whole("data_parallel_size", 1)  # as many as there were: more are no remedy
        wishes = Wishes(context=context, backend=VLLM, vllm_version=version, data_parallel=copies)
        try:
            made = plan(subjects(name), machine, wishes)
        except VlfitError:
            continue
        if made.fits:
            changes: dict[str, Any] = {
                flag.flag.removeprefix("--").replace("-", "_"): _value(flag.value)
                for flag in made.flags
                if flag.flag not in made.environment
            }
            settings = made.settings
            says = (
                f"{name} fits {made.gpu.name} with a context of {settings.context}, pictures of at most "
                f"{settings.image_tokens} tokens, {settings.sequences} at once"
                f"{'' if settings.graphs else ' and no CUDA graphs'}: {format_bytes(made.total)} of "
                f"{format_bytes(made.gpu.total)} by the planner's sums, with what others hold and what vLLM "
                "takes beyond its budget"
            )
            run = serve(facts, changes, environment=made.environment, model=name)
            return says, run
    return "", ""


def _value(text: str) -> Any:
    """A flag's value as ``serve`` takes it: a switch is True, JSON is an object."""
    return True if not text else json.loads(text) if text.startswith("{") else text
