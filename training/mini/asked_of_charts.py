"""Questions about a bar chart and their true answers. Every bar has its own colour and value."""

from training.mini.phrases import capital
from training.mini.teller import Answered, Teller


def chart(teller: Teller) -> Answered:
    """Values, the tallest and the shortest, how many bars, which of two is taller."""
    bars = teller.scene.things
    if teller.scene.sort != "chart":
        return None
    draw = teller.random.random()
    bar = bars[int(teller.random.random() * len(bars))]
    if draw < 0.4:
        question = teller.way("bar", NAME=bar.label, COLOUR=bar.colour)
        return question, f"The {bar.label} is {bar.value}."
    ordered = sorted(bars, key=lambda one: one.value)
    if draw < 0.7:
        most = teller.chance(0.5)
        word = (
            teller.pick("tallest", "highest", "largest")
            if most
            else teller.pick("shortest", "lowest", "smallest")
        )
        bar = ordered[-1] if most else ordered[0]
        question = teller.way("bar extreme", WORD=word)
        return question, f"The {bar.label} is the {word}, with {bar.value}."
    if draw < 0.82:
        question = teller.way("bars")
        return question, f"There are {len(bars)} bars."
    first, second = (bars[int(index)] for index in teller.random.permutation(len(bars))[:2])
    taller, lower = (first, second) if first.value > second.value else (second, first)
    question = teller.way(
        "taller", ONE=first.label, OTHER=second.label, COLOUR=first.colour, HUE=second.colour
    )
    yes = "Yes" if taller is first else "No"
    return question, f"{yes}, {taller.colour} is {taller.value} and {lower.colour} is {lower.value}."


def kind_of_picture(teller: Teller) -> Answered:
    """Whether this is a chart, a photo or a drawing."""
    kinds = {
        "chart": "a bar chart", "photo": "a photo", "things": "a drawing", "empty": "an empty picture",
        "screen": "a picture of text",
    }  # fmt: skip
    kind = kinds[teller.scene.sort]
    question = teller.way("kind")
    return question, capital(f"this is {kind}.")
