"""Draw the held-out questions: scenes of seeds and in sizes that training never draws.

    python -m training.mini.draw_held_out                    draws held_out.zip anew from the materials
    python -m training.mini.draw_held_out --seed 7 --out mine.zip

Also unseen in training: the words (lettering.held_out_words), the photos (scikit-image's, fetched through
pip, or those of --photos), and for one topic the whole style of drawing (Twemoji).
"""

import argparse
import io
import itertools
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image

from training.mini import clips, lettering, manners, several, texts
from training.mini.arguments import file_to_write, folder_with
from training.mini.arrange import arrange
from training.mini.atlas import MATERIALS, Atlas, pack, to_photo
from training.mini.charts import HIGHEST
from training.mini.held_out import SHIPPED, Dialogue, HeldOut, write
from training.mini.lots import SceneDrawer, draw_scene
from training.mini.quotas import CLIPS, FOLLOW_UPS, PHOTOS, SEVERAL, RemainingQuota, all_names, quotas
from training.mini.render import Renderer, to_numbers
from training.mini.scenes import Scene
from training.mini.teller import Exchange, Teller, as_typed

# Sizes people's pictures have, 128 to 448 pixels; none is a multiple of what training draws, so that all of
# them pass through a resize.
SIZES = (
    (300, 300), (330, 250), (250, 330), (390, 250), (400, 300), (300, 400), (430, 330), (270, 270),
    (440, 225), (225, 440), (180, 180), (360, 200), (200, 360), (150, 150), (134, 200), (210, 140),
    (446, 446), (350, 290), (130, 130),
)  # fmt: skip
SMALL_SIZES = ((200, 200), (220, 180), (180, 220), (250, 190), (210, 260), (170, 170))
FRAME_SIZES = ((180, 180), (220, 165), (165, 220))
PER_PICTURE, LEAST_PER_PICTURE, PER_SET, PER_CLIP = 12, 5, 4, 4
# So many scenes in vain, and from then on pictures are taken that answer less; after so many more something
# is amiss.
PATIENCE, DESPAIR = 500, 20_000
# Which sorts of scene offer a topic (the first word of its slots), and which offer the others.
SORTS: dict[str, tuple[str, ...]] = {
    "chart": ("chart",), "written": ("written",), "number": ("written",), "name": ("few", "few", "single"),
    "count": ("group",), "group": ("few",), "unanswerable": ("few", "single", "empty"),
    "kind,": ("chart", "empty", "few"),
}  # fmt: skip
USUAL = ("single", "few", "few", "few", "many", "group", "written")
# How many different words of each length can be met, and how many numbers.
WORDS_OF_LENGTH, NUMBERS = 60, 120
SHARE_WITH_SYSTEM = 0.08
QUALITY = 83
SCIKIT_IMAGE = "scikit-image==0.26.0"
PHOTO_FILES = (
    "astronaut.png", "hubble_deep_field.jpg", "rocket.jpg", "coffee.png", "chelsea.png", "camera.png",
    "brick.png", "grass.png", "gravel.png", "retina.jpg", "clock_motion.png",
)  # fmt: skip
LICENCES = """Pictures of mini's held-out questions, and whose work is in them

unseen-*   drawings of Twemoji, copyright Twitter, Inc and other contributors, CC BY 4.0
           (https://creativecommons.org/licenses/by/4.0/); turned, tinted and laid on backgrounds
photo-*, and photos behind things: from scikit-image (skimage/data). Astronaut (NASA) and Hubble deep field
           (NASA): public domain; rocket (SpaceX), clock (Stefan van der Walt): public domain; coffee (Rachel
           Michetti), chelsea (Stefan van der Walt), camera (Lav Varshney), brick, grass, gravel, retina
           (Mikael Haggstrom): CC0-1.0. With --photos, photos of another folder instead.
all others drawings of the training atlas: sources and licences stand in training/mini/README.md
The questions and the way the pictures are put together: vlfit, Apache-2.0.
"""


Choice = TypeVar("Choice")


