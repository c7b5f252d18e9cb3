"""What ``vlfit verify`` says: ten lines for a person, JSON, and a block to post."""

from dataclasses import asdict
from typing import Any

from vlfit._version import __version__
from vlfit.api.engine_options import EngineOptions
from vlfit.api.stats import EngineSettings
from vlfit.bench.card_row import (
    CardRow,
    is_public,
    row_block,
    shared_name,
    table_line,
    unusual_settings,
)
from vlfit.parity.findings import Finding, Likely, finite
from vlfit.plan.speed import decode_bounds, rounded_bounds
from vlfit.units import MIB
from vlfit.verify.verify_run import MeasuredSpeed, VerifyResult, skipped_names

VERSION = 1
_CAUSES = {
    Likely.KERNEL: "a kernel computes it wrongly on this device",
    Likely.FILE: "the file is damaged or of another model",
    Likely.DRIVER: "the driver, or a kernel that it ran",
    Likely.MEMORY: "memory that does not keep what was written",
    Likely.TEMPLATE: "the chat template is not the checkpoint's",
    Likely.TOKENIZER: "the tokenizer is not the checkpoint's",
    Likely.PROCESSOR: "pictures are prepared otherwise than the model was trained with",
    Likely.ENGINE: "a defect of vlfit: please report it",
    Likely.BACKEND: "the backend has other files or another template, or computes it wrongly",
}
_SLOWER = ": slower than predicted; close other programs, plug a laptop in, and verify again"
_SLOWER_GPU = "; nvidia-smi -q -d PERFORMANCE names limits of power and heat"
_MOST_FURTHER = 3  # findings that are named after the first


def report_lines(result: VerifyResult) -> list[str]:
    """The verdict first, then memory, speed, and what was not checked."""
    report = result.report
    lines = [_title(result)]
    if report.verdict is None:
        lines.append(_agreement(result))
    else:
        lines += _difference(report.verdict)
        further = report.findings[1:]
        if further:
            named = ", ".join(f"{each.component} ({each.stage})" for each in further[:_MOST_FURTHER])
            more = len(further) - _MOST_FURTHER
            lines.append(f"also differs   {named}{f' and {more} more' if more > 0 else ''}")
    lines.append(_memory(result))
    if result.speed is not None:
        lines.append(_speed(result) + _slower(result))
    if skipped := skipped_names(result):
        lines.append(f"not checked    {'; '.join(skipped)}")
    return lines


def _title(result: VerifyResult) -> str:
    where = result.machine.get("device", "")
    return f"{result.model} ({result.format_name}) on {where}: {'ok' if result.report.ok else 'DIFFERS'}"


def _agreement(result: VerifyResult) -> str:
    measured = result.report.measured
    nearest = max(measured, key=lambda each: each.share, default=None)
    at = ""
    if nearest is not None and nearest.share > 0:
        at = f"; nearest to its limit: {nearest.stage}, {nearest.share:.0%}"
    return f"words          {len(measured):,} comparisons, all within rounding{at}"


def _difference(finding: Finding) -> list[str]:
    amount = ""
    if finite(finding.measured) is not None and finite(finding.tolerance) is not None:
        amount = f": {finding.measured:.3g}, where rounding explains {finding.tolerance:.2g} ({finding.unit})"
    lines = [f"differs        {finding.component}, at {finding.stage}, {finding.condition}{amount}"]
    if finding.note:
        lines.append(f"               {finding.note}")
    lines.append(f"likely         {_CAUSES[finding.likely]}")
    lines.append(f"way around     {finding.way_around or 'none is known'}")
    return lines


def _memory(result: VerifyResult) -> str:
    if not result.rows:
        return f"memory         not compared: {result.why_no_rows or 'there is no plan'}"
    planned, held = result.planned_bytes, result.held_bytes
    share = f", {held / planned:.0%} of it" if planned else ""
    over = result.over_plan_bytes
    more = f"; {over / MIB:,.0f} MiB above plan and reserve" if over else ""
    return f"memory         planned {planned / MIB:,.0f} MiB, held {held / MIB:,.0f}{share}{more}"


