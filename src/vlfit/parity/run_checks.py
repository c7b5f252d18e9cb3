"""All checks of an installation, in the way of a request: files, words, one traced prompt, conditions,
scenes.

``quick``: the traced prompt with few tokens, and the conditions that need no third engine, with short
answers. ``normal``: all conditions and drawn scenes. ``full``: also every file's hash and more tokens.
"""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import KernelGroup, plain_groups
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.memory.usage import cpu_matrices_in
from vlfit.engine.scheduling.scheduler import LOOKAHEAD_TOKENS
from vlfit.errors import ModelFailed, VlfitError
from vlfit.kernels.cpu.library import vector_level
from vlfit.kernels.cpu.products import StoredWeight
from vlfit.layers.cpu_linear import HalfEmbedding, HalfLinear
from vlfit.parity.comparison import (
    DECODE,
    PREFILL,
    Comparison,
    Reference,
    compare_kv_rows,
    compare_request,
)
from vlfit.parity.conditions import Conditions, Prompts, answers, make_prompts
from vlfit.parity.engine_trace import EngineTrace, engine_trace
from vlfit.parity.failed_checks import LOST, device_answers, failure, is_device_failure
from vlfit.parity.findings import (
    CheckProgress,
    CheckReport,
    Component,
    Finding,
    Level,
    Likely,
    Measured,
    ProgressOfChecks,
    SkippedCheck,
    for_gguf,
    seen_without,
    with_way_around,
)
from vlfit.parity.scenes import KnownAnswers, draw_clip, draw_scenes, known_answers, median_overlap
from vlfit.parity.stored_files import check_end_tokens, check_files, check_tokenizer_and_template
from vlfit.parity.tolerances import Precision, Tolerance, difference

logger = logging.getLogger(__name__)

# Tokens of the traced answer, which the reference is forced along, and of each answer under a condition.
TRACED_TOKENS = {"quick": 8, "normal": 33, "full": 33}
ANSWER_TOKENS = {"quick": 6, "normal": 16, "full": 32}
# The second clip's last frame is repeated, as a step has two.
CLIP_FRAMES, CLIP_TOKENS = (2, 5), 4
CLIP_QUESTION = "What moves in these clips?"
CHUNK = 48  # tokens of a prompt at a time, where prompts are cut into chunks
BOX_TOKENS, WORD_TOKENS = 320, 48
_SHOWN = 300  # characters of an answer in a finding
# What an engine whose products of prompts round their inputs is compared in, and how far it may be off after
# all layers: rounding moves 28 layers by a tenth of the row, a wrong product by more than the row itself.
ROUNDED_STAGES, ROUNDED, MOST_ROUNDED = ("tower.merged", "logits"), "rounded inputs", 0.5


class EngineFactory(Protocol):
    """Builds an engine of the checkpoint with the user's options, but for ``changes`` (``EngineOptions``)."""

    def __call__(self, **changes: object) -> NativeEngine: ...


ReferenceFactory = Callable[[Checkpoint], Reference]


def float_reference(checkpoint: Checkpoint) -> Reference:
    """The reference that computes ``checkpoint`` in float32 on this machine's processor."""
    from vlfit.parity.reference.reference_run import FloatReference

    return FloatReference(checkpoint)


class _DeviceLost(Exception):
    """The device failed and no longer answers: no further check can be made. The finding is reported."""


