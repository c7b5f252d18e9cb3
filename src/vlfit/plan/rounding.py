"""What options of `vlfit convert` mean for the answers, in words. Knows the options; does not know sizes."""

_TABLE, _HEAD, _TOWER, _GROUPS, _COARSE_HEAD = (
    "--embedding int8",
    "--head int8",
    "--vision int8",
    "--group-size ",
    "--head int4",
)


def in_words(options: str) -> str:
    """``options`` of a conversion as a person says them: ``embedding and vision tower in int8, ...``."""
    eight = [("embedding", _TABLE), ("output head", _HEAD), ("vision tower", _TOWER)]
    parts = [name for name, option in eight if option in options]
    said = [f"{', '.join(parts[:-1])}{' and ' if len(parts) > 1 else ''}{parts[-1]} in int8"] if parts else []
    if _GROUPS in options:
        said.append(f"{options.partition(_GROUPS)[2].split()[0]} weights to a scale")
    if _COARSE_HEAD in options:
        said.append("the output head in int4 too")
    return ", ".join(said)


def cost_of(options: str) -> str:
    """What is known of the loss: measured on mini by ``benchmarks/rounding.py``, and on no larger model."""
    if _COARSE_HEAD in options:
        return "Each word is chosen from scores of 4 bits; how much worse answers become was not measured."
    if _GROUPS in options:
        return "Measured on mini alone: int8 there changes next to nothing, larger groups are coarser."
    return "Measured on mini alone: that changes next to nothing."
