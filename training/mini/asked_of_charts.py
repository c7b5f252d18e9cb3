"""Questions about a bar chart, and the true answers. Every bar has its own colour and value."""

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
        question = teller.pick(
            f"What is the value of the {bar.label}?", f"How much is the {bar.label}?",
            f"What number does the {bar.label} show?", f"What is the value of {bar.colour}?",
        )  # fmt: skip
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
        question = teller.pick(f"Which bar is the {word}?", f"What colour is the {word} bar?")
        return question, f"The {bar.label} is the {word}, with {bar.value}."
    if draw < 0.82:
        question = teller.pick("How many bars are there?", "How many bars does the chart have?")
        return question, f"There are {len(bars)} bars."
    first, second = (bars[int(index)] for index in teller.random.permutation(len(bars))[:2])
    taller, lower = (first, second) if first.value > second.value else (second, first)
    question = f"Is the {first.label} taller than the {second.label}?"
    yes = "Yes" if taller is first else "No"
    return question, f"{yes}, {taller.colour} is {taller.value} and {lower.colour} is {lower.value}."


def kind_of_picture(teller: Teller) -> Answered:
    """Whether this is a chart, a photo or a drawing."""
    kinds = {"chart": "a bar chart", "photo": "a photo", "things": "a drawing", "empty": "an empty picture"}
    kind = kinds[teller.scene.sort]
    question = teller.pick(
        "What kind of picture is this?", "Is this a photo or a drawing?", "Is this a photo or a chart?"
    )
    return question, capital(f"this is {kind}.")
