"""What rounding costs a model: copies that `vlfit convert` makes, beside the checkpoint that they come from.

    python -m benchmarks.rounding [--questions 200] [--photos FOLDER] [--score 2000] [--json FILE]
    python -m benchmarks.rounding --copy "--weights int4 --group-size 64" --copy "--weights fp8"

For each copy: its bytes; the relative error of its weights, as the converter counted it; the cosine of the
features of pictures, rows and deepstack levels together (the mean, the worst picture, the worst single row);
and, along the answers that the original gives, how far the copy's words lie from the original's: the mean KL
divergence of the next word, and the share of words that would be another. Pictures are those of mini's
held-out questions, and those under ``--photos``. ``--score``: also the share of so many of those questions
that is answered right, the original's first. On the CPU, in float32: weights are compared, not kernels.

``--embedding int4`` is no option of ``vlfit convert``: the table is rounded so in groups of 32, and written
in 16 bits again, which is what its bytes are here. ``--kv-dtype fp8`` alone is the original itself with a KV
cache in FP8, and is asked no questions to be scored.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.facts import commit
from training.mini.asking import ask_all, parts_of
from training.mini.gates import OVERALL, summarize
from training.mini.held_out import SHIPPED, HeldOut, read, sample
from vlfit.api.conversation import Conversation, ImagePart, ask
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.headers import shard_files
from vlfit.checkpoint.source import open_checkpoint
from vlfit.checkpoint.tensors import is_embedding
from vlfit.engine.engine import NativeEngine
from vlfit.engine.sampling.sampler import StepOutput, select_tokens
from vlfit.engine.scheduling.sequence import ScheduledChunk
from vlfit.layers.linear import dequantize_int4
from vlfit.prompt.builder import Prompt
from vlfit.quantize.rounding import quantize_int

COPIES = (
    "--weights fp8",
    "--weights fp8 --embedding int8 --vision int8",
    "--weights int4",
    "--weights int4 --group-size 64",
    "--weights int4 --group-size 128",
    "--weights int4 --embedding int8",
    "--weights int4 --vision int8",
    "--weights int4 --group-size 128 --embedding int8 --vision int8",
)
ROUNDED_TABLE = "--embedding int4"
ROUNDED_CACHE = "--kv-dtype fp8"
HEADING = (
    "copy", "MB", "error of weights", "cosine of features", "worst picture", "worst row", "KL of a word",
    "other words", "right",
)  # fmt: skip
MOST_WORDS = 48
PHOTO_KINDS = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one copy is. ``errors``: by kind of layer; ``changed``: the share of words, of ``words``.

    ``worst_cosine`` is of a whole picture, ``worst_row`` of one row of features. ``score`` None: not asked.
    """

    copy: str
    bytes: int
    errors: dict[str, float]
    cosine: float
    worst_cosine: float
    worst_row: float
    divergence: float
    changed: float
    words: int
    score: float | None = None


class Watched:
    """An engine on the CPU whose scores can be read, and whose words can be decided by somebody else."""

    def __init__(self, folder: str, kv_dtype: str = "auto") -> None:
        checkpoint = open_checkpoint(folder)
        options = EngineOptions(
            device="cpu", dtype="float32", prefix_cache=False, speculate=False, kv_dtype=kv_dtype
        )
        self.engine = NativeEngine(checkpoint, options)

    def features(self, part: ImagePart) -> Tensor:
        """All that the tower makes of a picture: [rows of all levels, hidden]."""
        prompt = self._prompt(ask("", part))
        found = self.engine.runner.encode_image(prompt.images[0])
        return torch.cat([found.rows, *found.deepstack])

    def scores(self, conversation: Conversation, words: Tensor | None) -> Tensor:
        """Log-probabilities [words, vocabulary] along its own greedy answer, or along ``words`` if given."""
        engine, seen = self.engine, []
        forward = engine.runner.run

        def watching(batch: list[ScheduledChunk]) -> StepOutput:
            scores = forward(batch)
            if len(scores.logits):
                seen.append(F.log_softmax(scores.logits[0].float(), dim=0))
                if words is not None:
                    decided = torch.full_like(scores.logits, -1e4)
                    decided[0, words[len(seen) - 1]] = 0
                    scores = select_tokens(decided)
            return scores

        most = MOST_WORDS if words is None else len(words)
        sampling = SamplingParams(max_tokens=most, ignore_eos=words is not None)
        engine.runner.run = watching  # type: ignore[method-assign]
        try:
            engine.submit(
                engine.sequence(engine.prepare_prompt(self._prompt(conversation)), sampling, _raise)
            )
            while engine.busy:
                engine.step()
        finally:
            engine.runner.run = forward  # type: ignore[method-assign]
        return torch.stack(seen)

    def _prompt(self, conversation: Conversation) -> Prompt:
        return self.engine.prompts.build(conversation, max_image_tokens=None, context=self.engine.context)


def _raise(arrival: object) -> None:
    if isinstance(arrival, Exception):
        raise arrival


@dataclass(frozen=True, slots=True)
class Asked:
    """Questions with the original's scores along its answers, and pictures with the original's features."""

    questions: list[tuple[Conversation, Tensor]]
    pictures: list[tuple[ImagePart, Tensor]]