class HeldOutDrawer:
    """Draws every part of the set. ``photos``: unseen ones as pictures, in the order of the atlas's."""

    def __init__(self, atlas: Atlas, unseen_style: Atlas, photos: list[Image.Image], seed: int) -> None:
        self.atlas = atlas
        self.unseen_style = unseen_style
        self.photos = photos
        self.renderer = Renderer(atlas, torch.device("cpu"))
        self.random = np.random.default_rng(seed)
        # Far below 2**30, where the seeds of training begin.
        self.numbers = itertools.count(1_000_000 * (1 + seed))

    def everything(self) -> Iterator[HeldOut]:
        """All parts, one after the other."""
        yield from self.drawn()
        yield from self.unseen()
        yield from self.real_photos()
        yield from self.several()
        yield from self.clips()
        yield from self.talk()

    def drawn(self) -> Iterator[HeldOut]:
        """Scenes with the questions they are kept for; some also with a dialogue."""
        wanted = RemainingQuota(quotas(all_names(self.atlas.names_of("sprite"))))
        follow_ups = FOLLOW_UPS
        for number, scene, found in self.worth_asking(wanted):
            dialogues: list[Dialogue] = [(self.typed(exchange),) for exchange in found]
            turns = texts.dialogue(scene, self.random) if follow_ups > 0 and scene.sort == "things" else []
            if len(turns) > 1:
                follow_ups -= len(turns)
                dialogues.append(tuple(Exchange("follow-up", t.question, t.answer) for t in turns))
            yield self.item(f"drawn-{number}", [self.jpeg(scene)], dialogues)

    def worth_asking(self, wanted: RemainingQuota) -> Iterator[tuple[int, Scene, list[Exchange]]]:
        """Scenes that answer several of the questions still wanted, until none is.

        Raises ``ValueError`` with what is missing if no scene offers it.
        """
        misses, least = 0, LEAST_PER_PICTURE
        while wanted.total:
            number = next(self.numbers)
            scene = self.scene_for(number, wanted)
            teller = Teller(scene, self.random)
            topics = self.shuffled([*list(texts.TOPICS) * 3, *["name"] * 10])
            asked = [texts.ask(teller, topic) for topic in topics]
            # The same answer to the same sort of question would be the same question in other words.
            unlike = {
                (exchange.topic, exchange.answer): exchange for exchange in asked if exchange is not None
            }
            found = wanted.select(unlike.values(), PER_PICTURE)
            if len(found) >= min(least, wanted.total):
                misses = 0
                yield number, scene, wanted.record(found)
                continue
            misses += 1
            if misses > DESPAIR:
                raise ValueError(f"no scene of {DESPAIR} offers what is still wanted: {wanted.left}")
            if misses % PATIENCE == 0:
                least = max(1, least - 1)

    def scene_for(self, number: int, wanted: RemainingQuota) -> Scene:
        """A scene of a sort that is likely to offer something wanted."""
        # The hundreds of names are one topic among others here.
        topic = self.pick(tuple(dict.fromkeys(slot.split()[0] for slot in wanted.left)))
        return draw_scene(number, self.pick(SIZES), self.atlas, sort=self.pick(SORTS.get(topic, USUAL)))

    def unseen(self) -> Iterator[HeldOut]:
        """One large thing each, in a style that no training saw."""
        renderer = Renderer(self.unseen_style, torch.device("cpu"))
        for name in all_names(self.unseen_style.names_of("sprite")):
            number, size = next(self.numbers), (161 + 2 * int(self.random.integers(30)),) * 2
            painter = SceneDrawer(np.random.default_rng(number), size, self.unseen_style)
            background = painter.background()
            while background.kind not in ("plain", "gradient"):
                background = painter.background()
            things = arrange(
                [painter.thing("sprite", set(background.names), name)], painter.random, size, True
            )
            scene = Scene(number, *size, background, tuple(things), finish=painter.finish())
            exchange = texts.ask(Teller(scene, self.random), "name")
            while exchange is None:
                exchange = texts.ask(Teller(scene, self.random), "name")
            asked = self.typed(Exchange("name, unseen style", exchange.question, exchange.answer))
            yield self.item(f"unseen-{number}", [self.jpeg(scene, renderer)], [(asked,)])

    def real_photos(self) -> Iterator[HeldOut]:
        """Crops of photos, in the photos' own pixels. Of them mini can tell colours and light, no more."""
        wanted = RemainingQuota(Counter(PHOTOS))
        renamed = {"caption": "photo", "detail": "photo", "photo facts": "photo", "garment": "photo limits"}
        while wanted.total:
            number = next(self.numbers)
            scene = draw_scene(number, self.pick(SIZES), self.atlas, sort="photo")
            if not _is_as_it_is(scene):
                continue
            teller = Teller(scene, self.random)
            asked = [texts.ask(teller, topic) for topic in self.shuffled([*renamed, "photo limits", "kind"])]
            told = [replace(e, topic=renamed.get(e.topic, e.topic)) for e in asked if e is not None]
            found = wanted.record(wanted.select(told, 3))
            yield self.item(f"photo-{number}", [self.cropped(scene)], [(self.typed(e),) for e in found])

    def several(self) -> Iterator[HeldOut]:
        """Two or three pictures in one prompt."""
        # A blurred look at a photo has captions that can be argued about.
        atlas, left = self.atlas.without_photos(), SEVERAL
        while left > 0:
            number = next(self.numbers)
            scenes = several.draw_several(number, self.pick(SMALL_SIZES), 2 + number % 2, atlas)
            exchanges = several.ask_several(scenes, self.random, PER_SET)[:left]
            left -= len(exchanges)
            pictures = [self.jpeg(scene) for scene in scenes]
            yield self.item(f"several-{number}", pictures, [(exchange,) for exchange in exchanges])

    def clips(self) -> Iterator[HeldOut]:
        """Short clips, 4 to 8 frames."""
        left = CLIPS
        while left > 0:
            number = next(self.numbers)
            clip = clips.draw_clip(number, self.pick(FRAME_SIZES), 4 + number % 5, self.atlas)
            told = {exchange.answer: exchange for exchange in clips.ask_clip(clip, self.random)}
            exchanges = self.shuffled(list(told.values()))[: min(left, PER_CLIP)]
            left -= len(exchanges)
            frames = [self.jpeg(scene) for scene in clip.frames]
            yield self.item(f"clip-{number}", frames, [(e,) for e in exchanges], is_clip=True)

    def talk(self) -> Iterator[HeldOut]:
        """Wordings that training never uses, half of them after a system prompt."""
        asked = [(Exchange("talk", e.question, e.answer),) for e in manners.HELD_OUT]
        yield HeldOut("talk", (), False, "", tuple(asked[::2]))
        for number, turns in enumerate(asked[1::2]):
            yield HeldOut(f"talk-{number}", (), False, self.pick(manners.SYSTEMS), (turns,))

    def item(
        self, name: str, pictures: list[bytes], dialogues: Sequence[Dialogue], is_clip: bool = False
    ) -> HeldOut:
        """An item, sometimes with a system prompt."""
        system = self.pick(manners.SYSTEMS) if self.random.random() < SHARE_WITH_SYSTEM else ""
        return HeldOut(name, tuple(pictures), is_clip, system, tuple(dialogues))

    def typed(self, exchange: Exchange) -> Exchange:
        """The question as people type it; the prompts of vlfit's own tasks stay as they are."""
        if exchange.question in texts.TASKS:
            return exchange
        return Exchange(exchange.topic, as_typed(exchange.question, self.random), exchange.answer)

    def jpeg(self, scene: Scene, renderer: Renderer | None = None) -> bytes:
        """The picture of a scene as a JPEG file."""
        pixels = (renderer or self.renderer).render(to_numbers([scene]), (scene.width, scene.height))[0]
        return to_jpeg(Image.fromarray(pixels.byte().permute(1, 2, 0).numpy()))

    def cropped(self, scene: Scene) -> bytes:
        """The part of the photo that a scene shows, from the photo itself: the atlas holds a small copy."""
        shown = scene.background.photo
        if shown is None or not _is_as_it_is(scene):
            raise ValueError("only a scene of one upright photo can be cut from that photo")
        whole = self.photos[shown.index]
        left, top, width, height = shown.crop
        edges = (
            left * whole.width,
            top * whole.height,
            (left + width) * whole.width,
            (top + height) * whole.height,
        )
        part = whole.resize((scene.width, scene.height), Image.Resampling.LANCZOS, box=edges)
        return to_jpeg(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if shown.flipped else part)

    def pick(self, choices: Sequence[Choice]) -> Choice:
        """One of the choices."""
        return choices[int(self.random.integers(len(choices)))]

    def shuffled(self, values: list[Choice]) -> list[Choice]:
        """In another order."""
        return [values[int(index)] for index in self.random.permutation(len(values))]


