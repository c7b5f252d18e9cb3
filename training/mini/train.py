r"""Train mini, or (``--family qwen3_5``) the second mini, from nothing or from what a mini has learnt.

    python -m training.mini.train --minutes 20 --out build/mini         on a GPU
    python -m training.mini.train --family qwen3_5 --start src/vlfit/mini --minutes 8 --out build/mini35
    python -m training.mini.train --family qwen3_5 --start src/vlfit/mini --teacher src/vlfit/mini \
        --device cpu --workers 1 --batch 16 --minutes 120 --out build/mini35            on two cores
    python -m training.mini.train --tiny --out build/tiny               two minutes on a CPU: it runs
    torchrun --nproc-per-node 4 -m training.mini.train ...              on several GPUs of one computer

A run that was stopped goes on from its last state (`--work`) and still ends after `--minutes` of training in
all.
"""

import argparse
import json
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from training.mini.arguments import folder_outside, folder_with, positive_number, whole_number
from training.mini.atlas import Atlas, built_in_atlas
from training.mini.card import TrainingRecord
from training.mini.data import Batch, Stream
from training.mini.export import TOKENIZER_FILES, export
from training.mini.inherit import take_over
from training.mini.lettering import letter, training_texts
from training.mini.loss import batch_loss
from training.mini.measure import Question, answer_questions, draft_agreement, question_plan
from training.mini.model import Model
from training.mini.muon import Muon
from training.mini.prepare import MATERIALS
from training.mini.render import Renderer
from training.mini.sequences import Words
from training.mini.shape import MINI35, QWEN3_5, QWEN3_VL, Shape
from training.mini.teacher import Taught, TaughtStream, Teacher, multiplies_bfloat16
from training.mini.team import Team
from training.mini.tokenizer import PACKAGE


@dataclass(frozen=True)
class TrainingPlan:
    """How to train. ``minutes``: training time over all calls; ``stop_after``: seconds of this call.

    ``materials``: where the atlas came from, for the card; None where it was built in. ``start``: the folder
    of the mini from which to take over what fits. ``see_share``: of the rate for a tower that was taken over.
    ``teacher``: the folder of a mini to learn from beside the truth, whose tower is kept as it was taken
    over. ``likeness``: how much it counts at first that the layers are like the teacher's.
    ``publish_every``: seconds between checkpoints written to ``out``. ``kept``: batches that may be seen
    again.
    """

    minutes: float
    out: Path
    work: Path
    stop_after: float = float("inf")
    batch: int = 256
    workers: int = 15
    rate: float = 3e-3
    decay: float = 0.05
    warm_up: int = 300
    cool_down: float = 0.4
    easy_until: float = 0.05
    measure_every: float = 240.0
    save_every: float = 60.0
    measure_each: int = 48
    seed: int = 1
    tokenizer: Path = PACKAGE
    compiled: bool = True
    most_steps: int = 1 << 60
    measured_tokens: int | None = None
    log_every: int = 100
    materials: Path | None = None
    start: Path | None = None
    see_share: float = 0.4
    teacher: Path | None = None
    likeness: float = 1.0
    publish_every: float = float("inf")
    kept: int = 400


# A clip is up to eight pictures: a smaller batch could hold none.
LEAST_BATCH = 8
# What the history of a run holds beside scores.
NO_TOPICS = frozenset({"minute", "step", "loss"})
# A team looks at the clock together once in so many steps.
CLOCK = 10
TINY = Shape(
    vision_depth=3, vision_hidden=64, vision_feed_forward=128, vision_heads=2, deepstack=(0, 1), depth=2,
    hidden=64, feed_forward=128, heads=2, kv_heads=1, head_dim=32, mrope_section=(6, 5, 5),
)  # fmt: skip
TINY35 = replace(
    MINI35, vision_depth=2, vision_hidden=64, vision_feed_forward=128, vision_heads=2, hidden=64,
    feed_forward=128, heads=2, kv_heads=1, linear_key_heads=1, linear_value_heads=2, linear_key_dim=32,
    linear_value_dim=32, mrope_section=(3, 3, 2), rotated=16,
)  # fmt: skip
SHAPES = {QWEN3_VL: Shape(), QWEN3_5: MINI35}
TINY_SHAPES = {QWEN3_VL: TINY, QWEN3_5: TINY35}
# Matrices that Muon leaves to AdamW.
UNTURNED = ("in_proj_a.weight", "in_proj_b.weight")
# Words and numbers that are drawn for a run.
TEXTS = 48_000


