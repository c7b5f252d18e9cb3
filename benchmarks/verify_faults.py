"""Faults of `tests/parity/faults.py`: how many `vlfit verify` finds, and how many by the right component.

`python -m benchmarks.verify_faults [NAME ...]`: names begin a fault's name; none: all.
"""

import argparse
import logging
import tempfile
import time
from pathlib import Path

from tests.parity.faults import FAULTS, run_fault
from vlfit.parity.run_checks import float_reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--transformers", action="store_true", help="the reference is transformers' model")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    chosen = [
        each
        for name, each in FAULTS.items()
        if not arguments.names or any(name.startswith(wanted) for wanted in arguments.names)
    ]
    from tests.tiny import build_tiny

    reference = float_reference
    if arguments.transformers:
        from tests.parity.transformers_reference import TransformersReference

        reference = lambda checkpoint: TransformersReference(checkpoint.folder)  # noqa: E731
    found = named = 0
    with tempfile.TemporaryDirectory() as scratch:
        specs: dict[str, Path] = {}
        for number, each in enumerate(chosen):
            if each.spec not in specs:
                specs[each.spec] = build_tiny(each.spec, Path(scratch) / each.spec)
            began = time.perf_counter()
            place = Path(scratch) / f"fault-{number}"
            place.mkdir()
            report = run_fault(each, specs[each.spec], place, reference)
            verdict = report.verdict
            found += verdict is not None
            right = verdict is not None and verdict.component in each.names
            named += right
            mark = "missed" if verdict is None else "right " if right else "WRONG "
            said = "" if verdict is None else f"{verdict.component}: {verdict.stage}, {verdict.condition}"
            print(f"{mark}  {each.name:60}  {said}  ({time.perf_counter() - began:.1f} s)", flush=True)
    print(f"{len(chosen)} faults, {found} found, {named} by the right component")


if __name__ == "__main__":
    main()
