"""Questions about a screenshot or a page of text, of which mini can say little."""

from training.mini.phrases import SCREEN_LIMIT
from training.mini.teller import Answered, Teller

# All else that is asked about such a picture would be answered by guessing.
TOPICS = frozenset({"caption", "detail", "analysis", "kind", "screen"})


def screen(teller: Teller) -> Answered:
    """Whatever is asked: that it is text too small to read."""
    if teller.scene.sort != "screen":
        return None
    return teller.way("screen"), SCREEN_LIMIT
