"""What a run of ``vlfit verify`` leaves: its speeds beside the plan's, and the result, kept for later."""

from dataclasses import replace
from datetime import date

from vlfit.api.stats import EngineSettings
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import VlfitError
from vlfit.machine.model import Gpu
from vlfit.plan.backends import CPU, NATIVE
from vlfit.plan.calibration import with_bandwidth
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.model_lookup import find_models
from vlfit.plan.native.verified import (
    MOST_FINDINGS,
    KeptFinding,
    KeptSpeed,
    Verification,
    device_of,
    keep,
    lines_of,
)
from vlfit.plan.processors import is_ram
from vlfit.plan.shapes import Model
from vlfit.plan.speed import TEXT_TOKENS
from vlfit.verify.verify_run import SPEED_TOKENS, MeasuredSpeed, VerifyResult


def planned_model(checkpoint: Checkpoint, name: str) -> Model | None:
    """The model that ``vlfit plan NAME`` plans for ``checkpoint``; None if that knows none."""
    try:
        found = find_models(name, None).exact
    except VlfitError:
        return None
    return next((model for model in found if model.name == checkpoint.name), None)


def with_prediction(
    speed: MeasuredSpeed, model: Model, gpu: Gpu, settings: EngineSettings, tokens: int
) -> MeasuredSpeed:
    """``speed`` with what the plan predicts for the same request; ``speed`` itself if it predicts nothing.

    ``gpu``: as it was before the model was loaded, or the RAM with the processor. ``tokens``: of the answer.
    """
    if settings.offload:
        return speed
    costs = CPU if is_ram(gpu) else NATIVE
    planned = PlanSettings(
        model.weights,
        settings.context,
        settings.image_tokens,
        settings.sequences,
        settings.chunk,
        kv_dtype=settings.kv_dtype,
        speculate=settings.speculate,
        draft_model=settings.draft_model,
        table_in_ram=settings.table_in_ram,
    )
    first, later = (
        costs.speed(model, with_bandwidth(gpu), replace(planned, image_tokens=max(cached - TEXT_TOKENS, 0)))
        for cached in (speed.prompt_tokens, speed.prompt_tokens + tokens // 2)
    )
    if first is None or later is None:
        return speed
    likely = first.likely_first_token or first.first_token
    return replace(
        speed,
        predicted_tokens_per_s=speed.predicted_tokens_per_s or (later.decode.low, later.decode.high),
        predicted_first_token_s=(likely.low, likely.high),
    )


def keep_result(
    result: VerifyResult, gpu: Gpu, model: Model | None, *, as_planned: bool, torch: str, vlfit: str
) -> None:
    """Keep ``result`` for later plans, for ``vlfit doctor`` and for the next start.

    ``gpu``: that it ran on, or the RAM with the processor. ``model``: as planned; None: no plan knows it.
    ``as_planned``: the engine ran with no option that changes its speed. ``torch``, ``vlfit``: versions.
    Raises ``UsageError`` if it cannot be written.
    """
    speed = result.speed
    findings = tuple(
        KeptFinding(
            each.code,
            str(each.component),
            each.stage,
            each.condition,
            str(each.likely),
            each.note,
            each.way_around or "",
        )
        for each in result.report.findings[:MOST_FINDINGS]
    )
    kept_speed = None
    if speed is not None and as_planned:
        kept_speed = KeptSpeed(
            speed.tokens_per_s,
            speed.prompt_tokens + SPEED_TOKENS[result.report.level] // 2,
            speed.first_token_s,
            speed.prompt_tokens,
            speed.picture is not None,
        )
    keep(
        Verification(
            model=result.model if model is None else model.name,
            weights=result.format_name if model is None else model.weights,
            weights_format=result.weights_format,
            device=device_of(gpu),
            torch=torch,
            vlfit=vlfit,
            date=date.today().isoformat(),
            level=result.report.level,
            ok=result.report.ok,
            findings=findings,
            speed=kept_speed,
            planned=result.planned_bytes,
            held=result.held_bytes,
            lines=lines_of(result.rows),
        )
    )
