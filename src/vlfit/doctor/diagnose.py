"""From a log to diagnoses: every rule over every chunk, consequences left out, the likeliest cause first."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

from vlfit.doctor.checks import Check, worst_level
from vlfit.doctor.logs import CONTEXT_BEFORE, LogChunk, LogFacts, read_chunks
from vlfit.doctor.rule import Diagnosis, Finding, Rule, RuleMatch, make_diagnosis
from vlfit.doctor.rules import RULES
from vlfit.machine.model import Machine
from vlfit.plan.vllm.step_down import Failure

_MAX_EVIDENCE_LINES = 3
_MAX_LINE_LENGTH = 400
_OVERLONG_NUMBER = re.compile(r"-?[\d.]{16,}")
NO_DIAGNOSIS = (
    "nothing in this log is known to the doctor",
    "The doctor reads logs of vLLM, transformers, PyTorch, llama.cpp, Ollama and the kernel. If this is one "
    "of them, please report it with the whole log, `vlfit doctor --json` and `vlfit machine --json`.",
)


@dataclass
class _RuleHits:
    """First and last match of a rule."""

    rule: Rule
    first: RuleMatch
    last: RuleMatch


@dataclass(frozen=True)
class LogReport:
    """The diagnoses of a log, the likeliest cause first; empty if no rule matches.

    ``characters``: length of the cleaned log; 0: it was empty. ``has_cause``: at least one rule that matches
    is no wrapper (``Rule.wrapper``).
    """

    diagnoses: tuple[Diagnosis, ...]
    characters: int
    has_cause: bool = field(default=True)

    @property
    def only_wrappers(self) -> bool:
        """Whether there are diagnoses, but none names a cause."""
        return bool(self.diagnoses) and not self.has_cause


def diagnose_log(stream: BinaryIO, machine: Machine | None = None) -> LogReport:
    """Read a log to its end and diagnose it. ``machine``: where the program ran; None: unknown."""
    facts, characters = LogFacts(), 0
    hits: dict[str, _RuleHits] = {}
    for chunk in read_chunks(stream):
        facts.update(chunk)
        for rule in RULES:
            _search(rule, chunk, hits)
        characters = chunk.start + chunk.last
    ranked = _rank(list(hits.values()), facts)
    diagnoses = tuple(
        make_diagnosis(hit.rule, Finding(hit.first if hit.rule.first_counts else hit.last, facts, machine))
        for hit in ranked
    )
    return LogReport(diagnoses, characters, any(not hit.rule.wrapper for hit in ranked))


def _search(rule: Rule, chunk: LogChunk, hits: dict[str, _RuleHits]) -> None:
    text = chunk.text if rule.one_line else chunk.flat
    if not any(keyword in text for keyword in rule.keywords):
        return
    matches = [
        match
        for match in rule.expression.finditer(text)
        if chunk.first <= match.start() < chunk.last and not any(map(_is_overlong, match.groups()))
    ]
    if not matches:
        return
    last = _rule_match(matches[-1], chunk)
    if (hit := hits.get(rule.id)) is None:
        hits[rule.id] = _RuleHits(rule, _rule_match(matches[0], chunk), last)
    else:
        hit.last = last


def _is_overlong(group: str | None) -> bool:
    """Whether a group is a number longer than any that these programs print."""
    return group is not None and _OVERLONG_NUMBER.fullmatch(group) is not None


def _rule_match(match: re.Match[str], chunk: LogChunk) -> RuleMatch:
    start = match.start()
    return RuleMatch(
        start=chunk.start + start,
        groups={name: group or "" for name, group in match.groupdict().items()},
        evidence=_evidence_lines(chunk.text, start, match.end()),
        lines_above=chunk.text[max(start - CONTEXT_BEFORE, 0) : start],
    )


def _evidence_lines(text: str, start: int, end: int) -> str:
    """The lines of ``text`` that ``[start, end)`` is in, shortened."""
    start = text.rfind("\n", 0, start + 1 if text[start : start + 1] == "\n" else start) + 1
    stop = text.find("\n", end)
    lines = text[start : stop if stop >= 0 else len(text)].strip().split("\n")
    return "\n".join(
        line if len(line) <= _MAX_LINE_LENGTH else line[:_MAX_LINE_LENGTH] + "..."
        for line in lines[:_MAX_EVIDENCE_LINES]
    )


def _rank(hits: list[_RuleHits], facts: LogFacts) -> list[_RuleHits]:
    """Causes, those of the last run first, then in log order; without causes the first wrapper."""
    causes = [hit for hit in hits if not hit.rule.wrapper]
    if not causes:
        return sorted(hits, key=lambda hit: hit.first.start)[:1]
    hidden = {name for hit in causes for name in hit.rule.hides}
    causes = [hit for hit in causes if hit.rule.id not in hidden]
    # A log may hold several attempts: the last one is what fails now.
    return sorted(causes, key=lambda hit: (hit.last.start < facts.last_start, hit.first.start))


def find_failure(stream: BinaryIO, machine: Machine | None = None) -> tuple[Failure, Diagnosis | None]:
    """Find the likeliest cause of a failed start in its log. Reads the log to its end.

    Returns it in two forms: a ``Failure`` for ``next_plan``, and the ``Diagnosis`` to show to the person.
    If no rule names a cause, the failure's ``id`` is "", and the diagnosis is that of a wrapper
    (``Rule.wrapper``), or None if no rule matches at all. ``machine``: where the program ran; None:
    unknown.
    """
    report = diagnose_log(stream, machine)
    first = next(iter(report.diagnoses), None)
    if first is None or report.only_wrappers:
        return Failure(""), first
    return Failure(first.id, first.values, first.values.get("stage", "")), first


def checks_as_json(checks: list[Check]) -> dict[str, Any]:
    """JSON of ``vlfit doctor``: ``{"checks": [...], "worst": level}``."""
    return {"checks": [asdict(check) for check in checks], "worst": worst_level(checks)}


def diagnoses_as_json(report: LogReport) -> dict[str, Any]:
    """JSON of ``vlfit doctor --log``: ``{"diagnoses": [...]}``.

    Each has id, cause, evidence, remedy and command, which is null if there is none.
    """
    names = ("id", "cause", "evidence", "remedy")
    return {
        "diagnoses": [
            {**{name: getattr(diagnosis, name) for name in names}, "command": diagnosis.command or None}
            for diagnosis in report.diagnoses
        ]
    }


def diagnosis_lines(report: LogReport) -> list[tuple[str, str]]:
    """The report for a terminal: pairs of heading and text. Headings: cause, also, seen, remedy, run."""
    lines: list[tuple[str, str]] = []
    for index, diagnosis in enumerate(report.diagnoses):
        lines.append(("cause" if index == 0 else "also", f"{diagnosis.cause}  [{diagnosis.id}]"))
        lines.append(("seen", diagnosis.evidence))
        lines.append(("remedy", diagnosis.remedy))
        if diagnosis.command:
            lines.append(("run", diagnosis.command))
    return lines