class Trainer:
    """One model, its optimizer, its running average and its clock."""

    def __init__(
        self,
        plan: TrainingPlan,
        shape: Shape,
        atlas: Atlas,
        processor: torch.device,
        team: Team | None = None,
    ) -> None:
        self.plan, self.shape, self.atlas, self.processor = plan, shape, atlas, processor
        self.team = team or Team()
        torch.manual_seed(plan.seed)
        self.model = Model(shape)
        self.before = take_over(self.model, plan.start) if plan.start else ""
        self.model.to(processor)
        self.average = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.renderer = Renderer(atlas, processor)
        self.teacher = Teacher(plan.teacher, self.renderer) if plan.teacher else None
        if self.teacher is not None:
            if not self.teacher.shares_tower(self.model):
                raise ValueError(f"{plan.teacher} has another tower than the model that is to learn from it")
            self.model.model.visual.requires_grad_(False)
            self.model.model.visual.merger.requires_grad_(True)
        self.optimizers = self._optimizers()
        self.step, self.elapsed, self.loss, self.replayed = 0, 0.0, float("nan"), 0
        self.first_loss = float("nan")
        self.left_out = 0
        self.pictures: int | None = 0
        self.history: list[dict[str, object]] = []
        self.ease = torch.ones(()).share_memory_()
        tokenizer = str(plan.tokenizer / "tokenizer.json")
        self.words = Words(tokenizer, shape.is_hybrid)
        self.tokenizer = Tokenizer.from_file(tokenizer)
        self.questions: dict[int, list[tuple[list[Question], int]]] = {}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices inside the layers, AdamW for embeddings, norms and biases."""
        inner: dict[bool, list[torch.nn.Parameter]] = {False: [], True: []}
        outer: list[torch.nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            # The rows that decide how long states last are few, and no directions.
            if parameter.ndim == 2 and "embed" not in name and not name.endswith(UNTURNED):
                inner[self.plan.start is not None and "visual" in name].append(parameter)
            else:
                outer.append(parameter)
        fused = self.processor.type == "cuda"
        adam = torch.optim.AdamW(outer, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        turning = Muon(inner[False], decay=self.plan.decay)
        if inner[True]:
            turning.add_param_group({"params": inner[True], "share": self.plan.see_share})
        return [turning, adam]

    @property
    def progress(self) -> float:
        """From 0 to 1 over the training time (or the steps, where those are limited)."""
        return min(1.0, max(self.elapsed / (self.plan.minutes * 60), self.step / self.plan.most_steps))

    def rate(self) -> float:
        """Linear warm-up, a plateau, then a straight line to zero over the last part."""
        left = (1 - self.progress) / self.plan.cool_down
        return self.plan.rate * min(1.0, (self.step + 1) / self.plan.warm_up, max(left, 0.0))

    def run(self) -> None:
        """Train until the time of this call, or all time, is over; then save and export."""
        plan = self.plan
        self.resume()
        self.set_ease()
        if plan.compiled:
            drafting = [] if self.model.mtp is None else list(self.model.mtp.layers)
            body = self.model.model
            for block in [*body.visual.blocks, *body.language_model.layers, *drafting]:
                # Of gated delta nets there is more to compile: once for all sizes, so, in place of thrice.
                block.compile(dynamic=True if self.shape.is_hybrid else None)
            # Drawing is many small steps over large pictures: fused, they cost a fraction.
            self.renderer.draw = torch.compile(self.renderer.draw, dynamic=True)  # type: ignore[method-assign]
        # Another seed after each resumption, so that no scene is met twice.
        stream = Stream(
            plan.seed * 1000 + self.step,
            plan.batch,
            self.atlas,
            str(plan.tokenizer / "tokenizer.json"),
            self.ease,
            self.team.rank,
            self.shape.is_hybrid,
        )
        lessons: torch.utils.data.IterableDataset[Any] = stream
        # A GPU belongs to this process; on a CPU others can look and read meanwhile.
        taught_before = self.teacher is not None and self.processor.type == "cpu"
        if self.teacher is not None and taught_before:
            lessons = TaughtStream(stream, self.teacher)
        loader = torch.utils.data.DataLoader(
            lessons, batch_size=None, num_workers=plan.workers, prefetch_factor=3 if plan.workers else None
        )
        started, before = time.monotonic(), self.elapsed
        saved = measured = published = started
        logged = self.step // plan.log_every
        kept: deque[tuple[Batch, Taught | None]] = deque(maxlen=plan.kept)
        batches = iter(loader)
        while True:
            asked = time.monotonic()
            batch, taught = next(batches) if taught_before else (next(batches), None)
            if self.teacher is not None and taught is None:
                taught = self.teacher.teach(batch)
            waited = time.monotonic() - asked
            self.train_step(batch, taught)
            # A processor that had to wait for fresh scenes sees an older batch again meanwhile; in a team
            # all must take the same steps.
            if self.team.size == 1 and waited > 0.01 and len(kept) > plan.kept // 4:
                self.replayed += 1
                old, told = kept[self.step % (plan.kept // 4)]
                self.train_step(replace(old, scale=1.0), told)
            kept.append((batch, taught))
            now = time.monotonic()
            if self.team.size == 1 or self.step % CLOCK == 0:
                self.elapsed = self.team.agree(before + now - started, self.processor)
                self.set_ease()
            if self.progress >= 1 or self.elapsed - before > plan.stop_after:
                break
            if not self.team.is_leader:
                continue
            if self.step // plan.log_every > logged or self.step <= 2:
                self.log(now - started)
                logged = self.step // plan.log_every
            if now - saved > plan.save_every:
                self.save()
                saved = now
            if now - measured > plan.measure_every:
                self.measure()
                measured = time.monotonic()
            if now - published > plan.publish_every:
                self.publish()
                published = time.monotonic()
        if self.team.is_leader:
            self.finish()

    def finish(self) -> None:
        """Save, score and write the checkpoint."""
        plan = self.plan
        print(f"step {self.step} is the last; scoring, then writing to {plan.out}", flush=True)
        if plan.publish_every < float("inf"):
            # Where time is short the weights come first, and the card with the scores after them.
            self.publish()
        self.save()
        self.measure()
        self.publish()
        state = {
            "step": self.step,
            "elapsed": self.elapsed,
            "minutes": plan.minutes,
            "pictures": self.pictures,
            "history": self.history,
        }
        (plan.out / "training.json").write_text(json.dumps(state, indent=1) + "\n")

    def publish(self) -> None:
        """Write the averaged weights as they are now as a checkpoint."""
        export(self.average, self.shape, self.plan.out, self.plan.tokenizer, self.making())

    def making(self) -> TrainingRecord:
        """What the card tells of this run."""
        shown = f", {self.pictures:,} pictures (one shown twice counts twice)" if self.pictures else ""
        measured = self.history[-1] if self.history else {}
        scores = {
            topic: value
            for topic, value in measured.items()
            if isinstance(value, float) and topic not in NO_TOPICS
        }
        return TrainingRecord(
            f"{self.before or 'Trained from nothing'}: {self.step:,} steps in {self.elapsed / 60:.1f} "
            f"minutes{shown}.",
            self.plan.materials,
            scores,
            self.plan.measure_each,
        )

    def set_ease(self) -> None:
        """Large single things first: they get the vision tower off the ground."""
        progress, until = self.progress, self.plan.easy_until
        self.ease.fill_(1 - 0.9 * progress / until if progress < until else 0.0)

    def likeness(self) -> float:
        """How much it counts now that the layers are like the teacher's: at the end nothing."""
        return self.plan.likeness * max(0.0, 1 - self.progress / (1 - self.plan.cool_down))

    def train_step(self, batch: Batch, taught: Taught | None = None) -> None:
        """One batch: draw the pictures, predict the answers, step.

        A batch that memory is too small for is left out, unless a team would then take different steps.
        """
        try:
            loss = batch_loss(
                self.model, self.renderer, batch, taught=taught, likeness=self.likeness() if taught else 0.0
            )
            loss.backward()
        except torch.OutOfMemoryError:
            if self.team.size > 1:
                raise
            self.left_out += 1
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            print(f"no memory for {len(batch.layout.tokens)} x {batch.layout.tokens.shape[1]}", flush=True)
            return
        self.team.average(self.model.parameters())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, share in zip(self.optimizers, (1.0, 0.6), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = self.rate() * share * group.get("share", 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.pictures is not None:
            self.pictures += self.plan.batch * self.team.size
        noted = self.step < 3 or self.progress >= 1
        if self.step % 10 == 0 or noted:
            # Over the last third of the steps, and never more than some 500.
            self._average(min(0.98, 1 - 30 / (self.step + 30)))
        if self.step % min(10, self.plan.log_every) == 0 or noted:
            self.loss = loss.item()
            self.first_loss = self.loss if self.step == 1 else self.first_loss

    @torch.no_grad()
    def _average(self, keep: float) -> None:
        state = self.model.state_dict()
        kept = list(self.average.values())
        torch._foreach_lerp_(kept, [state[name] for name in self.average], 1 - keep)

    def log(self, seconds: float) -> None:
        """One line of progress."""
        print(
            f"step {self.step} minute {self.elapsed / 60:.2f} loss {self.loss:.4f} rate {self.rate():.2e} "
            f"pictures/s {self.step_rate(seconds):.0f} replayed {self.replayed}",
            flush=True,
        )

    def step_rate(self, seconds: float) -> float:
        """Pictures per second of this call so far."""
        self._first_step = getattr(self, "_first_step", self.step)
        return (self.step - self._first_step) * self.plan.batch * self.team.size / max(seconds, 1e-9)

    def measure(self) -> None:
        """Score the averaged weights on held-out scenes and print the table."""
        model = Model(self.shape).to(self.processor)
        model.load_state_dict(self.average)
        with torch.autocast(self.processor.type, torch.bfloat16, enabled=multiplies_bfloat16(self.processor)):
            if self.plan.measure_each not in self.questions:
                plan = question_plan(self.atlas, self.plan.measure_each, self.plan.measured_tokens)
                self.questions[self.plan.measure_each] = plan
            questions = self.questions[self.plan.measure_each]
            scores = answer_questions(model, self.renderer, self.words, self.tokenizer.decode, questions)
            if model.mtp is not None:
                scores["draft"] = draft_agreement(model, self.renderer, self.atlas, self.words)
        self.history.append({"minute": self.elapsed / 60, "step": self.step, "loss": self.loss, **scores})
        print("held out: " + "  ".join(f"{topic} {value:.3f}" for topic, value in scores.items()), flush=True)

    def save(self) -> None:
        """Everything needed to go on."""
        self.plan.work.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "elapsed": self.elapsed,
            "history": self.history,
            "pictures": self.pictures,
        }
        torch.save(state, self.plan.work / "state.new")
        (self.plan.work / "state.new").rename(self.plan.work / "state.pt")

    def resume(self) -> None:
        """Go on from the last state, if there is one."""
        path = self.plan.work / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.processor)
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        self.step, self.elapsed, self.history = state["step"], state["elapsed"], state["history"]
        # Runs begun before pictures were counted do not know how many they were.
        self.pictures = state.get("pictures")
        print(f"going on at step {self.step}, minute {self.elapsed / 60:.2f}", flush=True)


