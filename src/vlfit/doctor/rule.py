"""Rules: causes of failure as data, and diagnoses from their matches in a log."""

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
    """A match of a rule's pattern in a log.

    ``start``: where the match begins, in characters from the start of the cleaned log. ``groups``: the
    pattern's named groups, "" for a group that took no part. ``evidence``: the matching lines, at most three.
    ``lines_above``: the log's text before the match, long enough for a traceback.
    """

    start: int
    groups: Mapping[str, str]
    evidence: str
    lines_above: str

    def number(self, name: str) -> float:
        """The group ``name`` as a number. Raises ``KeyError`` without that group, ``ValueError`` for text."""
        return float(self.groups[name])


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule's match, and what helps to explain it: facts of the whole log, and the machine it is from.

    ``machine``: None: unknown.
    """

    match: RuleMatch
    facts: LogFacts
    machine: Machine | None = None

    @property
    def gpu(self) -> Gpu | None:
        """The first GPU of ``machine``; None without a machine or a GPU."""
        return self.machine.gpus[0] if self.machine is not None and self.machine.gpus else None

    @property
    def wsl2(self) -> bool:
        """Whether the program ran under WSL2, by the log or the machine."""
        return self.facts.wsl2 or (self.machine is not None and self.machine.host.wsl2)


@dataclass(frozen=True)
class Rule:
    """One cause of failure, and the log messages that show it.

    - ``keywords``: every match contains at least one of these strings; they are searched first, as that is
      fast.
    - ``pattern``: a regular expression for the message.
    - ``cause``, ``remedy``, ``command``: templates: ``{name}`` is a value from ``compute``, else the group
      ``name`` of ``pattern``.
    - ``compute``: returns values for the templates; None: the groups suffice.
    - ``hides``: ids of rules for consequences of this cause; their matches are dropped if this rule matches.
    - ``one_line``: the message is never broken over several lines.
    - ``wrapper``: the message says that something failed, but not why.
    - ``first_counts``: of several matches the first is explained, not the last.
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
    first_counts: bool = False

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """The compiled ``pattern``, to search ``LogChunk.text`` if ``one_line``, else ``LogChunk.flat``."""
        return re.compile(self.pattern, re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of a failure, the lines of the log that show it, what to do, and a command for that.

    ``id``: the rule's. ``command``: "" if there is none. ``values``, for programs: the groups of the rule's
    pattern, and for some rules ``stage``: what ran when memory was short (``OomStage.name``); "" if unknown.
    """

    id: str
    cause: str
    evidence: str
    remedy: str
    command: str
    values: Mapping[str, str] = field(default_factory=dict)


def make_diagnosis(rule: Rule, finding: Finding) -> Diagnosis:
    """The diagnosis for a ``finding`` of ``rule``: the rule's templates, filled in."""
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
