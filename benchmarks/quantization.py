"""What quantization costs a model: copies that `vlfit convert` makes, against the checkpoint they come from.

    python -m benchmarks.quantization --json FILE                  mini, eight copies: some ten minutes
    python -m benchmarks.quantization --copy "--weights int4 --group-size 64" --copy "--weights fp8"
    python -m benchmarks.quantization --score 2000
    python -m benchmarks.quantization --copy "--weights fp8" --questions 4           to see it run

For each copy: its bytes; the relative error of its weights, as the converter reports it; the cosine of the
features of pictures, rows and deepstack levels together (the mean, the worst picture, the worst single row);
and along the original's answers the mean KL divergence of the next token, and the share of tokens that would
be another. Pictures are those of mini's held-out questions, and those under ``--photos``. ``--score``: also
the share of so many held-out questions that is answered right, the original's first. On the CPU in float32:
weights are compared, not kernels.

``--embedding int4`` is no option of `vlfit convert`: the table is quantized so in groups of 32 and stored in
16 bits again, which is what its bytes are here. ``--kv-dtype fp8`` alone is the original with a KV cache in
FP8; it gets no score.
"""

import json
import shlex
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

from benchmarks.harness import add_json_option, argument_parser, commit, print_row, run_module, write_json
from training.mini.asking import ask_all, parts_of
from training.mini.gates import OVERALL, summarize
from training.mini.held_out import SHIPPED, HeldOut, read, sample
from vlfit.api.conversation import Conversation, ImagePart, single_turn
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
INT4_EMBEDDING = "--embedding int4"
FP8_KV_CACHE = "--kv-dtype fp8"
HEADING = (
    "copy", "MB", "error of weights", "cosine of features", "worst picture", "worst row", "KL of a token",
    "other tokens", "right",
)  # fmt: skip
MAX_TOKENS = 48
PHOTO_KINDS = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True, slots=True)
class CopyQuality:
    """One copy against the original. ``errors``: of weights, by kind of layer.

    ``worst_cosine``: of a whole picture; ``worst_row``: of one row of features; ``changed``: the share of
    ``words`` (tokens) that would be another; ``score`` None: not measured.
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


class ProbedEngine:
    """An engine on the CPU whose logits can be read and whose tokens can be given."""

    def __init__(self, folder: str, kv_dtype: str = "auto") -> None:
        checkpoint = open_checkpoint(folder)
        options = EngineOptions(
            device="cpu", dtype="float32", prefix_cache=False, speculate=False, kv_dtype=kv_dtype
        )
        self.engine = NativeEngine(checkpoint, options)

    def features(self, part: ImagePart) -> Tensor:
        """Output of the vision tower: [rows of all levels, hidden]."""
        prompt = self._prompt(single_turn("", part))
        features = self.engine.runner.encode_image(prompt.images[0])
        return torch.cat([features.rows, *features.deepstack])

    def log_probs(self, conversation: Conversation, token_ids: Tensor | None) -> Tensor:
        """Log-probabilities [tokens, vocabulary] along the greedy answer, or along ``token_ids`` if given."""
        engine, rows = self.engine, []
        forward = engine.runner.run

        def probe(batch: list[ScheduledChunk]) -> StepOutput:
            output = forward(batch)
            if len(output.logits):
                rows.append(F.log_softmax(output.logits[0].float(), dim=0))
                if token_ids is not None:
                    forced = torch.full_like(output.logits, -1e4)
                    forced[0, token_ids[len(rows) - 1]] = 0
                    output = select_tokens(forced)
            return output

        most = MAX_TOKENS if token_ids is None else len(token_ids)
        sampling = SamplingParams(max_tokens=most, ignore_eos=token_ids is not None)
        engine.runner.run = probe  # type: ignore[method-assign]
        try:
            engine.submit(
                engine.make_sequence(engine.prepare_prompt(self._prompt(conversation)), sampling, _raise)
            )
            while engine.busy:
                engine.step()
        finally:
            engine.runner.run = forward  # type: ignore[method-assign]
        return torch.stack(rows)

    def _prompt(self, conversation: Conversation) -> Prompt:
        return self.engine.prompts.build(conversation, max_image_tokens=None, context=self.engine.context)


def _raise(arrival: object) -> None:
    if isinstance(arrival, Exception):
        raise arrival


@dataclass(frozen=True, slots=True)
class Reference:
    """Questions with the original's log-probabilities, and pictures with its features."""

    questions: list[tuple[Conversation, Tensor]]
    pictures: list[tuple[ImagePart, Tensor]]


