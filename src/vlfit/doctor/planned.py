"""What vlfit itself would run on a machine where another program found no room: asked of the planner.

Knows: how a plan is asked for and told in a sentence. Does not know how plans are made (``vlfit.plan``).
"""

import shlex

from vlfit.errors import VlfitError
from vlfit.machine.model import Machine
from vlfit.units import format_bytes

_SIZES = ("8B", "4B", "2B")


def own_plan(machine: Machine | None, size: str | None) -> tuple[str, str]:
    """A sentence and a command for the largest Qwen3-VL, up to ``size``, that fits ``machine``.

    Without a machine, or where nothing fits, the sentence is "" and the command is the planner's.
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
            settings = found.settings
            says = (
                f" vlfit's own engine fits {found.model.name} there: context {settings.context}, pictures "
                f"of {settings.image_tokens} tokens, {format_bytes(found.total)} of "
                f"{format_bytes(found.gpu.total)} by its plan."
            )
            command = found.command or ("vlfit", "plan", found.model.name)
            return says, shlex.join(command)
    return " vlfit's own engine fits no Qwen3-VL there either, by its plan.", "vlfit plan"
