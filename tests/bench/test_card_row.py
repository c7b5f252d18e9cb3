"""The row of docs/cards.md: what bench and verify print is what the table takes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.wording import figures_in
from vlfit._version import __version__
from vlfit.api.conversation import ImagePart
from vlfit.api.engine_options import KERNEL_GROUPS
from vlfit.api.stats import EngineSettings
from vlfit.bench import results
from vlfit.bench.card_row import COLUMNS, CardRow, row_block, shared_name, table_line, table_rule
from vlfit.bench.measure import DecodeResult, Samples
from vlfit.bench.workload import BenchOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.machine.cards import machine_with_card
from vlfit.parity.findings import CheckReport
from vlfit.units import MIB
from vlfit.verify.verify_report import share_block
from vlfit.verify.verify_run import MeasuredSpeed, VerifyResult

CARDS = Path(__file__).parents[2] / "docs" / "cards.md"
[GPU] = (replace(each, driver="580.1", cuda="13.0") for each in machine_with_card("RTX 5060").gpus)
USUAL = BenchOptions()
MACHINE = {"device": GPU.name, "driver": "580.1, CUDA 13.0"}


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("\\|", "").strip("|").split("|")]


def test_the_table_has_the_columns_that_are_printed() -> None:
    """And as many cells in each row that a post has become."""
    lines = CARDS.read_text("utf-8").splitlines()
    start = lines.index(table_line(COLUMNS))
    assert lines[start + 1] == table_rule(len(COLUMNS))
    rows = [cells_of(line) for line in lines[start + 2 :] if line.startswith("|")]
    assert all(len(row) == len(COLUMNS) and all(row) for row in rows)
    assert ("the table is empty" in " ".join(lines)) is (not rows)


def test_bench_and_verify_print_the_same_row() -> None:
    report = CheckReport("quick", [])
    verified = VerifyResult("mini", "bf16", MACHINE, report, versions={"vlfit": __version__})
    speed = MeasuredSpeed(210.0, 0.128, 100, (1024, 768))
    from_verify = share_block(replace_speed(verified, speed)).splitlines()[-3:]
    row = results.card_row(bench_result())
    assert row is not None
    from_bench = row_block(row)
    assert from_bench[:2] == from_verify[:2] == [table_line(COLUMNS), table_rule(len(COLUMNS))]
    ours, theirs = cells_of(from_bench[-1]), cells_of(from_verify[-1])
    assert len(ours) == len(theirs) == len(COLUMNS)
    assert ours[:4] == theirs[:4] == [GPU.name, "580.1, CUDA 13.0", __version__, "mini, bf16"]
    assert (ours[4], theirs[4]) == ("not verified", "ok (quick)")
    assert (ours[5], theirs[5]) == ("6,900 of 7,000 MiB", "-")
    on_cpu = cells_of(row_block(replace(row, driver=""))[-1])[5]
    assert on_cpu.startswith(ours[5])
    assert on_cpu != ours[5]  # says of what, as the process holds more
    assert ours[6:] == theirs[6:] == ["210.0", "128 ms, 1024x768"]


def test_a_row_needs_a_request_alone() -> None:
    assert results.card_row(bench_result(concurrency=4)) is None


def test_a_row_says_what_was_not_as_usual() -> None:
    row = results.card_row(bench_result(kv_dtype="fp8", offload=3))
    assert row is not None
    assert cells_of(row_block(row)[-1])[3] == "mini, bf16, KV cache in fp8, 3 layers in RAM"


@pytest.mark.parametrize(
    ("wanted", "settings"),
    [
        (BenchOptions(dtype="bfloat16"), {}),
        (BenchOptions(kernels="plain"), {}),
        (BenchOptions(kernels="plain:attention"), {}),
        (BenchOptions(kernels="plain:rows"), {}),
        (BenchOptions(max_num_batched_tokens=64), {}),
        (BenchOptions(image_tokens=64), {}),
        (BenchOptions(), {"kv_dtype": "fp8"}),
        (BenchOptions(), {"offload": 3}),
        (BenchOptions(batches=(1,)), {}),
        (BenchOptions(batches=(1, 8)), {}),
        (BenchOptions(context=3000), {}),
        (BenchOptions(tokens=2), {}),
        (BenchOptions(repeat=1), {}),
        (BenchOptions(size=(512, 512)), {}),
        (BenchOptions(pictures=(ImagePart(b"", "one"),)), {}),
    ],
)
def test_runs_that_cannot_be_compared_have_other_rows(wanted: BenchOptions, settings: dict[str, Any]) -> None:
    usual, other = results.card_row(bench_result()), results.card_row(bench_result(wanted, **settings))
    assert usual is not None
    assert other is not None
    before, after = cells_of(row_block(usual)[-1]), cells_of(row_block(other)[-1])
    assert sum(was != now for was, now in zip(before, after, strict=True)) == 1
    assert "/" not in "".join((*after[3:5], after[7]))  # no path


def test_a_row_has_the_figures_of_what_was_not_as_usual() -> None:
    wanted = BenchOptions(context=3000, tokens=2, repeat=1, batches=(1, 8), dtype="bfloat16")
    row = results.card_row(bench_result(wanted))
    assert row is not None
    cells = cells_of(row_block(row)[-1])
    assert "bfloat16" in cells[3]
    assert 8 in figures_in(cells[3])
    assert figures_in(cells[7])[0] == 128
    assert figures_in(cells[7])[-3:] == [2998, 2, 1]


def test_equal_choices_of_kernels_have_one_row() -> None:
    named = ("plain:rows,attention", "plain:attention,rows")
    first, second = (results.card_row(bench_result(BenchOptions(kernels=each))) for each in named)
    assert first == second
    every = ("plain", f"plain:{','.join(KERNEL_GROUPS)}")
    first, second = (results.card_row(bench_result(BenchOptions(kernels=each))) for each in every)
    assert first == second


def test_batches_with_the_usual_number_at_most_are_as_usual() -> None:
    usual = results.card_row(bench_result())
    assert results.card_row(bench_result(BenchOptions(batches=(4, 2, 1)))) == usual


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("mini", True),
        ("Qwen/Qwen3-VL-4B-Instruct-FP8", True),
        ("unsloth/Qwen3-VL-4B-Instruct-GGUF:Q4_K_M", True),
        ("Annas holiday", False),
        ("/home/anna/model.gguf", False),
    ],
)
def test_only_what_everybody_can_fetch_is_named(name: str, shown: bool) -> None:
    assert (shared_name(name) == name) is shown
    empty = CardRow("card", "", "1", name, "bf16", "ok", 0, 0, None, None, "text")
    assert (name in row_block(empty)[-1]) is shown
    assert cells_of(row_block(empty)[-1])[5:] == ["-", "-", "-"]


def test_no_cell_ends_the_row() -> None:
    row = CardRow("a|b\nc", "d", "1", "mini", "bf16", "ok", 1, 2, 3.0, 4.0, "text")
    assert len(cells_of(row_block(row)[-1])) == len(COLUMNS)
    assert len(row_block(row)[-1].splitlines()) == 1


def replace_speed(verified: VerifyResult, speed: MeasuredSpeed) -> VerifyResult:
    verified.speed = speed
    return verified


def bench_result(wanted: BenchOptions = USUAL, concurrency: int = 1, **settings: Any) -> Any:
    chunk, context = wanted.max_num_batched_tokens, wanted.context or 1024
    engine = EngineSettings("cuda:0", "", "bfloat16", 2, context, 64, 4, chunk, 4096, **settings)
    pace = DecodeResult(concurrency, Samples((concurrency / 210,)), Samples((0.128,)), Samples((1.0,)), 90.0)
    return SimpleNamespace(
        gpu=GPU,
        account=SimpleNamespace(settings=engine),
        options=wanted,
        requests=SimpleNamespace(image_tokens=768, prompt_tokens=context - wanted.tokens),
        checkpoint=open_checkpoint("mini"),
        decoding=(pace,),
        planned_bytes=7000 * MIB,
        held_bytes=6900 * MIB,
    )