@dataclass
class _Run:
    """One run of the checks: what it is for, and what it has found so far."""

    checkpoint: Checkpoint
    build: EngineFactory
    reference: Reference
    level: Level
    on_progress: ProgressOfChecks | None
    report: CheckReport = field(init=False)
    done: int = 0
    device: str = ""
    # Options of all engines but one, where prompts would round their inputs: beside that only gross errors
    # could be told.
    exactly: dict[str, object] = field(default_factory=dict)
    stages: dict[str, Tensor] = field(default_factory=dict)  # of ``ROUNDED_STAGES``, without rounded inputs

    def __post_init__(self) -> None:
        self.report = CheckReport(self.level)

    @property
    def total(self) -> int:
        """How many parts there are: scenes and clips need a tower, more engines another level than quick."""
        rounded = bool(self.exactly)
        if self.level == "quick":
            return 5 + rounded
        return 9 + rounded + 2 * (self.checkpoint.config.vision is not None)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the checks; an error of it is reported as a finding of that part.

        Raises ``_DeviceLost`` if nothing can be checked after it.
        """
        if self.on_progress is not None:
            self.on_progress(CheckProgress(name, self.done, self.total))
        began = time.perf_counter()
        try:
            yield
        except Exception as error:  # whatever ends a check is what it found
            if not isinstance(error, VlfitError):
                logger.exception("the check %r failed", name)
            self.fail(name, error)
        self.report.seconds[name] = self.report.seconds.get(name, 0.0) + time.perf_counter() - began
        self.done += 1

    def fail(self, name: str, error: Exception) -> None:
        """Report ``error``, which ended the part ``name``. Raises ``_DeviceLost`` as ``part`` does."""
        self.report.findings.append(failure(error, _component_of(name), name))
        if is_device_failure(error) and not device_answers(self.device):
            self.report.skipped.append(SkippedCheck(_after(name), LOST))
            raise _DeviceLost from error

    @contextmanager
    def engine(self, **changes: object) -> Iterator[NativeEngine]:
        """An engine with ``changes``, closed and freed afterwards: one at a time fits.

        Without rounded inputs, unless ``changes`` have a ``dtype``. Of a check that fails its own error is
        raised, not one of closing the engine after it.
        """
        engine = self.build(**{**self.exactly, **changes})
        if "dtype" not in changes and _rounds_inputs(engine):
            engine.close()
            del engine
            gc.collect()
            self.exactly = {"dtype": "float32"}
            engine = self.build(**{**self.exactly, **changes})
        self.device = str(engine.device)
        try:
            yield engine
        except BaseException:
            with suppress(Exception):
                engine.close()
            raise
        else:
            engine.close()
        finally:
            del engine
            gc.collect()


_PLAIN_ON_CPUS: frozenset[KernelGroup] = frozenset({"delta_net", "sampler", "tower"})


_LOADING, _TRACED = "loading", "prompt and decoding"
_NO_ANSWERS = "there is no answer to hold others to"


def _after(part: str) -> str:
    """The name of what is not checked if ``part`` ended the checks."""
    return f"everything after {part}"


def _component_of(part: str) -> Component:
    return _PARTS.get(part, Component.MEMORY)


_PARTS = {
    "files": Component.FILE,
    "words": Component.TEMPLATE,
    "sharing": Component.PREFIX_CACHE,
    "preemption": Component.SCHEDULER,
    "speculation": Component.SPECULATION,
    "graphs": Component.CUDA_GRAPHS,
    "FP8 KV": Component.KV_CACHE,
    "scenes": Component.BOXES,
    "clips": Component.PICTURES,
    "rounded inputs": Component.MLP,
}


def run_checks(
    engine_factory: EngineFactory,
    checkpoint: Checkpoint,
    level: Level = "normal",
    on_progress: ProgressOfChecks | None = None,
    *,
    reference_factory: ReferenceFactory = float_reference,
) -> CheckReport:
    """Check the engines that ``engine_factory`` builds from ``checkpoint``; nothing is raised for a finding.

    Call it on the thread that may own an engine, with no other engine on the device. ``on_progress``: called
    as each part begins. Raises what building the first engine raises (``DoesNotFit``, ``CheckpointError``);
    an error of the device is a finding, after which nothing is checked if it no longer answers.
    """
    began = time.perf_counter()
    run = _Run(checkpoint, engine_factory, reference_factory(checkpoint), level, on_progress)
    with run.part("files"):
        check_files(checkpoint, run.report, hashes=level == "full")
    sees = checkpoint.config.vision is not None
    scenes = draw_scenes() if sees else {}
    pictures = (scenes["wide"].data, _recoloured(scenes["wide"].data)) if sees else None
    plain: frozenset[KernelGroup] = frozenset()
    try:
        with run.engine(prefix_cache=False, speculate=False) as engine:
            plain = _plain_here(engine)
            conditions = _check_cold(run, engine, make_prompts(pictures))
            if conditions is not None and sees and level != "quick":
                with run.part("scenes"):
                    _check_scenes(run, engine)
                with run.part("clips"):
                    _check_clips(run, engine)
        if conditions is not None:
            _check_conditions(run, conditions)
            if run.exactly:
                with (
                    run.part("rounded inputs"),
                    run.engine(dtype="auto", prefix_cache=False, speculate=False) as engine,
                ):
                    _check_rounded(run, engine, engine_trace(engine, make_prompts(pictures).first, 2))
    except _DeviceLost:
        pass  # said in the report
    except Exception as error:  # of the first engine, which is built and closed outside of any part
        if not is_device_failure(error):
            raise
        with suppress(_DeviceLost):
            run.fail(_LOADING, error)
            run.report.skipped.append(SkippedCheck(_after(_LOADING), "the device failed"))
    findings = map(with_way_around, run.report.findings)
    run.report.findings = [seen_without(each, plain) for each in findings]
    if checkpoint.gguf is not None:
        run.report.findings = [for_gguf(each) for each in run.report.findings]
    run.report.seconds["all"] = time.perf_counter() - began
    return run.report


def _check_rounded(run: _Run, engine: NativeEngine, trace: EngineTrace) -> None:
    """Features and logits of a prompt whose products round their inputs, beside those that do not."""
    for stage, right in run.stages.items():
        seen = trace.stages.get(stage)
        comparable = seen is not None and seen.shape == right.shape
        apart = difference(seen, right).row if seen is not None and comparable else math.inf
        run.report.measured.append(Measured(stage, ROUNDED, apart, MOST_ROUNDED, "relative"))
        if not apart <= MOST_ROUNDED:
            component = Component.HEAD if stage == "logits" else Component.TOWER
            note = f"products of many rows by {vector_level()} differ from those in float32"
            run.report.findings.append(
                Finding(
                    "rounded_inputs_differ",
                    component,
                    stage,
                    ROUNDED,
                    Likely.KERNEL,
                    note,
                    apart,
                    MOST_ROUNDED,
                    "relative",
                    way_around="add --dtype float32",
                )
            )


def _rounds_inputs(engine: NativeEngine) -> bool:
    """Whether products of prompts round their inputs, as a CPU's do without a ``--dtype``."""
    matrices = cpu_matrices_in(engine.runner.models)
    return any(isinstance(each, StoredWeight) and each.input_roundoff >= 2.0**-8 for each in matrices)


