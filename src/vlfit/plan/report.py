"""A plan as JSON, version 1: bytes and seconds, stable, described in docs/plan.md."""

from collections.abc import Iterable
from typing import Any

from vlfit.machine.cards import has_bf16, has_fp8, was_tried
from vlfit.machine.model import Gpu
from vlfit.plan.backends import cost_model_of
from vlfit.plan.ledger import held_by_others
from vlfit.plan.plans import Plan
from vlfit.plan.speed import Range, Speed, rounded, rounded_bounds

VERSION = 1


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """``plan`` as a JSON object; docs/plan.md describes its fields."""
    settings, costs = plan.settings, cost_model_of(plan)
    return {
        "version": VERSION,
        "model": plan.model.name,
        "backend": plan.backend,
        "fits": plan.fits,
        "machine": machine_to_json(plan.gpu, plan.wsl2),
        "settings": {
            "weights": settings.weights,
            "context": settings.context,
            "image_tokens": settings.image_tokens,
            "sequences": settings.sequences,
            "chunk": settings.chunk,
            "kv_tokens": costs.pool_tokens(settings),
            "kv_dtype": settings.kv_dtype,
            **costs.settings_json_fields(settings),
        },
        "ledger": [
            {"line": line.line, "bytes": line.bytes, "how": line.how, "note": line.note}
            for line in plan.ledger
        ],
        "total": plan.total,
        "headroom": plan.headroom,
        "speed": None if plan.speed is None else _speed_facts(plan.speed),
        "needs": {
            "download": plan.needs.download,
            "disk": plan.needs.disk,
            "ram": plan.needs.ram,
            "conversion_s": None if plan.needs.conversion_s is None else round(plan.needs.conversion_s),
        },
        "command": None if plan.command is None else list(plan.command),
        "environment": dict(plan.environment),
        "changes": [
            {"what": change.what, "frees": change.frees, "enough": change.enough} for change in plan.changes
        ],
        "remarks": list(plan.remarks),
        **costs.json_fields(plan),
    }


def catalog_to_json(
    plans: Iterable[Plan],
    gpu: Gpu,
    wsl2: bool,
    what_if: Iterable[tuple[str, Plan]],
    recommended: Plan | None = None,
    other_series: Plan | None = None,
) -> dict[str, Any]:
    """A JSON object of ``plans`` for one machine, in the given order.

    ``what_if``: (description, plan) for variants of the machine. ``recommended``: the plan to take, of which
    only the model's name is written; None if no plan fits. ``other_series``: likewise, of another series.
    """
    return {
        "version": VERSION,
        "machine": machine_to_json(gpu, wsl2),
        "recommended": None if recommended is None else recommended.model.name,
        "other_series": None if other_series is None else other_series.model.name,
        "plans": [plan_to_json(plan) for plan in plans],
        "what_if": what_if_to_json(what_if),
    }


def context_to_json(plan: Plan) -> dict[str, Any]:
    """Context, image tokens, concurrent requests and headroom of ``plan``, without the rest."""
    settings = plan.settings
    return {
        "context": settings.context,
        "image_tokens": settings.image_tokens,
        "sequences": settings.sequences,
        "headroom": plan.headroom,
    }


def what_if_to_json(what_if: Iterable[tuple[str, Plan]]) -> list[dict[str, Any]]:
    """A JSON list of ``what_if``: (description, plan) for variants of a machine."""
    return [{"what": what, "plan": plan_to_json(plan)} for what, plan in what_if]


def machine_to_json(gpu: Gpu, wsl2: bool) -> dict[str, Any]:
    """``gpu`` as a JSON object; its field ``desktop`` is ``held_by_others``: all that is not free."""
    return {
        "gpu": gpu.name,
        "total": gpu.total,
        "free": gpu.free,
        "desktop": held_by_others(gpu),
        "desktop_how": gpu.desktop_how,
        "bandwidth": gpu.bandwidth,
        "compute_capability": list(gpu.compute_capability),
        "bf16": has_bf16(gpu.compute_capability),
        "fp8": has_fp8(gpu.compute_capability),
        "tried": was_tried(gpu.compute_capability),
        "wsl2": wsl2,
    }


def _speed_facts(speed: Speed) -> dict[str, Any]:
    likely = speed.likely_first_token or speed.first_token
    return {
        "decode_tokens_per_s": rounded(speed.decode.expected),
        "decode_tokens_per_s_range": _bounds(speed.decode),
        "ttft_s": rounded(speed.first_token.expected),
        "ttft_s_range": _bounds(speed.first_token),
        "ttft_s_likely": rounded(likely.expected),
        "ttft_s_likely_range": _bounds(likely),
        "bytes_per_token": speed.bytes_per_token,
        "roof_tokens_per_s": rounded(speed.roof),
        "offload_tokens_per_s": None
        if speed.offload_tokens_per_s is None
        else rounded(speed.offload_tokens_per_s),
        "offload_bytes": speed.offloaded_bytes,
        **({"measured": speed.measured} if speed.measured else {}),
    }


def _bounds(range_: Range) -> list[float]:
    return list(rounded_bounds(range_.low, range_.high))