def ask_the_original(model: str, questions: int, photos: Path | None) -> Asked:
    original = Watched(model)
    items = sample([item for item in read(SHIPPED) if not item.is_clip], questions)
    conversations = [ask(item.dialogues[0][0].question, *parts_of(item)) for item in items]
    pictures = [part for item in items for part in parts_of(item) if isinstance(part, ImagePart)]
    if photos is not None:
        found = sorted(path for path in photos.rglob("*") if path.suffix.lower() in PHOTO_KINDS)
        pictures += [ImagePart(path.read_bytes(), path.name) for path in found]
    return Asked(
        [(conversation, original.scores(conversation, None)) for conversation in conversations],
        [(picture, original.features(picture)) for picture in pictures],
    )


def cost_of(copy: str, folder: str, errors: dict[str, float], asked: Asked) -> Cost:
    watched = Watched(folder, "fp8" if copy == ROUNDED_CACHE else "auto")
    features = [(watched.features(part), theirs) for part, theirs in asked.pictures]
    rows = [F.cosine_similarity(ours, theirs) for ours, theirs in features]
    whole = [F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) for ours, theirs in features]
    divergence, changed, words = 0.0, 0, 0
    for conversation, theirs in asked.questions:
        best = theirs.argmax(dim=1)
        ours = watched.scores(conversation, best)
        divergence += float((theirs.exp() * (theirs - ours)).sum())
        changed += int((ours.argmax(dim=1) != best).sum())
        words += len(best)
    return Cost(
        copy=copy,
        bytes=watched.engine.checkpoint.weight_bytes,
        errors=errors,
        cosine=float(torch.stack(whole).mean()),
        worst_cosine=float(torch.stack(whole).min()),
        worst_row=float(torch.cat(rows).min()),
        divergence=divergence / words,
        changed=changed / words,
        words=words,
    )


def score_of(folder: str, items: list[HeldOut]) -> float:
    """The share of the questions about ``items`` that is answered right."""
    return summarize(ask_all(folder, items, lambda _: None), sampled=True)[OVERALL].right


def made(model: str, copies: list[str]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Each copy: its options, the folder while it is there, and its errors by kind of layer."""
    for options in copies:
        if options == ROUNDED_CACHE:
            yield options, model, {"weights": 0.0}
            continue
        with tempfile.TemporaryDirectory() as root:
            out = str(Path(root) / "copy")
            asked = options.replace(ROUNDED_TABLE, "")
            command = [sys.executable, "-m", "vlfit", "convert", model, *shlex.split(asked)]
            done = subprocess.run([*command, "--out", out, "--json"], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{shlex.join(command)} failed: {done.stderr.strip()}")
            if asked != options:
                round_table(Path(out))
            yield options, out, json.loads(done.stdout)["relative_errors"]


def round_table(folder: Path, group: int = 32) -> None:
    """Round the embedding of the checkpoint in ``folder`` to int4 in groups, in place."""
    for file in shard_files(folder):
        tensors = load_file(file)
        for name in filter(is_embedding, tensors):
            packed, scale = quantize_int(tensors[name].float(), 4, group)
            tensors[name] = dequantize_int4(packed, scale, None, tensors[name].dtype)
        save_file(tensors, file, metadata={"format": "pt"})


def row(cost: Cost) -> str:
    low, high = min(cost.errors.values()), max(cost.errors.values())
    cells = [
        f"`{cost.copy}`",
        f"{cost.bytes / 1e6:.2f}",
        f"{low:.2%}-{high:.2%}",
        f"{cost.cosine:.5f}",
        f"{cost.worst_cosine:.5f}",
        f"{cost.worst_row:.5f}",
        f"{cost.divergence:.2e}",
        f"{cost.changed:.2%}",
        "not asked" if cost.score is None else f"{cost.score:.2%}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--copy", action="append", metavar="OPTIONS", help="of vlfit convert; repeatable")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--photos", type=Path, help="a folder: the features of its pictures are compared too")
    parser.add_argument("--score", type=int, default=0, metavar="N", help="ask N questions of each copy, too")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    options = parser.parse_args()
    asked = ask_the_original(options.model, options.questions, options.photos)
    words = sum(len(scores) for _, scores in asked.questions)
    print(f"commit {commit()}, {options.model}: {len(asked.pictures)} pictures, {words} words of answers")
    items = sample(read(SHIPPED), options.score) if options.score else []
    if items:
        print(f"{options.model} answers {score_of(options.model, items):.2%} of a sample right")
    print(f"| {' | '.join(HEADING)} |\n|{'---|' * len(HEADING)}")
    costs: list[dict[str, Any]] = []
    with torch.inference_mode():
        for copy in made(options.model, options.copy or list(COPIES)):
            cost = cost_of(*copy, asked)
            if items and cost.copy != ROUNDED_CACHE:
                cost = replace(cost, score=score_of(copy[1], items))
            print(row(cost), flush=True)
            costs.append(asdict(cost))
    if options.json:
        options.json.write_text(json.dumps(costs, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