def _check_conditions(run: _Run, conditions: Conditions) -> None:
    """Engines that share, draft, preempt and so on, beside the answers of the first."""
    level = run.level
    with (
        run.part("sharing"),
        run.engine(
            prefix_cache=True,
            # Requests that want log probabilities are not drafted for: one engine does for both.
            speculate=None if level == "quick" else False,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=8,
        ) as engine,
    ):
        conditions.check_sharing(engine)
        conditions.check_company(engine)
        if level == "quick":  # before sleep, which forgets the picture
            conditions.check_speculation(engine)
        for sleep_level in ("ram", "files"):
            conditions.check_sleep(engine, sleep_level)
    if level == "quick":
        run.report.skipped.append(
            SkippedCheck("preemption, graphs, FP8 KV, scenes, clips", "not in a quick check")
        )
    else:
        with run.part("speculation"), run.engine(speculate=None) as engine:
            conditions.check_speculation(engine)
        _check_more_engines(run, conditions)


def _plain_here(engine: NativeEngine) -> frozenset[KernelGroup]:
    """The groups of kernels that ``engine`` computes in PyTorch, as it was told or as on any CPU."""
    if engine.device.type != "cpu":
        return plain_groups(engine.options.kernels)
    return (
        plain_groups(engine.options.kernels) | _PLAIN_ON_CPUS if engine.cpu_stored else plain_groups("plain")
    )


def _check_cold(run: _Run, engine: NativeEngine, prompts: Prompts) -> Conditions | None:
    """The traced prompt beside the reference; then answers that other engines are held to.

    None: there are none, as the engine or the reference computed NaN or infinity, or the request failed.
    """
    report = run.report
    trace: EngineTrace | None = None
    nats: float | None = None
    ends: dict[int, str] = {}
    with run.part("words"):
        check_tokenizer_and_template(run.checkpoint, engine.prompts, report)
        ends = check_end_tokens(run.checkpoint, engine.prompts.tokenizer, report)
    with run.part(_TRACED):
        trace = engine_trace(engine, prompts.first, TRACED_TOKENS[run.level])
        comparison = Comparison(
            run.checkpoint, engine.prompts.tokenizer, run.reference, precision_of(engine), report, trace
        )
        if trace.error is None and len(trace.generated) != (asked := TRACED_TOKENS[run.level]):
            note = f"{len(trace.generated)} tokens were generated, {asked} were asked for"
            comparison.add(Finding("answer_cut", Component.STOP, "answer", "greedy", Likely.ENGINE, note))
        limit = compare_request(comparison, prompts.first, engine.image_limit)
        run.stages = {name: trace.stages[name] for name in ROUNDED_STAGES if name in trace.stages}
        if trace.error is not None:
            if report.ok:
                comparison.add(_no_numbers(trace, trace.error))
        elif math.isfinite(allowed := logprob_tolerance(trace, limit)):
            nats = allowed
        report.facts |= {
            "device": str(engine.device),
            "dtype": engine.account().settings.dtype,
            "cuda_graphs": engine.runner.decode_graphs is not None,
            "kernels": engine.options.kernels,
            "block_size": engine.options.block_size,
            "repeating_tokens": engine.prepare(prompts.repeating, SamplingParams(max_tokens=1)).prompt_tokens,
        }
        report.facts |= {"prompt_tokens": trace.prompt_tokens, "traced_tokens": len(trace.generated)}
    if nats is None:
        report.skipped.append(SkippedCheck(_after(_TRACED), _NO_ANSWERS))
        return None
    conditions = Conditions(report, prompts, ANSWER_TOKENS[run.level], nats, preempts=run.level != "quick")
    with run.part("answers"):
        conditions.baseline(engine)
        conditions.check_sampling(engine)
        conditions.check_end_of_turn(engine, tuple(ends))
    if not conditions.alone:
        report.skipped.append(SkippedCheck(_after("answers"), _NO_ANSWERS))
        return None
    return conditions


