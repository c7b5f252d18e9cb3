"""Which products trigger the next kernel's launch late, and that compiled kernels do so after the wait."""

import json
from typing import Any

import pytest

from tests.kernels.uninterpreted import output_of

pytest.importorskip("triton")

# Run apart from these tests, in which Triton interprets kernels and so has no launches to record.
PROGRAM = """
import json, re
import torch
from benchmarks.decode_step import DecodeStep
from vlfit.kernels.launches import compile_for, compile_launch, record_launches
from vlfit.kernels.target import TargetCard, simulate_card

def products(checkpoint, rows, multiprocessors):
    with simulate_card(TargetCard((9, 0), "", multiprocessors)), record_launches() as found:
        DecodeStep(checkpoint, torch.device("meta"), 2, rows, head=False).run({})
    return [each for each in found if each.name in ("dense_matmul_kernel", "quantized_matmul_kernel")]

def is_late(launch):
    constants = dict(launch.constants)
    return constants["TRIGGER_LATE"] if "TRIGGER_LATE" in constants else constants["FORM"].triggers_late

cases = [
    (checkpoint, rows, multiprocessors)
    for checkpoint in ("2B-bf16", "2B-fp8", "4B-int4") for rows in (8, 9, 16) for multiprocessors in (30, 132)
]
late = [[*case, sorted({is_late(each) for each in products(*case)})] for case in cases]
orders = {}
for multiprocessors in (30, 132):
    launch = products("4B-int4", 8, multiprocessors)[-1]
    with compile_for((9, 0)):
        ptx = compile_launch(launch).asm["ptx"]
    words = re.findall(r"griddepcontrol\\.wait|griddepcontrol\\.launch_dependents|mma\\.sync|atom\\.", ptx)
    orders[multiprocessors] = [
        word for word, before in zip(words, ["", *words]) if word != "mma.sync" or before != word
    ]
print(json.dumps([late, orders]))
"""
WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
PRODUCTS, COUNTER = "mma.sync", "atom."


@pytest.fixture(scope="module")
def found() -> list[Any]:
    """Of checkpoints, rows and multiprocessors: late or not; of an int4 product the order in its PTX."""
    answer: list[Any] = json.loads(output_of("-c", PROGRAM))
    return answer


def test_where_late_was_measured_to_be_faster(found: list[Any]) -> None:
    late = {(checkpoint, rows, many) for checkpoint, rows, many, each in found[0] if each == [True]}
    assert all(len(each) == 1 for *_, each in found[0])
    above_8 = {(checkpoint, rows) for checkpoint, rows, *_ in found[0] if rows > 8}
    expected = {(*each, many) for each in above_8 for many in (30, 132)} - {
        ("4B-int4", 9, 30),
        ("4B-int4", 16, 30),
    }
    assert late == expected | {("2B-bf16", 8, 30), ("4B-int4", 8, 132)}


def test_a_compiled_kernel_triggers_once_and_after_its_wait(found: list[Any]) -> None:
    """Late: after the products, before the sums of splits."""
    assert found[1]["30"] == [WAIT, TRIGGER, PRODUCTS, COUNTER]
    assert found[1]["132"] == [WAIT, PRODUCTS, TRIGGER, COUNTER]