def measure_original(model: str, questions: int, photos: Path | None) -> Reference:
    original = ProbedEngine(model)
    items = sample([item for item in read(SHIPPED) if not item.is_clip], questions)
    conversations = [single_turn(item.dialogues[0][0].question, *parts_of(item)) for item in items]
    pictures = [part for item in items for part in parts_of(item) if isinstance(part, ImagePart)]
    if photos is not None:
        files = sorted(path for path in photos.rglob("*") if path.suffix.lower() in PHOTO_KINDS)
        pictures += [ImagePart(path.read_bytes(), path.name) for path in files]
    return Reference(
        [(conversation, original.log_probs(conversation, None)) for conversation in conversations],
        [(picture, original.features(picture)) for picture in pictures],
    )


def measure_copy(copy: str, folder: str, errors: dict[str, float], reference: Reference) -> CopyQuality:
    engine = ProbedEngine(folder, "fp8" if copy == FP8_KV_CACHE else "auto")
    features = [(engine.features(part), theirs) for part, theirs in reference.pictures]
    rows = [F.cosine_similarity(ours, theirs) for ours, theirs in features]
    whole = [F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) for ours, theirs in features]
    divergence, changed, tokens = 0.0, 0, 0
    for conversation, theirs in reference.questions:
        best = theirs.argmax(dim=1)
        ours = engine.log_probs(conversation, best)
        divergence += float((theirs.exp() * (theirs - ours)).sum())
        changed += int((ours.argmax(dim=1) != best).sum())
        tokens += len(best)
    return CopyQuality(
        copy=copy,
        bytes=engine.engine.checkpoint.weight_bytes,
        errors=errors,
        cosine=float(torch.stack(whole).mean()),
        worst_cosine=float(torch.stack(whole).min()),
        worst_row=float(torch.cat(rows).min()),
        divergence=divergence / tokens,
        changed=changed / tokens,
        words=tokens,
    )


def score_of(folder: str, items: list[HeldOut]) -> float:
    """The share of the questions about ``items`` that is answered right."""
    return summarize(ask_all(folder, items, lambda _: None), sampled=True)[OVERALL].right


def make_copies(model: str, copies: list[str]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Each copy: its options, its folder (until the next one) and its errors by kind of layer."""
    for options in copies:
        if options == FP8_KV_CACHE:
            yield options, model, {"weights": 0.0}
            continue
        with tempfile.TemporaryDirectory() as root:
            out = str(Path(root) / "copy")
            converted = options.replace(INT4_EMBEDDING, "")
            done = run_module("vlfit", "convert", model, *shlex.split(converted), "--out", out, "--json")
            if done.returncode:
                sys.exit(f"vlfit convert {model} {converted} failed: {done.stderr.strip()}")
            if converted != options:
                quantize_embedding(Path(out))
            yield options, out, json.loads(done.stdout)["relative_errors"]


def quantize_embedding(folder: Path, group: int = 32) -> None:
    """Quantize the embedding of the checkpoint in ``folder`` to int4 and dequantize it again, in place."""
    for file in shard_files(folder):
        tensors = load_file(file)
        for name in filter(is_embedding, tensors):
            packed, scale = quantize_int(tensors[name].float(), 4, group)
            tensors[name] = dequantize_int4(packed, scale, None, tensors[name].dtype)
        save_file(tensors, file, metadata={"format": "pt"})


def cells(quality: CopyQuality) -> list[str]:
    low, high = min(quality.errors.values()), max(quality.errors.values())
    return [
        f"`{quality.copy}`",
        f"{quality.bytes / 1e6:.2f}",
        f"{low:.2%}-{high:.2%}",
        f"{quality.cosine:.5f}",
        f"{quality.worst_cosine:.5f}",
        f"{quality.worst_row:.5f}",
        f"{quality.divergence:.2e}",
        f"{quality.changed:.2%}",
        "not scored" if quality.score is None else f"{quality.score:.2%}",
    ]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--copy", action="append", metavar="OPTIONS", help="of vlfit convert; repeatable")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--photos", type=Path, help="a folder: the features of its pictures are compared too")
    parser.add_argument(
        "--score", type=int, default=0, metavar="N", help="also score each copy with N questions"
    )
    add_json_option(parser)
    options = parser.parse_args()
    reference = measure_original(options.model, options.questions, options.photos)
    tokens = sum(len(rows) for _, rows in reference.questions)
    print(
        f"commit {commit()}, {options.model}: {len(reference.pictures)} pictures, {tokens} tokens of answers"
    )
    items = sample(read(SHIPPED), options.score) if options.score else []
    if items:
        print(f"{options.model} answers {score_of(options.model, items):.2%} of a sample right")
    print_row(HEADING)
    print_row(["---"] * len(HEADING))
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        for copy in make_copies(options.model, options.copy or list(COPIES)):
            quality = measure_copy(*copy, reference)
            if items and quality.copy != FP8_KV_CACHE:
                quality = replace(quality, score=score_of(copy[1], items))
            print_row(cells(quality))
            results.append(asdict(quality))
            write_json(options.json, results)


if __name__ == "__main__":
    main()
