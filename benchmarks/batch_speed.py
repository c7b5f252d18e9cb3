"""Pictures a second that `vlfit batch` describes on this GPU, model by model.

    python -m benchmarks.batch_speed 2B-fp8 4B-fp8 8B-int4 --concurrency 8,32 --json FILE     minutes
    python -m benchmarks.batch_speed mini --device cpu --pictures 8 --max-tokens 8            to see it run

Weights are random, of the true shapes. Pictures are JPEGs of 1024x768, all different, each described in
``--max-tokens``. The program is started as a person would and its own summary is printed, without the time to
load the model; beside it tokens of prompts and of answers a second (such a picture has 768 tokens, its
question some twenty).
"""

import argparse
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image, ImageFilter

from benchmarks.checkpoints import checkpoint_of, ram_folder
from benchmarks.harness import (
    add_json_option,
    argument_parser,
    card,
    commit,
    cpu_name,
    print_table,
    run_vlfit,
    write_json,
)

SIZE = 1024, 768
GRAIN = 64  # pixels of the noise that a picture is enlarged from: some 100 KB as a file, as photos have


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("models", nargs="+", metavar="SIZE-FORMAT", help="2B-fp8, 4B-int4, ...")
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", default="8", help="requests at once, one line for each")
    parser.add_argument("--device", default="cuda")
    add_json_option(parser)
    options = parser.parse_args()
    facts = {"commit": commit(), "card": card() if options.device != "cpu" else "", "cpu": cpu_name()}
    print("; ".join(filter(None, facts.values())), flush=True)
    rows = [["model", "at once", "pictures/s", "tokens of prompts/s", "of answers/s", "tokens each"]]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="vlfit-batch-speed-", dir=ram_folder()) as folder:
        pictures = make_pictures(Path(folder) / "pictures", options.pictures)
        for name in options.models:
            checkpoint = checkpoint_of(name, Path(folder), random=True)
            for at_once in options.concurrency.split(","):
                summary = describe(checkpoint, pictures, at_once, options)
                results.append({"model": name, "at_once": int(at_once), **summary})
                rows.append([name, at_once, *cells(summary)])
                write_json(options.json, {"facts": facts, "results": results})
    print_table(rows)


def make_pictures(folder: Path, count: int) -> Path:
    """``count`` files, no two alike."""
    folder.mkdir()
    with ProcessPoolExecutor() as pool:
        list(
            pool.map(
                make_picture,
                (folder / f"{number:05}.jpg" for number in range(count)),
                range(count),
                chunksize=8,
            )
        )
    return folder


def make_picture(path: Path, number: int) -> None:
    chance = random.Random(number)
    small = Image.frombytes(
        "RGB", (SIZE[0] // GRAIN, SIZE[1] // GRAIN), chance.randbytes(SIZE[0] * SIZE[1] // GRAIN**2 * 3)
    )
    noise = Image.frombytes("L", SIZE, chance.randbytes(SIZE[0] * SIZE[1]))
    picture = small.resize(SIZE, Image.Resampling.BICUBIC)
    grain = noise.filter(ImageFilter.GaussianBlur(1)).convert("RGB")
    Image.blend(picture, grain, 0.15).save(path, quality=85)


def describe(checkpoint: Path, pictures: Path, at_once: str, options: argparse.Namespace) -> dict[str, Any]:
    """The summary of `vlfit batch --json`."""
    with tempfile.TemporaryDirectory(prefix="vlfit-batch-speed-") as folder:
        arguments = [str(pictures), "-o", f"{folder}/out.jsonl", "--model", str(checkpoint), "--json"]
        arguments += ["--max-tokens", str(options.max_tokens), "--concurrency", at_once]
        try:
            return run_vlfit("batch", *arguments, "--device", options.device)
        except RuntimeError as error:
            sys.exit(str(error)[-2000:])


def cells(summary: dict[str, Any]) -> list[str]:
    """Of one row of the table."""
    seconds, done = summary["seconds"], summary["done"]
    prompts, answers = summary["prompt_tokens"], summary["completion_tokens"]
    return [
        f"{done / seconds:.1f}",
        f"{prompts / seconds:,.0f}",
        f"{answers / seconds:,.0f}",
        f"{answers / done:.0f}",
    ]


if __name__ == "__main__":
    main()
