"""Pairs of pictures with one difference (a thing left out or recoloured), and that difference in words."""

from dataclasses import replace

import numpy as np

from training.mini.atlas import Atlas
from training.mini.lots import SceneDrawer
from training.mini.phrases import groups
from training.mini.scenes import Scene, Thing, count_of
from training.mini.vocabulary import UNCOUNTED, plural, with_article

SAME = "I see no difference."


def changed(scene: Scene, random: np.random.Generator, atlas: Atlas) -> Scene:
    """The scene with a thing less, or a shape in another colour, or at times as it was."""
    draw = random.random()
    things = list(scene.things)
    at = int(random.random() * len(things))
    if draw < 0.45 and len(things) > 1:
        del things[at]
    elif draw < 0.85 and things[at].kind == "shape":
        taken = {thing.colour for thing in things} | set(scene.background.names)
        painter = SceneDrawer(random, (scene.width, scene.height), atlas)
        colour, tint = painter.colour(taken)
        things[at] = replace(things[at], colour=colour, tint=tint)
    return replace(scene, things=tuple(things))


def difference(first: Scene, second: Scene) -> str:
    """What is different, in one sentence or two; empty where that would be a long story."""
    if first.sort != "things" or second.sort != "things":
        return ""
    gone = [thing for thing in first.things if thing not in second.things]
    new = [thing for thing in second.things if thing not in first.things]
    if not gone and not new:
        return SAME if first.background == second.background else ""
    if first.background == second.background and len(gone) == 1 and len(new) <= 1:
        return _recoloured(first, gone[0], new[0]) if new else _missing(first, second, gone[0])
    shown = [groups(scene) for scene in (first, second)]
    if any(len(found) > 1 or len(found[0]) > 1 or found[0][0].written for found in shown):
        return ""
    one, other = (with_article(found[0][0].label) for found in shown)
    if one == other:
        return ""
    return f"The first picture shows {one}, the second shows {other}."


def _missing(first: Scene, second: Scene, thing: Thing) -> str:
    """The second picture lacks a thing: the only one of its name, or one of several."""
    if thing.written:
        return f"The {thing.kind} is missing in the second picture."
    before, after = (count_of(scene, thing.name) for scene in (first, second))
    if before > 1 and thing.name not in UNCOUNTED:
        return f"The first picture shows {before} {plural(thing.name)}, the second shows {after}."
    return f"There is no {thing.label} in the second picture."


def _recoloured(first: Scene, before: Thing, after: Thing) -> str:
    """A shape has another colour in the second picture."""
    if before.name != after.name:
        return ""
    named = f"The {before.name}" if count_of(first, before.name) == 1 else f"One {before.name}"
    return f"{named} is {before.colour} in the first picture and {after.colour} in the second."