def _no_numbers(trace: EngineTrace, error: ModelFailed) -> Finding:
    """The finding that a request failed after a prompt, or a token, at which everything agrees."""
    done = len(trace.generated)
    component = Component.KV_CACHE if done else Component.HEAD
    stage, condition = (f"forced.{done - 1}", DECODE) if done else ("logits", PREFILL)
    return Finding("not_finite", component, stage, condition, Likely.KERNEL, error.message)


def _check_clips(run: _Run, engine: NativeEngine) -> None:
    """Two clips in one prompt beside the reference, as the traced prompt is: tower, positions, logits."""
    report = run.report
    if run.checkpoint.config.video_token_id is None:
        report.skipped.append(SkippedCheck("clips", "this model takes none"))
        return
    question = single_turn(CLIP_QUESTION, *(draw_clip(frames) for frames in CLIP_FRAMES))
    trace = engine_trace(engine, question, CLIP_TOKENS)
    of_clips = CheckReport(run.level)
    tokenizer = engine.prompts.tokenizer
    comparison = Comparison(run.checkpoint, tokenizer, run.reference, precision_of(engine), of_clips, trace)
    compare_request(comparison, question, engine.image_limit)
    if trace.error is not None and of_clips.ok:
        comparison.add(_no_numbers(trace, trace.error))
    condition = f"clips of {' and '.join(map(str, CLIP_FRAMES))} frames"
    report.findings += [
        replace(each, condition=f"{each.condition}, {condition}") for each in of_clips.findings
    ]
    report.measured += [
        replace(each, condition=f"{each.condition}, {condition}") for each in of_clips.measured
    ]


def precision_of(engine: NativeEngine) -> Precision:
    """What ``engine`` computes in."""
    settings = engine.account().settings
    quantized = engine.checkpoint.config.quantization is not None
    return Precision(
        settings.dtype,
        half_weights=quantized and settings.cpu_16_bit and _has_half_weights(engine),
        fp8_rows=engine.device.type == "cuda" and engine.checkpoint.weights_format == FP8,
        fp8_kv=settings.kv_dtype == FP8,
        products=_input_roundoff(engine.runner.models[0]),
        tower_products=_input_roundoff(engine.runner.models[1]),
    )


def _input_roundoff(model: object) -> float:
    """The largest roundoff of inputs among the products of ``model``; 0.0 without compiled ones."""
    matrices = cpu_matrices_in(model)
    return max((each.input_roundoff for each in matrices if isinstance(each, StoredWeight)), default=0.0)


def _has_half_weights(engine: NativeEngine) -> bool:
    """Whether a text layer or the head has weights that were rounded to float16."""
    owners = [*engine.runner.text.layers, engine.runner.text]
    return any(
        isinstance(part, HalfLinear | HalfEmbedding) for owner in owners for part in vars(owner).values()
    )


def logprob_tolerance(trace: EngineTrace, limit: Tolerance) -> float:
    """Nats by which rounding may move a log probability: twice what it may move a logit.

    ``limit``: tolerance of the logits. The log of their sum of exponentials may move as far as one of them.
    """
    logits = trace.stages["logits"]
    size = float(logits.square().mean().sqrt()) + float(logits.abs().max())
    return max(2 * limit.element * size, 1e-5)


