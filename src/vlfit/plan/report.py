"""A plan as JSON, version 1: bytes and seconds, stable, described in docs/plan.md."""

from collections.abc import Iterable
from typing import Any

from vlfit.machine.model import Gpu
from vlfit.plan.backends import cost_model
from vlfit.plan.ledger import held_by_others
from vlfit.plan.plans import Plan
from vlfit.plan.speed import Range, Speed

VERSION = 1


def facts(plan: Plan) -> dict[str, Any]:
    """One plan."""
    settings, costs = plan.settings, cost_model(plan.backend)
    return {
        "version": VERSION,
        "model": plan.model.name,
        "backend": plan.backend,
        "fits": plan.fits,
        "machine": machine_facts(plan.gpu, plan.wsl2),
        "settings": {
            "weights": settings.weights,
            "context": settings.context,
            "image_tokens": settings.image_tokens,
            "sequences": settings.sequences,
            "chunk": settings.chunk,
            "kv_tokens": costs.pool_tokens(settings),
            "kv_dtype": settings.kv_dtype,
            **costs.settings_facts(settings),
        },
        "ledger": [
            {"line": line.line, "bytes": line.bytes, "how": line.how, "note": line.note}
            for line in plan.ledger
        ],
        "total": plan.total,
        "headroom": plan.headroom,
        "speed": None if plan.speed is None else _speed_facts(plan.speed),
        "command": None if plan.command is None else list(plan.command),
        "environment": dict(plan.environment),
        "changes": [
            {"what": change.what, "frees": change.frees, "enough": change.enough} for change in plan.changes
        ],
        "remarks": list(plan.remarks),
        **costs.facts(plan),
    }


def table_facts(
    plans: Iterable[Plan], gpu: Gpu, wsl2: bool, what_if: Iterable[tuple[str, Plan]]
) -> dict[str, Any]:
    """All plans for one machine, best first, and the best plan for each other machine in ``what_if``."""
    return {
        "version": VERSION,
        "machine": machine_facts(gpu, wsl2),
        "plans": [facts(plan) for plan in plans],
        "what_if": what_if_facts(what_if),
    }


def what_if_facts(what_if: Iterable[tuple[str, Plan]]) -> list[dict[str, Any]]:
    """Plans for other machines: each a description and a plan."""
    return [{"what": what, "plan": facts(plan)} for what, plan in what_if]


def machine_facts(gpu: Gpu, wsl2: bool) -> dict[str, Any]:
    """The GPU that is planned for; ``desktop`` is all that is not free."""
    return {
        "gpu": gpu.name,
        "total": gpu.total,
        "free": gpu.free,
        "desktop": held_by_others(gpu),
        "bandwidth": gpu.bandwidth,
        "compute_capability": list(gpu.compute_capability),
        "wsl2": wsl2,
    }


def _speed_facts(speed: Speed) -> dict[str, Any]:
    return {
        "decode_tokens_per_s": _rounded(speed.decode.expected),
        "decode_tokens_per_s_range": _bounds(speed.decode),
        "ttft_s": _rounded(speed.first_token.expected),
        "ttft_s_range": _bounds(speed.first_token),
        "bytes_per_token": speed.bytes_per_token,
        "roof_tokens_per_s": _rounded(speed.roof),
        "offload_tokens_per_s": None if speed.offload is None else _rounded(speed.offload),
        "offload_bytes": speed.offloaded,
    }


def _bounds(range_: Range) -> list[float]:
    return [_rounded(range_.low), _rounded(range_.high)]


def _rounded(value: float) -> float:
    """Three digits: the prediction is no better than that."""
    return float(f"{value:.3g}")