def _speed(result: VerifyResult) -> str:
    speed = result.speed
    assert speed is not None
    asked = "text" if speed.picture is None else "a picture of {}x{}".format(*speed.picture)
    predicted = ""
    if speed.predicted_tokens_per_s is not None:
        predicted = " (predicted {} to {})".format(*decode_bounds(*speed.predicted_tokens_per_s))
    early = ""
    if speed.predicted_first_token_s is not None:
        early = " (predicted {:g} to {:g})".format(*rounded_bounds(*speed.predicted_first_token_s, digits=2))
    return (
        f"speed          {speed.tokens_per_s:,.1f} tokens/s{predicted}, first token of {asked} after"
        f" {speed.first_token_s:.2f} s{early}"
    )


def _slower(result: VerifyResult) -> str:
    if result.speed is None or result.speed.within_prediction is not False:
        return ""
    return _SLOWER + (_SLOWER_GPU if result.on_gpu else "")


def to_json(result: VerifyResult) -> dict[str, Any]:
    """The object that ``--json`` prints: bytes, seconds, every comparison."""
    return {
        "version": VERSION,
        "ok": result.report.ok,
        "model": result.model,
        "weights_format": result.weights_format,
        "machine": result.machine,
        "versions": result.versions,
        "seconds": round(result.seconds, 3),
        "checks": result.report.as_json(),
        "memory": {
            "lines": [asdict(row) for row in result.rows],
            "planned": result.planned_bytes,
            "held": result.held_bytes,
            "over_plan": result.over_plan_bytes,
            "why_no_lines": result.why_no_rows or None,
        },
        "speed": None if (speed := result.speed) is None else _speed_json(speed),
    }


def _speed_json(speed: MeasuredSpeed) -> dict[str, Any]:
    return asdict(speed) | {"within_prediction": speed.within_prediction}


def share_block(result: VerifyResult) -> str:
    """A Markdown block to post: device, driver, versions and figures, and a row for ``docs/cards.md``.

    No names and no paths: the model is named only if everybody can fetch it.
    """
    report, speed = result.report, result.speed
    rows = [
        ("model", f"{shared_name(result.model)}, {result.format_name}"),
        *((name, value) for name, value in result.machine.items()),
        ("versions", ", ".join(f"{name} {number}" for name, number in result.versions.items())),
        ("verdict", _short_verdict(result)),
        ("level", f"{report.level}, {len(report.measured):,} comparisons, {result.seconds:.0f} s"),
        ("memory", _memory(result).removeprefix("memory").strip()),
    ]
    if speed is not None:
        rows.append(("speed", _speed(result).removeprefix("speed").strip()))
    return "\n".join(["| | |", "|---|---|", *map(table_line, rows), "", *row_block(_card_row(result))])


def _card_row(result: VerifyResult) -> CardRow:
    speed = result.speed
    return CardRow(
        device=result.machine.get("device", "-"),
        driver=result.machine.get("driver", ""),
        vlfit=result.versions.get("vlfit", __version__),
        model=result.model,
        format_name=result.format_name,
        verdict=f"{_short_verdict(result)} ({result.report.level})",
        held_bytes=result.held_bytes,
        planned_bytes=result.planned_bytes,
        tokens_per_s=None if speed is None else speed.tokens_per_s,
        first_token_s=None if speed is None else speed.first_token_s,
        asked="text" if speed is None or speed.picture is None else "{}x{}".format(*speed.picture),
        unusual=result.unusual,
    )


def unusual_run(asked: EngineOptions, ran: EngineSettings) -> tuple[str, ...]:
    """``VerifyResult.unusual`` of an engine that was ``asked`` for, and ``ran``."""
    named = list(unusual_settings(asked, ran))
    if asked.max_model_len is not None:
        named.append(f"context of {ran.context:,}")
    if asked.speculate is False:
        named.append("no speculative decoding")
    return tuple(named)


def _short_verdict(result: VerifyResult) -> str:
    finding = result.report.verdict
    if finding is None:
        return "ok"
    is_own_file = finding.stage.endswith(".gguf") and not is_public(result.model)
    stage = "a GGUF file" if is_own_file else finding.stage
    return f"{finding.code}: {finding.component}, {stage}, {finding.condition}"
