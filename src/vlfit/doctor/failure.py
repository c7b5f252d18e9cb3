"""The bridge from the log of a start that failed to what is tried next: the likeliest cause with its numbers.

Knows: which diagnosis counts. Does not know the rules (``rules/``) or what follows of one
(``plan/vllm/step_down.py``).
"""

from typing import BinaryIO

from vlfit.doctor.diagnose import examine
from vlfit.doctor.rule import Diagnosis
from vlfit.machine.model import Machine
from vlfit.plan.vllm.cases import Failure


def read_failure(stream: BinaryIO, machine: Machine | None = None) -> tuple[Failure, Diagnosis | None]:
    """The likeliest cause in the log ``stream``: for a program, and for a person, None if none is known.

    Lines that report a failure without its cause are no cause for a program.
    """
    found = examine(stream, machine)
    first = next(iter(found.diagnoses), None)
    if first is None or found.only_wrappers:
        return Failure(""), first
    return Failure(first.id, first.values, first.values.get("stage", "")), first
