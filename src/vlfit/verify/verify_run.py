"""One run of ``vlfit verify``: the checks of ``parity/``, and what was promised beside what was measured."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from vlfit.api.conversation import ImagePart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend
from vlfit.bench.measure import TimedRequest, run_requests
from vlfit.bench.workload import QUESTION, synthetic_picture
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import ModelFailed, VlfitError
from vlfit.parity.failed_checks import CHECK_FAILED, DEVICE_FAILED, NOT_FINITE, failure
from vlfit.parity.findings import (
    CheckReport,
    Component,
    Finding,
    Level,
    Likely,
    ProgressOfChecks,
    SkippedCheck,
    with_way_around,
)
from vlfit.plan.actual import Expectation, Row, planned_and_held

logger = logging.getLogger(__name__)

# A check's prompts are short, so its engines need no long context.
CHECK_CONTEXT = 2048
SPEED_TOKENS = {"quick": 16, "normal": 48, "full": 96}
SPEED_STAGE, SPEED_CONDITION = "speed", "single requests"
SPEED_RUNS = {"quick": 1, "normal": 3, "full": 5}
_PICTURE, _SMALL_PICTURE = (512, 512), (128, 128)  # pixels; the small one warms a quick check up
# A large card captures CUDA graphs of a picture's and a prompt's size when it has come up to three times; the
# plan predicts a prompt that has its graph. Where requests take long there are no graphs.
_MOST_WARM_UPS, _WARM_UP_SECONDS = 3, 0.5


@dataclass(frozen=True)
class MeasuredSpeed:
    """Speed of one request alone: ``tokens_per_s`` after the first token, ``first_token_s`` from submission.

    ``picture``: its width and height in pixels, None for a text model. ``predicted_tokens_per_s``,
    ``predicted_first_token_s``: low and high of the plan; None if it has no bandwidth to predict from.
    """

    tokens_per_s: float
    first_token_s: float
    prompt_tokens: int
    picture: tuple[int, int] | None
    predicted_tokens_per_s: tuple[float, float] | None = None
    predicted_first_token_s: tuple[float, float] | None = None

    @property
    def within_prediction(self) -> bool | None:
        """False if slower than predicted, in tokens/s or to the first token; None: nothing is predicted."""
        if self.predicted_tokens_per_s is None and self.predicted_first_token_s is None:
            return None
        slow = self.predicted_tokens_per_s and self.tokens_per_s < self.predicted_tokens_per_s[0]
        late = self.predicted_first_token_s and self.first_token_s > self.predicted_first_token_s[1]
        return not (slow or late)


@dataclass
class VerifyResult:
    """What one run found: the ``report`` of the checks, and what was promised beside what was measured.

    ``rows``: ledger lines, planned and held; empty for the reason ``why_no_rows``. ``machine``, ``versions``:
    as shown, by name. ``speed``: None if it was not measured. ``seconds``: of the whole run.
    ``stored_format``: ``Checkpoint.stored_format``, "" if it is ``weights_format``. ``unusual``: the engine's
    settings that are not the defaults and change speed or memory, in words.
    """

    model: str
    weights_format: str
    machine: dict[str, str]
    report: CheckReport
    rows: tuple[Row, ...] = ()
    why_no_rows: str = ""
    speed: MeasuredSpeed | None = None
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    stored_format: str = ""
    unusual: tuple[str, ...] = ()

    @property
    def format_name(self) -> str:
        """The format of its weights as people call it: of GGUF models their type."""
        return self.stored_format or self.weights_format

    @property
    def planned_bytes(self) -> int:
        """Bytes planned for the lines whose held bytes are known, too."""
        return planned_and_held(self.rows)[0]

    @property
    def held_bytes(self) -> int:
        """Bytes held of these lines."""
        return planned_and_held(self.rows)[1]

    @property
    def on_gpu(self) -> bool:
        """Whether it ran on a GPU of this computer."""
        return "driver" in self.machine

    @property
    def over_plan_bytes(self) -> int | None:
        """Bytes held on a GPU above all that was planned, reserve included; None: not on a GPU, or unknown.

        What others hold counts on neither side.
        """
        ours = [row for row in self.rows if row.line != "desktop"]
        if not self.on_gpu or not any(row.line == "reserve" for row in ours):
            return None
        return max(sum((row.actual or 0) - (row.planned or 0) for row in ours), 0)


def check_engine(
    checkpoint: Checkpoint,
    options: EngineOptions,
    level: Level,
    on_progress: ProgressOfChecks | None = None,
) -> CheckReport:
    """Run the checks of ``level`` on engines of ``checkpoint``, one at a time, in this thread.

    The engines have ``options``, but a context of ``CHECK_CONTEXT`` tokens if none is set, and no limit on
    torch's memory: what is promised is measured by ``measure_speed`` on an engine as users start it. Raises
    what building an engine raises.
    """
    from vlfit.engine.engine import NativeEngine
    from vlfit.parity.run_checks import run_checks

    small = replace(
        options,
        max_model_len=min(options.max_model_len or CHECK_CONTEXT, CHECK_CONTEXT),
        kv_tokens=None,
        enforce_plan=False,
        idle_sleep=None,
    )

    def build(**changes: object) -> NativeEngine:
        return NativeEngine(checkpoint, replace(small, **changes))  # type: ignore[arg-type]

    return run_checks(build, checkpoint, level, on_progress)


def measure_speed(backend: Backend, level: Level, expectation: Expectation, *, sees: bool) -> MeasuredSpeed:
    """Time single requests of ``backend`` after some that warm it up: medians of ``SPEED_RUNS[level]``.

    ``sees``: the requests have a picture. ``expectation``: of the plan, for the predicted speed. Raises what
    a request raises.
    """
    tokens = SPEED_TOKENS[level]

    def timed(number: int, side: tuple[int, int] = _PICTURE, tokens: int = tokens) -> TimedRequest:
        parts = [ImagePart(synthetic_picture(*side, number))] if sees else []
        asked = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return run_requests(backend, [single_turn(QUESTION, *parts)], asked)[0]

    began = time.perf_counter()
    if level == "quick":
        timed(0, _SMALL_PICTURE, 2)
    else:
        timed(0)
    for number in range(_MOST_WARM_UPS):
        if time.perf_counter() - began < _WARM_UP_SECONDS:
            timed(number + 1, tokens=2)
    runs = [timed(_MOST_WARM_UPS + 1 + number) for number in range(SPEED_RUNS[level])]
    prompt = runs[0].prompt_tokens
    predicted = None
    if expectation.expected is not None and expectation.slowest is not None:
        cached = prompt + tokens // 2
        predicted = (1 / expectation.slowest.step(cached), _quickest(expectation, cached))
    return MeasuredSpeed(
        tokens_per_s=(tokens - 1) / median(run.phases.decode_s for run in runs),
        first_token_s=median(run.first_token_s for run in runs),
        prompt_tokens=prompt,
        picture=_PICTURE if sees else None,
        predicted_tokens_per_s=predicted,
    )


def speed_or_failure(
    backend: Backend, level: Level, expectation: Expectation, *, sees: bool
) -> tuple[MeasuredSpeed | None, Finding | None]:
    """``measure_speed``; or the finding that it failed, unless the requests themselves are at fault.

    Raises errors of requests that ask for what the engine was not started for (``UsageError``,
    ``DoesNotFit``).
    """
    try:
        return measure_speed(backend, level, expectation, sees=sees), None
    except Exception as error:
        if isinstance(error, VlfitError) and error.http_status < 500:
            raise
        if not isinstance(error, VlfitError):
            logger.exception("the speed measurement failed")
        if isinstance(error, ModelFailed):
            note = error.message
            failed = Finding(NOT_FINITE, Component.HEAD, "logits", SPEED_CONDITION, Likely.KERNEL, note)
        else:
            failed = failure(error, Component.SPEED, SPEED_STAGE, SPEED_CONDITION)
        return None, with_way_around(failed)


def add_failure(report: CheckReport, failed: Finding | None) -> None:
    """Add to ``report`` that the speed measurement ``failed`` before its checks; None: it did not.

    What the checks compared comes first, as that says where; NaN and infinity are reported there alone. After
    it comes what failed, in the order of time, each error once.
    """
    if failed is None or (failed.code == NOT_FINITE and not report.ok):
        return
    later = [each for each in report.findings if (each.code, each.note) != (failed.code, failed.note)]
    compared = [each for each in later if each.code not in (DEVICE_FAILED, CHECK_FAILED)]
    report.findings = [*compared, failed, *(each for each in later if each not in compared)]


def _quickest(expectation: Expectation, cached: int) -> float:
    """As far above what is expected as the slowest is below it."""
    assert expectation.expected is not None
    assert expectation.slowest is not None
    expected, slowest = expectation.expected.step(cached), expectation.slowest.step(cached)
    return slowest / (expected * expected)


def verify(
    checkpoint: Checkpoint,
    options: EngineOptions,
    level: Level,
    load: Callable[[EngineOptions], Backend],
    promise: Callable[[Backend], tuple[tuple[Row, ...], Expectation]],
    machine: dict[str, str],
    versions: dict[str, str],
    on_progress: ProgressOfChecks | None = None,
) -> VerifyResult:
    """Check ``checkpoint`` with ``options``, and measure what the plan promised.

    ``load``: starts the engine as users do. ``promise``: its ledger lines with planned and held bytes, and
    what the plan expects. ``machine``, ``versions``: for the report. Raises what loading raises; an error of
    the speed measurement is a finding.
    """
    began = time.perf_counter()
    with load(options) as backend:
        rows, expectation = promise(backend)
        sees = checkpoint.config.vision is not None
        speed, failed = speed_or_failure(backend, level, expectation, sees=sees)
        if failed is None or failed.code != DEVICE_FAILED:
            rows, expectation = promise(backend)  # after its first requests
    try:
        report = check_engine(checkpoint, options, level, on_progress)
    except Exception as error:
        if failed is None:
            raise
        why = str(error).strip().partition("\n")[0]
        report = CheckReport(level, skipped=[SkippedCheck("everything after speed", why)])
    add_failure(report, failed)
    return VerifyResult(
        checkpoint.name,
        checkpoint.weights_format,
        machine,
        report,
        rows,
        "" if rows else expectation.no_lines_reason,
        speed,
        versions,
        time.perf_counter() - began,
        checkpoint.stored_format,
    )


def skipped_names(result: VerifyResult) -> Sequence[str]:
    """What was not checked, each once."""
    return tuple(dict.fromkeys(each.check for each in result.report.skipped))
