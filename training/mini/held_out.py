"""The held-out questions: pictures of seeds that training never draws, each with questions and true answers.

    python -m training.mini.held_out --seed 7 --out mine.zip       draws another set (needs the atlas)

The set that ships beside this file lets anyone score mini with nothing fetched.
Knows: what is asked how often, and the zip file it is kept in. Does not know: who answers.
"""

import argparse
import io
import json
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from training.mini.atlas import Atlas, stack_photos
from training.mini.lots import draw_scene
from training.mini.prepare import MATERIALS, read_photos
from training.mini.render import Renderer, to_numbers
from training.mini.scenes import Scene
from training.mini.texts import Exchange, Teller

SHIPPED = Path(__file__).with_name("held_out.zip")
# How many questions of each topic the set holds.
QUOTAS = {
    "colour": 70, "place": 70, "count": 80, "shape": 70, "name": 100, "is there": 50, "relation": 50,
    "written": 50, "background": 40, "caption": 80, "detail": 40, "grounding": 40, "analysis": 20,
}  # fmt: skip
# Sizes people's pictures have; none is what training draws, so all of them pass through a resize.
SIZES = (
    (300, 300),
    (320, 240),
    (240, 320),
    (384, 250),
    (400, 300),
    (512, 384),
    (600, 480),
    (460, 460),
    (600, 310),
)
PER_PICTURE = 5


@dataclass(frozen=True)
class HeldOut:
    """One picture (JPEG bytes) and the exchanges about it."""

    name: str
    picture: bytes
    exchanges: tuple[Exchange, ...]


def choose(atlas: Atlas, seed: int) -> Iterator[tuple[Scene, list[Exchange]]]:
    """Scenes with the questions they are kept for, until every quota is met."""
    left = Counter(QUOTAS)
    # Far below 2**30, where the seeds of training begin.
    number = 1_000_000 * (1 + seed)
    while left.total():
        number += 1
        random = np.random.default_rng(number)
        scene = draw_scene(number, SIZES[number % len(SIZES)], atlas)
        teller = Teller(scene, random)
        topics = [topic for topic, count in left.items() if count > 0]
        found: list[Exchange] = []
        for index in random.permutation(len(topics)):
            exchange = teller.ask(topics[int(index)])
            if exchange is not None and len(found) < PER_PICTURE:
                found.append(exchange)
        # A picture that answers little is not worth its bytes, until little is left to ask.
        if len(found) >= min(3, left.total(), len(topics)):
            left.subtract(exchange.topic for exchange in found)
            left = +left
            yield scene, [about_photo(exchange) for exchange in found] if scene.facts else found


def about_photo(exchange: Exchange) -> Exchange:
    """What is said about a photo is judged apart: it is computed from pixels, and shares can be close."""
    described = exchange.topic in ("caption", "detail")
    return Exchange("photo", exchange.question, exchange.answer) if described else exchange


def jpeg(pixels: torch.Tensor) -> bytes:
    """[3, height, width], 0-255, as a JPEG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels.byte().permute(1, 2, 0).numpy()).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write(path: Path, atlas: Atlas, seed: int) -> int:
    """Draw a set and write it; returns the number of questions."""
    torch.manual_seed(seed)
    renderer = Renderer(atlas, torch.device("cpu"))
    asked = []
    with zipfile.ZipFile(path, "w") as packed:
        for scene, exchanges in choose(atlas, seed):
            name = f"{scene.seed}.jpg"
            picture = renderer.render(to_numbers([scene]), (scene.width, scene.height))[0]
            packed.writestr(name, jpeg(picture))
            asked.append({"picture": name, "exchanges": [asdict(e) for e in exchanges]})
        packed.writestr("questions.json", json.dumps(asked, indent=1))
    return sum(len(entry["exchanges"]) for entry in asked)


def read(path: Path) -> list[HeldOut]:
    """What ``write`` wrote."""
    with zipfile.ZipFile(path) as packed:
        asked = json.loads(packed.read("questions.json"))
        return [
            HeldOut(
                entry["picture"],
                packed.read(entry["picture"]),
                tuple(Exchange(**e) for e in entry["exchanges"]),
            )
            for entry in asked
        ]


def main() -> int:
    """Draw a set; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument(
        "--photos", type=Path, help="photos mini never saw; without any, no photo is asked about"
    )
    arguments = parser.parse_args()
    path = MATERIALS / "atlas.npz"
    if not path.exists():
        raise SystemExit(f"{path} is missing: run python -m training.mini.prepare first")
    torch.set_num_threads(2)
    # The photos of training are neither unseen nor ours to pass on.
    atlas = replace(Atlas.load(path), photos=stack_photos(read_photos(arguments.photos, "", [])))
    count = write(arguments.out, atlas, arguments.seed)
    print(f"{count} questions in {arguments.out}, {arguments.out.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