def full_atlas(materials: Path, texts: int = TEXTS) -> Atlas:
    """The drawings of the materials, and so many words and numbers in the fonts that lie beside them."""
    path = materials / "atlas.npz"
    if not path.exists():
        raise SystemExit(f"{path} is missing: run python -m training.mini.prepare first")
    started = time.monotonic()
    random = np.random.default_rng(0)
    # Every small number in many faces: charts and signs are full of them.
    wanted = training_texts(random, texts) + [str(number) for number in range(100)] * 15
    atlas = letter(Atlas.load(path), wanted, sorted((materials / "fonts").glob("*.ttf")), random)
    print(f"{len(atlas.kinds)} drawings, {len(atlas.photos)} photos, {time.monotonic() - started:.0f} s")
    return atlas


def tiny(out: Path, steps: int = 30, shape: Shape = TINY, start: Path | None = None) -> Trainer:
    """A run of seconds on a CPU, with the drawings that need no download."""
    plan = TrainingPlan(
        10.0, out, out / "work", batch=8, workers=0, warm_up=5, rate=3e-3, measure_each=4, compiled=False,
        most_steps=steps, log_every=5, start=start,
    )  # fmt: skip
    trainer = Trainer(plan, shape, built_in_atlas(), torch.device("cpu"))
    trainer.run()
    return trainer


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m training.mini.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, number = parser.add_argument, positive_number
    add("--minutes", type=number, default=20.0, help="training time in all")
    add(
        "--measure-every",
        type=number,
        default=TrainingPlan.measure_every,
        metavar="SECONDS",
        help="how often to score",
    )
    add("--stop-after", type=number, default=float("inf"), metavar="SECONDS", help="seconds for this call")
    add(
        "--within", type=number, metavar="SECONDS",
        help="seconds for a run in one call with what comes before the first step (instead of --minutes)",
    )  # fmt: skip
    add("--out", type=folder_outside(PACKAGE), required=True, help="the checkpoint folder to write")
    add("--work", type=folder_outside(PACKAGE), help="where the resumable state lives (default: OUT/work)")
    add(
        "--tokenizer", type=folder_with(*TOKENIZER_FILES), default=PACKAGE,
        help="a folder that tokenizer.py wrote",
    )  # fmt: skip
    add("--workers", type=whole_number(0), default=15, help="processes that draw scenes by lot")
    add("--batch", type=whole_number(LEAST_BATCH), default=256, help="pictures a step of each GPU")
    add("--rate", type=number, default=TrainingPlan.rate, help="the highest learning rate")
    add("--family", choices=tuple(SHAPES), default=QWEN3_VL, help="whose architecture")
    add(
        "--start", type=folder_with("*.safetensors"),
        help="the mini whose tower and embedding are taken over as far as they fit",
    )  # fmt: skip
    add(
        "--teacher", type=folder_with("*.safetensors"),
        help="the mini to learn from beside the truth; the tower, which must be its, stays as it is",
    )  # fmt: skip
    add(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="a CPU takes hours for what a GPU does in minutes (default: cuda)",
    )  # fmt: skip
    add("--measure-each", type=whole_number(1), default=TrainingPlan.measure_each, help="questions a topic")
    add(
        "--measured-tokens", type=whole_number(1), help="no longer answers are waited for (default: by topic)"
    )
    add(
        "--publish-every", type=number, metavar="SECONDS", help="how often to write OUT (default: at the end)"
    )
    add("--texts", type=whole_number(1), default=TEXTS, help="words and numbers to draw")
    add("--tiny", action="store_true", help="a small model and a few steps on a CPU")
    add("--no-compile", action="store_true")
    return parser


