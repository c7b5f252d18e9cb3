"""``vlfit verify --backend``: another backend beside the reference, as far as its answers show.

Prompt tokens, log probabilities along its own greedy answers, picture sizes, boxes and words are compared.
Everything inside the model, which answers do not show, is listed as not checked.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from vlfit.api.conversation import Conversation, single_turn
from vlfit.api.outputs import Answer
from vlfit.api.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from vlfit.backends.base import Backend
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import InvalidRequest, RemoteError, UsageError, VlfitError
from vlfit.parity.failed_checks import failure
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
)
from vlfit.plan.actual import Row
from vlfit.verify.verify_run import MeasuredSpeed, VerifyResult, add_failure

if TYPE_CHECKING:
    from vlfit.parity.answers_beside import AnswersBeside
    from vlfit.parity.conditions import Answered, Conditions

logger = logging.getLogger(__name__)

ANSWER_TOKENS = {"quick": 8, "normal": 24, "full": 32}
TEXT, PICTURE, OTHER_PICTURE, CLIP = "text", "picture", "another picture", "clip"
_WAYS_AROUND = {
    "here": "leave --backend out: vlfit's own engine",
    "remote": "check that the server has these very files; else serve them here: vlfit serve MODEL",
}
_UNSEEN = "only vlfit's own engine shows it"
_INSIDE = (
    *("patches", "positions", "tower and layers one by one", "KV cache", "CUDA graphs", "preemption"),
    *("drafts", "sleep"),
)


def verify_backend(
    backend: Backend,
    checkpoint: Checkpoint,
    level: Level,
    machine: dict[str, str],
    versions: dict[str, str],
    *,
    dtype: str | None = None,
    rows: tuple[Row, ...] = (),
    speed: MeasuredSpeed | None = None,
    failed: Finding | None = None,
    on_progress: ProgressOfChecks | None = None,
) -> VerifyResult:
    """Compare what ``backend`` answers with the reference of ``checkpoint``, whose files are here.

    ``dtype``: that the backend computes in; None: 16 bits, as nobody says. ``machine``, ``versions``,
    ``rows``, ``speed``: for the report; ``failed``: the finding that measuring the speed failed. Raises the
    error of a first, plain question; of a backend in this process, that error is a finding, too.
    """
    from vlfit.parity.answers_beside import AnswersBeside, widest_dtype
    from vlfit.parity.stored_files import check_files
    from vlfit.parity.tolerances import Precision

    began = time.perf_counter()
    report = CheckReport(level)
    dtype = dtype or widest_dtype(checkpoint)
    way = _WAYS_AROUND["remote" if backend.kind == "remote" else "here"]
    precision = Precision(dtype, fp8_rows=checkpoint.weights_format == FP8 and dtype != "float32")
    run = _Run(backend, level, AnswersBeside(checkpoint, precision, report, way), report, on_progress)
    run.report.facts |= {"backend": backend.kind, "dtype": dtype}
    run.timed("files", lambda: check_files(checkpoint, report, hashes=level == "full"))
    run.timed("questions", lambda: run.ask_questions(checkpoint))
    if run.heard:
        run.timed("company", run.check_company)
    if level == "quick":
        run.skip("boxes and words", "not in a quick check")
    elif checkpoint.config.vision is not None and not run.lost:
        run.timed("scenes", lambda: run.check_scenes(checkpoint))
    for name in _INSIDE:
        run.skip(name, _UNSEEN)
    add_failure(report, failed)
    report.findings = [
        each if each.component is Component.FILE else replace(each, way_around=way)
        for each in report.findings
    ]
    seconds = time.perf_counter() - began
    report.seconds["all"] = seconds
    why = "" if rows else "only of models in this process it is known"
    return VerifyResult(
        checkpoint.name,
        checkpoint.weights_format,
        machine,
        report,
        rows,
        why,
        speed,
        versions,
        seconds,
        checkpoint.stored_format,
    )


class _Run:
    """One run: ``heard`` has the answers that the reference was compared with, by the question's name.

    ``lost``: the backend answered not even the first question.
    """

    def __init__(
        self,
        backend: Backend,
        level: Level,
        beside: "AnswersBeside",
        report: CheckReport,
        on_progress: ProgressOfChecks | None,
    ) -> None:
        self.backend, self.level, self.beside, self.report = backend, level, beside, report
        self.lost = False
        self.heard: dict[str, tuple[Conversation, Answered]] = {}
        self._on_progress = on_progress
        self._done = 0

    def timed(self, name: str, check: Callable[[], None]) -> None:
        """Run ``check`` and note its time."""
        if self._on_progress is not None:
            self._on_progress(CheckProgress(name, self._done, 3 if self.level == "quick" else 4))
        self._done += 1
        began = time.perf_counter()
        check()
        self.report.seconds[name] = time.perf_counter() - began

    def skip(self, check: str, why: str) -> None:
        self.report.skipped.append(SkippedCheck(check, why))

    def ask(self, conversation: Conversation, tokens: int | None = None) -> Answer:
        """A greedy answer with log probabilities; ``tokens``: of a longer one, without."""
        asked = SamplingParams(
            max_tokens=tokens or ANSWER_TOKENS[self.level],
            top_logprobs=MAX_TOP_LOGPROBS if tokens is None else None,
        )
        if tokens is not None:
            asked = self.backend.without_thinking(asked)
        return self.backend.stream(conversation, asked).answer()

    def asked(self, name: str, conversation: Conversation, tokens: int | None = None) -> Answer | None:
        """``ask``; None if that failed: what is not taken is listed, other errors are findings."""
        try:
            return self.ask(conversation, tokens)
        except (InvalidRequest, UsageError) as error:
            self.skip(name, str(error))
        except RemoteError as error:
            if error.status in (400, 413, 422):
                self.skip(name, str(error))
            else:
                self._failed(name, error)
        except Exception as error:
            self._failed(name, error)
        return None

    def _failed(self, name: str, error: Exception) -> None:
        if not isinstance(error, VlfitError):
            logger.exception("the question %r failed", name)
        self.report.findings.append(failure(error, Component.SCHEDULER, "answer", name, Likely.BACKEND))

    def ask_questions(self, checkpoint: Checkpoint) -> None:
        """A text, two pictures and a clip, each beside the reference."""
        from vlfit.parity.conditions import make_prompts
        from vlfit.parity.scenes import draw_clip, draw_scenes

        sees = checkpoint.config.vision is not None
        scenes = draw_scenes() if sees else {}
        pictures = (scenes["wide"].data, scenes["tall"].data) if sees else None
        prompts = make_prompts(pictures)
        try:
            answer = self.ask(prompts.repeating)
        except Exception as error:
            if self.backend.kind == "remote" or (isinstance(error, VlfitError) and error.http_status < 500):
                raise
            self._failed(TEXT, error)
            self.skip("everything after the first question", "it was not answered")
            self.lost = True
            return
        if not answer.logprobs:
            self.skip("log probabilities", "this backend sends none")
        text_agrees = self._compare(TEXT, prompts.repeating, answer, Component.HEAD)
        if not sees:
            return
        at_fault = Component.TOWER if text_agrees else Component.HEAD
        questions = [(PICTURE, prompts.first, at_fault), (OTHER_PICTURE, prompts.second, at_fault)]
        if checkpoint.config.video_token_id is not None and self.level != "quick":
            clip = single_turn("What moves in this clip?", draw_clip(3))
            questions.append((CLIP, clip, Component.PICTURES))
        for name, conversation, component in questions:
            found = self.asked(name, conversation)
            if found is not None:
                self._compare(name, conversation, found, component)

    def _compare(self, name: str, conversation: Conversation, answer: Answer, component: Component) -> bool:
        before = len(self.report.findings)
        heard = self.beside.compare(name, conversation, answer, component)
        self.heard[name] = conversation, heard
        if len(heard.tokens) < len(answer.logprobs):
            self.skip(f"{name} after token {len(heard.tokens)}", "its text is no token's or several tokens'")
        return len(self.report.findings) == before

    def check_company(self) -> None:
        """The same questions again, all at once: answers are those given alone, up to rounding."""
        conditions = self._conditions()
        asked = [(name, *pair) for name, pair in self.heard.items() if pair[1].tokens]
        with ThreadPoolExecutor(max(len(asked), 1)) as pool:
            again = list(pool.map(lambda each: self.asked(f"{each[0]}, again", each[1]), asked))
        for (name, _, alone), answer in zip(asked, again, strict=True):
            if answer is None:
                continue
            heard = self.beside.read(answer)
            tokens = min(len(alone.tokens), len(heard.tokens))
            heard.tokens, heard.likeliest = heard.tokens[:tokens], heard.likeliest[:tokens]
            condition = f"{name}, {len(asked)} at once"
            conditions.same(heard, alone, condition, Component.SCHEDULER, Likely.BACKEND, tokens)

    def _conditions(self) -> "Conditions":
        from vlfit.parity.conditions import Conditions, make_prompts

        return Conditions(self.report, make_prompts(None), ANSWER_TOKENS[self.level], self.beside.nats)

    def check_scenes(self, checkpoint: Checkpoint) -> None:
        """Boxes and words of a known checkpoint."""
        from vlfit.parity.run_checks import BOX_TOKENS, WORD_TOKENS, boxes_moved, words_differ
        from vlfit.parity.scenes import draw_scenes, known_answers, median_overlap

        known = known_answers(checkpoint)
        if known is None:
            self.skip("boxes and words", "no answers of this checkpoint are known")
            return
        scenes = draw_scenes()
        for name, least in known.overlaps.items():
            scene = scenes[name]
            answer = self.asked(f"boxes {name}", scene.conversation(tuple(scene.boxes)), BOX_TOKENS)
            if answer is None:
                continue
            found = median_overlap(answer.text, scene)
            self.report.facts[f"overlap_{name}"] = round(found, 4)
            self.report.measured.append(Measured("boxes", name, 1 - found, 1 - least, "1 - IoU"))
            if found < least:
                self.report.findings.append(boxes_moved(name, found, least, Likely.BACKEND))
        for each in known.words:
            answer = self.asked(f"words {each.picture}", each.conversation(), WORD_TOKENS)
            if answer is None:
                continue
            said = answer.text.strip()
            self.report.measured.append(
                Measured("words", each.picture, float(said != each.answer), 0.0, "differ")
            )
            if said != each.answer:
                self.report.findings.append(words_differ(each.picture, said, each.answer, Likely.BACKEND))
