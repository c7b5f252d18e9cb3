"""Photos as scenes: a crop, its distortion, and what can truly be said of it.

Few photos of anything but clothes may be used, and of those mini only has to learn that it knows nothing but
their colours. So many are clothes made unrecognizable: details, turned, two in one.
"""

import numpy as np

from training.mini.atlas import Atlas
from training.mini.scenes import Background, Finish, Photo, Scene
from training.mini.vocabulary import COLOURS, colour_indices

# From this share of a photo on, along both sides, it still shows what it is a photo of.
WHOLE = 0.62
# A colour named in a photo covers at least this share of it; light and dark are means of 0-255.
LEAST_SHARE = 0.17
BRIGHT, DARK = 165.0, 85.0


def draw_photo(
    seed: int, size: tuple[int, int], random: np.random.Generator, atlas: Atlas, finish: Finish
) -> Scene:
    """A photo with its facts: as it is, a detail of it, or turned and with another one shining through."""
    unknown = atlas.photos_of.get("", [])
    draw = random.random()
    if unknown and draw < 0.25:
        index = unknown[int(random.random() * len(unknown))]
    else:
        index = int(random.random() * len(atlas.photos))
    flipped = bool(random.random() < 0.5)
    garment = ""
    if draw > 0.75:
        photo = Photo(index, crop(random, size, atlas.photo_aspects[index], 0.1, 0.28), flipped=flipped)
    elif draw > 0.45:
        photo = Photo(
            index,
            crop(random, size, atlas.photo_aspects[index], 0.3, 1.0),
            turn=90.0 * int(random.random() * 4),
            flipped=flipped,
            other=int(random.random() * len(atlas.photos)),
            mix=float(random.uniform(0.3, 0.5)),
        )
    else:
        part = crop(random, size, atlas.photo_aspects[index], 0.7, 1.0)
        photo = Photo(index, part if min(part[2:]) >= WHOLE else squeezed(random), flipped=flipped)
        garment = atlas.photo_labels[index]
    return Scene(
        seed, *size, Background("photo", photo=photo), (), sort="photo", facts=facts(atlas, photo),
        garment=garment, finish=finish,
    )  # fmt: skip


def draw_garment(seed: int, size: tuple[int, int], random: np.random.Generator, atlas: Atlas) -> Scene:
    """A piece of clothing, bent, mixed and miscoloured so that the few photos there are teach more.

    Its facts are unknown: they would be those of what it was before.
    """
    labels = sorted(label for label in atlas.photos_of if label)
    if not labels:
        return draw_photo(seed, size, random, atlas, Finish())
    # Half of the time every class alike, half as often as there are photos of it.
    if random.random() < 0.5:
        label = labels[int(random.integers(len(labels)))]
        of_it = atlas.photos_of[label]
    else:
        of_it = [index for name in labels for index in atlas.photos_of[name]]
    index = of_it[int(random.integers(len(of_it)))]
    mixed = random.random() < 0.5
    part = crop(random, size, atlas.photo_aspects[index], 0.55, 1.0, bend=0.25)
    if min(part[2:]) < WHOLE:
        part = squeezed(random)
    photo = Photo(
        index,
        part,
        turn=float(random.normal(0, 9)),
        flipped=bool(random.random() < 0.5),
        other=int(random.integers(len(atlas.photos))) if mixed else 0,
        mix=float(random.uniform(0.05, 0.35)) if mixed else 0.0,
    )
    finish = Finish(float(random.uniform(0.65, 1.3)), float(random.uniform(0.65, 1.35)), 3.0)
    background = Background("photo", photo=photo)
    return Scene(seed, *size, background, (), sort="photo", garment=atlas.photo_labels[index], finish=finish)


def photo_backdrop(size: tuple[int, int], random: np.random.Generator, atlas: Atlas) -> Background:
    """A photo, blurred or sharp, for things to lie on."""
    index = int(random.integers(len(atlas.photos)))
    blur = int(random.integers(0, 4))
    return Background(
        "photo", photo=Photo(index, crop(random, size, atlas.photo_aspects[index], 0.3, 1.0), blur)
    )


def crop(
    random: np.random.Generator, size: tuple[int, int], aspect: float, least: float, most: float,
    bend: float = 0.1,
) -> tuple[float, float, float, float]:  # fmt: skip
    """Left, top, width and height of a part that has about the shape of the picture.

    ``aspect``: that of the photo. The longer share lies between ``least`` and ``most``.
    """
    stretch = float(np.exp(random.uniform(-bend, bend)))
    ratio = size[0] / size[1] * stretch / aspect
    share = float(random.uniform(least, most))
    width, height = (share, share / ratio) if ratio >= 1 else (share * ratio, share)
    return (
        float(random.uniform(0, 1 - width)), float(random.uniform(0, 1 - height)), width, height,
    )  # fmt: skip


def squeezed(random: np.random.Generator) -> tuple[float, float, float, float]:
    """Nearly all of a photo, whatever the shape of the picture: a strip of it would show a sleeve."""
    width, height = (float(value) for value in random.uniform(0.7, 1.0, 2))
    return (float(random.uniform(0, 1 - width)), float(random.uniform(0, 1 - height)), width, height)


def facts(atlas: Atlas, photo: Photo) -> tuple[str, ...]:
    """Names of colours that cover enough of the crop, at most three, then how light it is."""
    side = atlas.photos.shape[1]
    left, top, width, height = (round(value * side) for value in photo.crop)
    part = (slice(top, top + max(3, height), 3), slice(left, left + max(3, width), 3))
    pixels = atlas.photos[photo.index][part]
    if photo.mix:
        pixels = (pixels * (1 - photo.mix) + atlas.photos[photo.other][part] * photo.mix).astype(np.uint8)
    shares = np.bincount(colour_indices(pixels).ravel(), minlength=len(COLOURS)) / pixels[..., 0].size
    order = np.argsort(-shares)[:3]
    names = list(COLOURS)
    found = [names[index] for rank, index in enumerate(order) if rank == 0 or shares[index] > LEAST_SHARE]
    light = float(pixels.mean())
    return (*found, "bright") if light > BRIGHT else (*found, "dark") if light < DARK else tuple(found)