def main(given: list[str] | None = None) -> int:
    """Train; returns the exit status."""
    begun = time.monotonic()
    arguments = parser().parse_args(given)
    if arguments.tiny:
        tiny(arguments.out, shape=TINY_SHAPES[arguments.family], start=arguments.start)
        return 0
    if arguments.teacher and (arguments.family != QWEN3_5 or not arguments.start):
        parser().error("argument --teacher: goes with --family qwen3_5 and a --start that has its tower")
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit(
            "no GPU: training mini takes one (or hours with --device cpu; --tiny only shows that it runs)"
        )
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.suppress_errors = True
    # Pictures come in many sizes; past this many variants a layer would quietly run uncompiled.
    torch._dynamo.config.recompile_limit = 64
    team = Team.join(arguments.device)
    plan = TrainingPlan(arguments.minutes, arguments.out, arguments.work or arguments.out / "work")
    plan = replace(
        plan, stop_after=arguments.stop_after, workers=arguments.workers, batch=arguments.batch,
        rate=arguments.rate, measure_every=arguments.measure_every,
        compiled=on_gpu and not arguments.no_compile, teacher=arguments.teacher,
        # Half of it is learnt already: no tower to get off the ground, no noise to wait for.
        easy_until=0.0 if arguments.teacher else TrainingPlan.easy_until,
        warm_up=60 if arguments.teacher else TrainingPlan.warm_up,
        log_every=TrainingPlan.log_every if on_gpu else 10, kept=TrainingPlan.kept if on_gpu else 80,
        tokenizer=arguments.tokenizer, materials=MATERIALS, start=arguments.start,
        measure_each=arguments.measure_each, measured_tokens=arguments.measured_tokens,
        publish_every=arguments.publish_every or float("inf"),
    )  # fmt: skip
    if team.is_leader:
        print(json.dumps({key: str(value) for key, value in asdict(plan).items()}), flush=True)
    processor = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    shape = SHAPES[arguments.family]
    atlas = full_atlas(MATERIALS, arguments.texts)
    if arguments.within:
        plan = replace(plan, minutes=max(arguments.within - (time.monotonic() - begun), 1) / 60)
    Trainer(plan, shape, atlas, processor, team).run()
    team.leave()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
