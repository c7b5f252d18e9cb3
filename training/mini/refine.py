"""Fine-tune a trained mini on any machine: its text half alone, or all of it.

    python -m training.mini.refine --start build/mini --sort photo --minutes 10 --out build/refined
    python -m training.mini.refine --start build/mini --see --workers 15 --batch 256 --out build/better

The vision tower stays as it is, so this mends what mini says, not what it can tell apart; with ``--see`` the
tower learns too. ``--sort`` names what to show more of; other scenes are shown too, lest they be forgotten.
Two CPU cores manage a few pictures a second, a GPU two thousand. A stopped run cannot go on.
"""

import argparse
import json
import time
from collections.abc import Iterator
from math import cos, pi
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from training.mini.arguments import folder_outside, folder_with, positive_number, whole_number
from training.mini.atlas import Atlas
from training.mini.card import TrainingRecord, previous_record
from training.mini.data import Batch, draw_form, long_batch, make_batch, one_batch
from training.mini.export import TOKENIZER_FILES, configuration, export, load
from training.mini.loss import batch_loss
from training.mini.lots import SORTS
from training.mini.model import Model
from training.mini.prepare import MATERIALS
from training.mini.render import Renderer
from training.mini.sequences import Words
from training.mini.shape import Shape
from training.mini.tokenizer import PACKAGE
from training.mini.train import LEAST_BATCH, full_atlas

# The share of scenes that are of the sort to be learnt, and of steps that are of any kind instead.
SHARE, OTHERS = 0.6, 0.25
TEXTS = 6000


class FineTuningBatches(torch.utils.data.IterableDataset[Batch]):
    """Endless batches, most with many scenes of one of ``sorts``; without ``sorts``, random ones."""

    def __init__(self, atlas: Atlas, words: Words, sorts: list[str], batch: int) -> None:
        self.atlas, self.words, self.sorts, self.batch = atlas, words, sorts, batch

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        if worker:
            torch.set_num_threads(1)
        random = np.random.default_rng((time.time_ns(), worker.id if worker else 0))
        while True:
            yield self.draw_batch(random)

    def draw_batch(self, random: np.random.Generator) -> Batch:
        """One batch."""
        atlas, words, batch = self.atlas, self.words, self.batch
        if not self.sorts or random.random() < OTHERS:
            return make_batch(int(random.integers(1 << 40)), batch, atlas, words, 0.0)
        sort = self.sorts[int(random.integers(len(self.sorts)))]
        if sort == "many":
            return long_batch(draw_form(random, kind="long"), random, batch, atlas, words)
        form = draw_form(random, kind="one")
        return one_batch(form, random, batch, atlas, words, sort=sort, share=SHARE)


def refine(
    model: Model, lessons: FineTuningBatches, seconds: float, rate: float, see: bool = False, workers: int = 0
) -> int:
    """Train ``model`` for ``seconds``, its vision tower only with ``see``; returns the number of steps."""
    processor = next(model.parameters()).device
    renderer = Renderer(lessons.atlas, processor)
    model.model.visual.requires_grad_(see)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    batches = iter(torch.utils.data.DataLoader(lessons, batch_size=None, num_workers=workers))
    started, steps, smooth = time.monotonic(), 0, 0.0
    while (elapsed := time.monotonic() - started) < seconds:
        optimizer.param_groups[0]["lr"] = rate * min(
            (steps + 1) / 10, 0.5 + 0.5 * cos(pi * elapsed / seconds)
        )
        loss = batch_loss(model, renderer, next(batches), learn_to_see=see)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        if steps == 1 or steps % 10 == 0:
            smooth = loss.item() if steps == 1 else 0.7 * smooth + 0.3 * loss.item()
            print(f"step {steps} minute {elapsed / 60:.1f} loss {smooth:.4f}", flush=True)
    return steps


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m training.mini.refine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--start", type=folder_with("*.safetensors", *TOKENIZER_FILES), required=True,
        help="the checkpoint folder to begin with",
    )  # fmt: skip
    add("--out", type=folder_outside(PACKAGE), required=True, help="the checkpoint folder to write")
    add(
        "--sort", choices=tuple(SORTS), action="append", default=[], dest="sorts", metavar="SORT",
        help=f"what to learn better (may be given several times; default: all): {', '.join(SORTS)}",
    )  # fmt: skip
    add("--minutes", type=positive_number, default=10.0)
    add("--batch", type=whole_number(LEAST_BATCH), default=16, help="pictures a step")
    add("--see", action="store_true", help="the vision tower learns too")
    add(
        "--workers", type=whole_number(0), default=0, help="processes that draw random scenes (default: none)"
    )
    add("--rate", type=positive_number, default=1e-4, help="the highest learning rate")
    return parser


def has_another_shape(path: Path) -> bool:
    """Whether the config.json of a model names other sizes than mini's; no if it cannot be read."""
    try:
        told = json.loads(path.read_text())
        return any(
            told[half][name] != size
            for half in ("text_config", "vision_config")
            for name, size in configuration(Shape())[half].items()
            if isinstance(size, int)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def begin_with(folder: Path) -> Model:
    """The model in ``folder``. Raises ``ValueError`` where its weights are not those of a mini."""
    if has_another_shape(folder / "config.json"):
        raise ValueError(
            f"the model in {folder} is of another shape than mini's (as those of train --tiny are), "
            "and only models of mini's shape can be refined"
        )
    try:
        return load(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch names every tensor that is at fault, some hundreds: the first show what is wrong.
        what = " ".join(str(error).split())
        raise ValueError(
            f"{folder} does not hold the weights of a mini as train writes them: {what[:200]}"
        ) from error


def main(given: list[str] | None = None) -> int:
    """Refine; returns the exit status."""
    arguments = parser().parse_args(given)
    processor = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = begin_with(arguments.start).to(processor)
    except ValueError as error:
        parser().error(f"argument --start: {error}")
    words = Words(str(arguments.start / "tokenizer.json"))
    lessons = FineTuningBatches(full_atlas(MATERIALS, TEXTS), words, arguments.sorts, arguments.batch)
    seconds = arguments.minutes * 60
    steps = refine(model, lessons, seconds, arguments.rate, arguments.see, arguments.workers)
    making = TrainingRecord(
        f"A model that had been trained was taught some more: {steps:,} steps of {arguments.batch} pictures "
        f"in {arguments.minutes:g} minutes, mostly of {', '.join(arguments.sorts) or 'all sorts'}, "
        f"{'all of it' if arguments.see else 'its text half only'}.",
        MATERIALS,
        before=previous_record(arguments.start),
    )
    export(model.state_dict(), model.shape, arguments.out, arguments.start, making)
    print(f"{steps} steps; written to {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
