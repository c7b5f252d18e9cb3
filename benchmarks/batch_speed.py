"""How many pictures a second `vlfit batch` describes on this GPU, model by model.

    python -m benchmarks.batch_speed 2B-fp8 4B-fp8 8B-int4 --concurrency 8,32 --json FILE

Weights are random, of the true shapes: what is said is nonsense, and how long it takes is not. Pictures of
1024x768 in JPEG, all different, each described in ``--max-tokens``: the program is started as a person would,
and its own summary is told, without the time in which the model loads. Beside it: tokens of prompts and of
answers a second, of which a picture of that size has 768 and its question some twenty.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image, ImageFilter

from benchmarks.facts import card, commit, cpu_name
from benchmarks.measure import ROOT, environment
from benchmarks.random_weights import room_in_memory, write_random
from benchmarks.report import print_rows

SIZE = 1024, 768
GRAIN = 64  # pixels of the noise that a picture is enlarged from: some 100 KB as a file, as photos have


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="SIZE-FORMAT", help="2B-fp8, 4B-int4, ...")
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", default="8", help="requests at once, one line for each")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    facts = {"commit": commit(), "card": card() if options.device != "cpu" else "", "cpu": cpu_name()}
    print("; ".join(filter(None, facts.values())), flush=True)
    rows = [["model", "at once", "pictures/s", "tokens of prompts/s", "of answers/s", "tokens each"]]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="vlfit-batch-speed-", dir=room_in_memory()) as place:
        pictures = make_pictures(Path(place) / "pictures", options.pictures)
        for name in options.models:
            size, _, weights = name.partition("-")
            model = write_random(Path(place) / name, size, weights) if weights else size
            for at_once in options.concurrency.split(","):
                told = describe(model, pictures, at_once, options)
                results.append({"model": name, "at_once": int(at_once), **told})
                rows.append([name, at_once, *cells(told)])
    print_rows(rows)
    if options.json:
        options.json.write_text(json.dumps({"facts": facts, "results": results}, indent=1), "utf-8")


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


def describe(model: str | Path, pictures: Path, at_once: str, options: argparse.Namespace) -> dict[str, Any]:
    """What `vlfit batch --json` says of itself when all are done."""
    with tempfile.TemporaryDirectory(prefix="vlfit-batch-speed-") as folder:
        words = ["batch", str(pictures), "-o", f"{folder}/out.jsonl", "--model", str(model), "--json"]
        words += ["--max-tokens", str(options.max_tokens), "--concurrency", at_once]
        words += ["--device", options.device]
        done = subprocess.run(
            [sys.executable, "-m", "vlfit", *words],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment(TOKENIZERS_PARALLELISM="false"),
            check=False,
        )
    if done.returncode:
        sys.exit(f"vlfit {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def cells(told: dict[str, Any]) -> list[str]:
    """Of one line of the table."""
    seconds, done = told["seconds"], told["done"]
    prompts, answers = told["prompt_tokens"], told["completion_tokens"]
    return [
        f"{done / seconds:.1f}",
        f"{prompts / seconds:,.0f}",
        f"{answers / seconds:,.0f}",
        f"{answers / done:.0f}",
    ]


if __name__ == "__main__":
    main()
