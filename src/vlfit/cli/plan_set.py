"""``vlfit plan`` with several models: what fits together on the card, and what sleeps in RAM."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vlfit.api.engine_options import EngineOptions
from vlfit.cli.printing import Printer
from vlfit.errors import UsageError
from vlfit.plan.ledger import held_by_others
from vlfit.plan.recommend import short_name
from vlfit.units import MIB

if TYPE_CHECKING:
    from vlfit.machine.model import Machine
    from vlfit.plan.native.model_set import SetPlan
    from vlfit.plan.plans import Plan
    from vlfit.plan.wishes import Wishes


def print_set(
    names: Sequence[str], machine: "Machine", wishes: "Wishes", printer: Printer, *, json: bool
) -> bool:
    """Plan the models ``names`` for one server and print it; returns whether each fits alone.

    Raises ``UsageError`` for another backend than the native one, and what ``find_plan`` raises.
    """
    from vlfit.plan.model_lookup import find_models
    from vlfit.plan.native.model_set import plan_set

    if wishes.backend not in (None, "native"):
        raise UsageError(
            f"--backend {wishes.backend} serves one model, and {len(names)} are named",
            "Name one, or leave --backend out.",
        )
    if wishes.offload is not None:
        raise UsageError(
            f"--offload does not go with {len(names)} models",
            "Leave it out: what does not fit sleeps in RAM.",
        )
    plan = plan_set([find_models(name, wishes.weights) for name in names], machine, wishes)
    if json:
        printer.data(set_to_json(plan))
    else:
        for line in set_lines(plan):
            printer.line(line)
    return plan.fits


def set_to_json(plan: "SetPlan") -> dict[str, Any]:
    """``plan`` as a JSON object; ``models`` has what ``vlfit plan MODEL --json`` prints of each."""
    from vlfit.plan.native.model_set import own_bytes
    from vlfit.plan.report import plan_to_json

    return {
        "version": 1,
        "fits": plan.fits,
        "models": [{**plan_to_json(each), "own_bytes": own_bytes(each.ledger)} for each in plan.plans],
        "together": list(plan.together),
        "missing": plan.missing,
        "ram": {"asleep": plan.ram, "available": plan.ram_available, "enough": plan.ram_is_enough},
        "command": _command(plan) if plan.fits else None,
    }


def set_lines(plan: "SetPlan") -> list[str]:
    """The page of ``vlfit plan MODEL MODEL...``, line by line."""
    gpu = plan.plans[0].gpu
    free = gpu.total - held_by_others(gpu)
    names = [short_name(each.model.name) for each in plan.plans]
    width = max(len("model"), *map(len, names))
    lines = [
        f"{gpu.name}: {_mib(free)} MiB free; one server with these models:",
        f"{'model':<{width}}  takes MiB  left MiB  context  image tokens  at once",
    ]
    for name, each in zip(names, plan.plans, strict=True):
        settings = each.settings
        lines.append(
            f"{name:<{width}}  {_mib(_taken(each)):>9}  {_mib(each.headroom):>8}  {settings.context:>7}"
            f"  {settings.image_tokens:>12}  {settings.sequences:>7}{'' if each.fits else '  does not fit'}"
        )
    lines += _verdict(plan)
    if plan.fits:
        lines.append(f"Type  {shlex.join(_command(plan))}")
    return lines


def _verdict(plan: "SetPlan") -> list[str]:
    unfit = [short_name(each.model.name) for each in plan.plans if not each.fits]
    if unfit:
        return [
            f"No    {', '.join(unfit)} would not fit even alone: vlfit plan {unfit[0]} says what would help."
        ]
    together = [short_name(name) for name in plan.together]
    if not plan.missing:
        return [f"Fits  all {len(plan.plans)} at once: no model ever sleeps for another."]
    lines = []
    if len(together) > 1:
        lines.append(f"Fits  {' and '.join(together)} at once; the others take turns with them.")
    else:
        lines.append("Fits  one at a time; the others sleep, and wake when a request names them.")
    where = (
        f"{_mib(plan.ram)} MiB of RAM at most, of {_mib(plan.ram_available)} available"
        if plan.ram_is_enough
        else f"{_mib(plan.ram)} MiB of RAM, and {_mib(plan.ram_available)} are available: some are read from"
        " their files again, which takes longer"
    )
    lines.append(f"RAM   sleeping weights take {where}.")
    lines.append(f"More  for all at once {_mib(plan.missing)} MiB more of the card would be needed.")
    return lines


def _taken(plan: "Plan") -> int:
    return plan.total - held_by_others(plan.gpu)


def _command(plan: "SetPlan") -> list[str]:
    """``vlfit serve`` with the sizes that all share; pictures are as large as fits for each model."""
    settings = plan.plans[0].settings
    names = [short_name(each.model.name) for each in plan.plans]
    chunk = min(each.settings.chunk for each in plan.plans)
    sizes = ["--context", str(settings.context), "--sequences", str(settings.sequences)]
    sizes += ["--chunk", str(chunk)] if chunk != EngineOptions().max_num_batched_tokens else []
    narrow = ["--kv-dtype", settings.kv_dtype] if settings.kv_dtype != "bf16" else []
    return ["vlfit", "serve", *names, *sizes, *narrow]


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f}"