def _is_as_it_is(scene: Scene) -> bool:
    """Whether a scene shows a photo as a camera took it, neither turned nor mixed with another."""
    photo = scene.background.photo
    return photo is not None and not photo.turn and not photo.mix


def to_jpeg(picture: Image.Image) -> bytes:
    """A picture as the bytes of a JPEG file."""
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def unseen_words(path: Path, random: np.random.Generator) -> list[str]:
    """Words of every length that no training saw, in capitals mostly, and the numbers of signs and charts."""
    by_length: dict[int, list[str]] = {}
    for word in lettering.held_out_words(path):
        by_length.setdefault(len(word), []).append(word)
    chosen = [
        words[int(index)]
        for words in by_length.values()
        for index in random.permutation(len(words))[:WORDS_OF_LENGTH]
    ]
    cases = (str.upper, str.upper, str.upper, str.title, str.lower)
    cased = [cases[int(random.integers(len(cases)))](word) for word in chosen]
    drawn = [str(int(random.integers(10 ** int(random.integers(1, 4))))) for _ in range(NUMBERS)]
    # Charts need each of these, more than once so that not all of a chart is written by the same hand.
    on_bars = [str(number) for number in range(1, HIGHEST + 1)] * 3
    return [*cased, *drawn, *on_bars]


