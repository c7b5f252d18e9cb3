"""Rules: causes of failure as data, and what becomes of a match in a log."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from vlfit.doctor.logs import LogFacts
from vlfit.doctor.remedies import missing_model_note
from vlfit.machine.model import Gpu, Machine

TemplateValues = dict[str, str]


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """Where a rule's pattern matches. ``start`` counts characters of the cleaned log.

    ``lines_above`` reaches far enough back for a traceback.
    """

    start: int
    groups: Mapping[str, str]
    evidence: str
    lines_above: str

    def number(self, name: str) -> float:
        """A numeric group as a number."""
        return float(self.groups[name])


@dataclass(frozen=True, slots=True)
class Finding:
    """A match, the facts of its log, and the machine of the log if the user described one."""

    match: RuleMatch
    facts: LogFacts
    machine: Machine | None = None

    @property
    def gpu(self) -> Gpu | None:
        return self.machine.gpus[0] if self.machine is not None and self.machine.gpus else None

    @property
    def wsl2(self) -> bool:
        return self.facts.wsl2 or (self.machine is not None and self.machine.host.wsl2)


@dataclass(frozen=True)
class Rule:
    """One cause of failure.

    ``keywords``: plain strings, one of which is in every text that ``pattern`` matches; a fast first check.
    ``cause``, ``remedy`` and ``command`` are templates: ``{name}`` is a value from ``compute``, else a group
    of the pattern. ``hides``: ids of rules that only report a consequence of this one. ``one_line``: the
    message is never broken over several lines. ``wrapper``: reports that something failed, not why.
    """

    id: str
    keywords: tuple[str, ...]
    pattern: str
    cause: str
    remedy: str = "{advice}"
    command: str = "{run}"
    compute: Callable[[Finding], TemplateValues] | None = None
    hides: tuple[str, ...] = ()
    one_line: bool = False
    wrapper: bool = False

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """The compiled pattern, for text as it is if ``one_line``, else for text with its lines joined."""
        return re.compile(self.pattern, re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong and why, the lines of the log that say so, what to do, and a command for it.

    ``values``, for programs: the pattern's groups, and the ``stage`` at which memory ran out.
    """

    id: str
    cause: str
    evidence: str
    remedy: str
    command: str
    values: Mapping[str, str] = field(default_factory=dict)


def make_diagnosis(rule: Rule, finding: Finding) -> Diagnosis:
    """Fill in the templates of a rule."""
    groups = finding.match.groups
    values: TemplateValues = {name: group or "" for name, group in groups.items()}
    if rule.compute is not None:
        values |= rule.compute(finding)
    cause, remedy, command = (_fill(template, values) for template in (rule.cause, rule.remedy, rule.command))
    remedy += missing_model_note(command)
    stage = {"stage": values["stage"]} if "stage" in values else {}
    return Diagnosis(rule.id, cause, finding.match.evidence, remedy, command, {**groups, **stage})


def _fill(template: str, values: TemplateValues) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: values[match.group(1)], template).strip()