def _check_more_engines(run: _Run, conditions: Conditions) -> None:
    report = run.report
    with run.part("preemption"):
        # Two prompts with the blocks that they are admitted with fill the KV cache: no answer can outgrow
        # them.
        block = int(report.facts.get("block_size") or 1)
        size = 2 * block * -(-(int(report.facts.get("repeating_tokens") or 1) + LOOKAHEAD_TOKENS) // block)
        with run.engine(
            prefix_cache=False, speculate=False, max_model_len=size, kv_tokens=size, max_num_seqs=2
        ) as engine:
            conditions.check_preemption(engine)
    with run.part("graphs"):
        if not report.facts.get("cuda_graphs"):
            report.skipped.append(SkippedCheck("CUDA graphs", "this engine runs without"))
        else:
            with run.engine(cuda_graphs=False, prefix_cache=False, speculate=False) as engine:
                conditions.check_graphs(engine)
    with (
        run.part("FP8 KV"),
        run.engine(kv_dtype=FP8, prefix_cache=False, speculate=False) as engine,
    ):
        trace = engine_trace(engine, conditions.prompts.first, 2)
        compare_kv_rows(
            Comparison(
                run.checkpoint, engine.prompts.tokenizer, run.reference, precision_of(engine), report, trace
            )
        )


def _check_scenes(run: _Run, engine: NativeEngine) -> None:
    """Hold pictures that EXIF turns to upright ones, and boxes to those that a known checkpoint finds."""
    report, scenes = run.report, draw_scenes()
    shapes = tuple(scenes["wide"].boxes)
    ask = SamplingParams(max_tokens=1)
    upright, turned = (
        engine.prepare(scenes[name].conversation(shapes), ask).prompt.images[0].pixels
        for name in ("wide", "wide_turned")
    )
    same = upright.shape == turned.shape and bool((upright == turned).all())
    report.measured.append(Measured("pixels", "turned by EXIF", float(not same), 0.0, "differ"))
    if not same:
        note = (
            f"{turned.shape[1]} x {turned.shape[2]} pixels, upright {upright.shape[1]} x {upright.shape[2]}"
        )
        report.findings.append(
            Finding("exif_ignored", Component.PICTURES, "pixels", "turned by EXIF", Likely.PROCESSOR, note)
        )
    known = known_answers(run.checkpoint)
    if known is None:
        report.skipped.append(SkippedCheck("boxes and words", "no answers of this checkpoint are known"))
        return
    for name, least in known.overlaps.items():
        text = _text(
            engine,
            answers(engine, [scenes[name].conversation(shapes)], SamplingParams(max_tokens=BOX_TOKENS))[
                0
            ].tokens,
        )
        found = median_overlap(text, scenes[name])
        report.facts[f"overlap_{name}"] = round(found, 4)
        report.measured.append(Measured("boxes", name, 1 - found, 1 - least, "1 - IoU"))
        if found < least:
            report.findings.append(boxes_moved(name, found, least, Likely.FILE))
    _check_words(run, engine, known)


def _check_words(run: _Run, engine: NativeEngine, known: KnownAnswers) -> None:
    """Words about the pictures that ship with vlfit are those that the known checkpoint says."""
    report = run.report
    ask = SamplingParams(max_tokens=WORD_TOKENS)
    for each in known.words:
        text = _text(engine, answers(engine, [each.conversation()], ask)[0].tokens).strip()
        report.measured.append(Measured("words", each.picture, float(text != each.answer), 0.0, "differ"))
        if text != each.answer:
            report.findings.append(words_differ(each.picture, text, each.answer, Likely.FILE))


def boxes_moved(scene: str, found: float, least: float, likely: Likely) -> Finding:
    """The finding that boxes of a known checkpoint overlap the true ones by ``found``, below ``least``.

    ``likely``: what is at fault. Where every step agrees with the reference it is a file that both read.
    """
    note = f"median overlap {found:.3f} with the truth, this checkpoint has {least:.3f} or more"
    return Finding(
        *("boxes_moved", Component.BOXES, "boxes", scene, likely, note),
        1 - found, 1 - least, "1 - IoU",
    )  # fmt: skip


def words_differ(picture: str, said: str, known: str, likely: Likely) -> Finding:
    """The finding that a known checkpoint ``said`` other words about ``picture`` than those ``known``.

    ``likely``: as of ``boxes_moved``.
    """
    note = f"{said[:_SHOWN]!r}, this checkpoint says {known!r}"
    return Finding("words_differ", Component.BOXES, "words", picture, likely, note)


def _text(engine: NativeEngine, tokens: list[int]) -> str:
    return str(engine.prompts.tokenizer.decode(tokens))


def _recoloured(data: bytes) -> bytes:
    """The same picture with other colours: equal size, other content."""
    import io

    from PIL import Image, ImageOps

    stream = io.BytesIO()
    ImageOps.invert(Image.open(io.BytesIO(data)).convert("RGB")).save(stream, "PNG")
    return stream.getvalue()
