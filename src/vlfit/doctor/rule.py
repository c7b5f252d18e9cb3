"""What a rule is: one cause of failure, as data."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from vlfit.doctor.logs import Facts
from vlfit.machine.model import Gpu, Machine


@dataclass(frozen=True, slots=True)
class Found:
    """One place where a rule's pattern stands. ``start`` counts characters of the cleaned log."""

    start: int
    groups: Mapping[str, str]
    evidence: str
    before: str  # the lines above, as far as a traceback reaches

    def number(self, name: str) -> float:
        """A group as a number; the pattern has made sure that it is one."""
        return float(self.groups[name])


@dataclass(frozen=True, slots=True)
class Case:
    """A finding with all that is known around it. ``machine`` is None unless the person named one."""

    found: Found
    facts: Facts
    machine: Machine | None = None

    @property
    def gpu(self) -> Gpu | None:
        return self.machine.gpus[0] if self.machine is not None and self.machine.gpus else None

    @property
    def wsl2(self) -> bool:
        return self.facts.wsl2 or (self.machine is not None and self.machine.host.wsl2)


Values = dict[str, str]


@dataclass(frozen=True)
class Rule:
    """One cause of failure.

    ``words`` are plain text, at least one of which stands wherever ``pattern`` matches: they make large logs
    quick to read. ``cause``, ``remedy`` and ``command`` are templates: ``{name}`` is a group of the pattern,
    or what ``compute`` works out from the case (it may overrule a group). An empty command: nothing can be
    typed that helps. ``hides`` names rules that are only echoes of this one, if both are found. A message may
    stand broken over several lines, unless ``one_line`` says that it ends with its line. ``wrapper`` marks
    lines that report a failure without its cause.
    """

    id: str
    words: tuple[str, ...]
    pattern: str
    cause: str
    remedy: str
    command: str = ""
    compute: Callable[[Case], Values] | None = None
    hides: tuple[str, ...] = ()
    one_line: bool = False
    wrapper: bool = False

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """The pattern, compiled once: over lines if ``one_line``, else over text whose lines were joined."""
        return re.compile(self.pattern, re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong (with the numbers, and why), where the log says so, and what to do about it.

    ``values``: what the pattern's groups hold, as the log prints it, for a program that acts on it; and, of
    memory that ran out, ``stage``: what was running then.
    """

    id: str
    cause: str
    evidence: str
    remedy: str
    command: str
    values: Mapping[str, str] = field(default_factory=dict)


def judge(rule: Rule, case: Case) -> Diagnosis:
    """Fill the templates of ``rule`` with what ``case`` holds."""
    values: Values = {name: value or "" for name, value in case.found.groups.items()}
    if rule.compute is not None:
        values |= rule.compute(case)
    texts = (_filled(template, values) for template in (rule.cause, rule.remedy, rule.command))
    cause, remedy, command = texts
    read = {**case.found.groups, **({"stage": values["stage"]} if "stage" in values else {})}
    return Diagnosis(rule.id, cause, case.found.evidence, remedy, command, read)


def _filled(template: str, values: Values) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: values[match.group(1)], template).strip()
