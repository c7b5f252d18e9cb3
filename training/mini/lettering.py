"""Written words for a run: the texts, their drawings in many fonts, and the words that no run may see."""

import os
from collections.abc import Sequence
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Final, TypeVar
from zlib import crc32

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from training.mini.atlas import MATERIALS, SIDE, Atlas, Bytes, stack_photos

Choice = TypeVar("Choice")
WORDS_FILE: Final = MATERIALS / "words.txt"
FONTS_FOLDER: Final = MATERIALS / "fonts"
LONGEST: Final = 8
FONT_HEIGHT: Final = 96
# One word in this many is kept from every run, so that reading can be told from remembering.
HELD_OUT_ONE_IN: Final = 12
FROM_LIST, INVENTED = 0.55, 0.20  # the rest are numbers
UPPER, TITLE = 0.60, 0.20  # the rest are lower case
PRONOUNCEABLE = 0.6  # of the invented ones; the others are letters by lot
CONSONANTS: Final = "bcdfghjklmnprstvwz"
VOWELS: Final = "aeiou"
# Numbers are drawn below one of these, so that short ones are not rare.
NUMBER_LIMITS: Final = (10, 100, 100, 1000, 1000)
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
# Below this many texts, starting worker processes takes longer than drawing.
WORTH_WORKERS: Final = 1500
MOST_PROCESSES: Final = 16


def is_held_out(word: str) -> bool:
    """Whether no training text may be this word, in whatever case."""
    return crc32(word.upper().encode()) % HELD_OUT_ONE_IN == 0


@cache
def word_list(path: Path = WORDS_FILE) -> tuple[str, ...]:
    """All words, lower case, in the order of the file."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; `python -m training.mini.prepare` makes it")
    return tuple(path.read_text().split())


def held_out_words(path: Path = WORDS_FILE) -> list[str]:
    """The words, lower case, that ``training_texts`` never gives."""
    return [word for word in word_list(path) if is_held_out(word)]


def fonts(folder: Path = FONTS_FOLDER) -> list[Path]:
    """The fonts that prepare fetched."""
    found = sorted(folder.glob("*.ttf"))
    if not found:
        raise FileNotFoundError(f"{folder} holds no fonts; `python -m training.mini.prepare` fetches them")
    return found


def training_texts(random: np.random.Generator, count: int, path: Path = WORDS_FILE) -> list[str]:
    """Texts of at most ``LONGEST`` letters for the signs of a run, none of them held out."""
    words = [word for word in word_list(path) if not is_held_out(word)]
    texts = []
    for _ in range(count):
        lot = random.random()
        if lot < FROM_LIST:
            texts.append(_cased(_one_of(random, words), random))
        elif lot < FROM_LIST + INVENTED:
            texts.append(_cased(_invented(random), random))
        else:
            texts.append(str(random.integers(_one_of(random, NUMBER_LIMITS))))
    return texts


def _one_of(random: np.random.Generator, choices: Sequence[Choice]) -> Choice:
    return choices[int(random.integers(len(choices)))]


def _cased(word: str, random: np.random.Generator) -> str:
    lot = random.random()
    if lot < UPPER:
        return word.upper()
    return word.title() if lot < UPPER + TITLE else word


def _invented(random: np.random.Generator) -> str:
    """A string that is no word on purpose: it can only be read, not guessed."""
    while True:
        length = int(random.integers(2, LONGEST + 1))
        if random.random() < PRONOUNCEABLE:
            first = int(random.integers(2))
            word = "".join(
                _one_of(random, VOWELS if (place + first) % 2 else CONSONANTS) for place in range(length)
            )
        else:
            word = "".join(_one_of(random, LETTERS) for _ in range(length))
        if not is_held_out(word):
            return word


def letter(atlas: Atlas, texts: list[str], fonts: list[Path], random: np.random.Generator) -> Atlas:
    """The atlas with one more texture per text, each in a font chosen by lot.

    A text of digits is of kind "number", any other of kind "word"; the style is the font's file name. Each
    texture takes 64 KiB, so 20,000 of them take 1.3 GB. Raises ValueError without fonts or for an empty text.
    """
    if not fonts:
        raise ValueError("texts cannot be drawn without a font")
    if not all(text.strip() for text in texts):
        raise ValueError("a text to be drawn is empty")
    chosen = [_one_of(random, fonts) for _ in texts]
    masks, aspects = _draw_all(list(zip(texts, chosen, strict=True)))
    textures = np.full((len(texts), SIDE, SIDE, 4), 255, np.uint8)
    textures[..., 3] = masks
    lettered = Atlas(
        tuple("number" if text.isdigit() else "word" for text in texts),
        tuple(texts),
        tuple(aspects),
        tuple(path.stem for path in chosen),
        ("",) * len(texts),
        textures,
        stack_photos([]),
        (),
        (),
    )
    return atlas.plus(lettered)


def _draw_all(jobs: list[tuple[str, Path]]) -> tuple[Bytes, list[float]]:
    """Masks [count, SIDE, SIDE] and aspects, drawn by as many processes as it is worth."""
    masks = np.zeros((len(jobs), SIDE, SIDE), np.uint8)
    aspects: list[float] = []
    if len(jobs) < WORTH_WORKERS:
        drawn = map(_draw, jobs)
        for index, (mask, aspect) in enumerate(drawn):
            masks[index] = mask
            aspects.append(aspect)
        return masks, aspects
    # Spawned, not forked: the caller may hold threads and a GPU.
    with get_context("spawn").Pool(min(MOST_PROCESSES, os.cpu_count() or 1)) as pool:
        for index, (mask, aspect) in enumerate(pool.imap(_draw, jobs, chunksize=100)):
            masks[index] = mask
            aspects.append(aspect)
    return masks, aspects


def _draw(job: tuple[str, Path]) -> tuple[Bytes, float]:
    """One text's mask [SIDE, SIDE] and aspect. In one channel: four take three times as long."""
    text, path = job
    face = _face(path)
    left, top, right, bottom = face.getbbox(text)
    picture = Image.new("L", (round(right - left) + 8, round(bottom - top) + 8))
    ImageDraw.Draw(picture).text((4 - left, 4 - top), text, font=face, fill=255)
    box = picture.point(lambda shade: 255 if shade > 40 else 0).getbbox()
    if box is None:
        raise ValueError(f"{path.stem} draws nothing for {text!r}")
    cropped = picture.crop(box)
    mask = cropped.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return np.asarray(mask), cropped.width / cropped.height


@cache
def _face(path: Path) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), FONT_HEIGHT)
