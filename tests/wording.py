"""What a sentence states apart from its words: the figures in it, and the codes of remarks."""

import re
from collections.abc import Iterable

from vlfit.plan.plans import Remark

_FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def figures_in(text: str) -> list[float]:
    """The numbers in ``text`` in order, without their units; "1,024" is 1024. Those in names are left out."""
    return [float(figure.replace(",", "")) for figure in _FIGURE.findall(text)]


def codes_of(remarks: Iterable[Remark]) -> list[str]:
    return [remark.code for remark in remarks]