def fetch_photos() -> list[Image.Image]:
    """The photos inside scikit-image's wheel."""
    with tempfile.TemporaryDirectory() as folder:
        client = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
        subprocess.run((*client, "--dest", folder, SCIKIT_IMAGE), check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            files = [io.BytesIO(packed.read(f"skimage/data/{name}")) for name in PHOTO_FILES]
    return [Image.open(file).convert("RGB") for file in files]


def read_photos(folder: Path) -> list[Image.Image]:
    """All photos of a folder. Raises ``ValueError`` if it holds none."""
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp")
    ]
    if not paths:
        raise ValueError(f"{folder} holds no photos (.jpg, .png or .webp)")
    return [Image.open(path).convert("RGB") for path in paths]


def assemble(materials: Path, photos: list[Image.Image], seed: int) -> HeldOutDrawer:
    """The drawings of the materials with unseen words and photos in the place of those of training."""
    random = np.random.default_rng(seed)
    seen = Atlas.load(materials / "atlas.npz").without_words().without_photos()
    unseen = seen.plus(pack([], [to_photo(photo) for photo in photos]))
    texts_to_read = unseen_words(materials / "words.txt", random)
    words = lettering.letter(unseen, texts_to_read, lettering.fonts(materials / "fonts"), random)
    return HeldOutDrawer(words, Atlas.load(materials / "twemoji.npz"), photos, seed)


def materials_folder(text: str) -> Path:
    """A type of argparse: a folder with all that is drawn from."""
    try:
        return folder_with("atlas.npz", "twemoji.npz", "words.txt", "fonts/*.ttf")(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}: run python -m training.mini.prepare first") from error


def main(given: list[str] | None = None) -> int:
    """Draw a set; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m training.mini.draw_held_out",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed, another set (default: 0, the one that ships)"
    )
    parser.add_argument(
        "--out", type=file_to_write, default=SHIPPED, help="where to write it (default: beside this module)"
    )
    # As text, so that the folder is looked at where none is given, too: before the photos are fetched.
    parser.add_argument(
        "--materials",
        type=materials_folder,
        default=str(MATERIALS),
        help="what python -m training.mini.prepare made",
    )
    parser.add_argument(
        "--photos", type=Path, metavar="FOLDER", help="photos mini never saw, instead of scikit-image's"
    )
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    try:
        photos = read_photos(arguments.photos) if arguments.photos else fetch_photos()
        drawer = assemble(arguments.materials, photos, arguments.seed)
        count = write(arguments.out, drawer.everything(), LICENCES)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"draw_held_out: {error}") from error
    print(f"{count} questions in {arguments.out}, {arguments.out.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
