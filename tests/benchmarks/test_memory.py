"""The memory benchmark but for the GPU: a real server asked all that its plan admits, and the verdicts."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import gpu_memory, memory
from benchmarks.checkpoints import fill_with_random
from benchmarks.memory import ROWS, Row
from benchmarks.serving import MemoryCurve, bytes_beside_pools, planned_for_process
from vlfit.units import MIB


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["memory", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        memory.main()
    return int(ended.value.code or 0)


def test_a_server_is_asked_all_that_its_plan_admits(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny: Callable[[str], Path],
) -> None:
    file = tmp_path / "memory.json"
    given = ("--model", tiny("tied"), "--device", "cpu", "--sizes", 512, 64, 3, "--starts", 1, "--json", file)
    assert run(monkeypatch, *given) == 0
    [result] = json.loads(file.read_text())["rows"]
    load = result["load"]
    assert load["requests"] == 2 + 3 + 1 + 3
    assert load["failures"] == []
    assert 505 <= load["longest"] <= 512
    assert load["image_tokens"] == 64
    assert result["ledger"]["settings"] | {"context": 512, "sequences": 3} == result["ledger"]["settings"]
    assert result["status"]["finished"] == 9
    assert result["peak_anonymous"] > 50 * MIB
    assert len(result["starts_s"]) == 1
    assert any("ready:" in line for line in result["told"])
    assert "kv_cache" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_a_row_that_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny: Callable[[str], Path]
) -> None:
    given = ("--model", tiny("tied"), "--device", "cpu", "--sizes", 512, 64, 3, "--serve", f"--kv {10**12}")
    assert run(monkeypatch, *given) == 1
    out = capsys.readouterr().out
    assert str(10**12) in out.replace(",", "")


def test_the_rows_are_those_that_must_be_served() -> None:
    wanted = {
        "2B-fp8": (16384, 2560, 8),
        "4B-fp8": (6144, 1280, 4),
        "4B-int4": (16384, 2560, 8),
        "8B-int4": (4096, 1280, 2),
        "Qwen3.5-9B-int4": (65536, 2560, 1),
    }
    assert {row.name: (row.context, row.image_tokens, row.sequences) for row in ROWS} == wanted


def row_lines(**counts: tuple[int, int | None]) -> dict[str, Any]:
    lines = [
        {"line": name.replace("__", "."), "planned": planned, "actual": actual}
        for name, (planned, actual) in counts.items()
    ]
    return {"settings": {"kv_tokens": 7000}, "ledger": lines}


def a_result(**changes: Any) -> dict[str, Any]:
    ledger = row_lines(
        desktop=(73000, 73000),
        context=(736, 700),
        weights__text=(3000, 3000),
        weights__vision=(900, 900),
        kv_cache=(1000, 1000),
        vision_workspace=(100, None),
        text_workspace=(50, 120),
        reserve=(128, None),
    )
    for line in ledger["ledger"]:
        for name in ("planned", "actual"):
            line[name] = line[name] and line[name] * MIB
    result: dict[str, Any] = {
        "free": 7200 * MIB,
        "load": {"failures": [], "image_tokens": 1280, "longest": 6144},
        "ledger": ledger,
        "ready": {"process": 5700 * MIB},
        "peak": 5720 * MIB,
        "peak_until_ready": 5700 * MIB,
        "planned": planned_for_process(ledger),
        "beside": bytes_beside_pools(ledger, 5720 * MIB),
        "bytes_per_s": 1.2e9,
    }
    return result | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"peak": 5790 * MIB}, ["5790"]),
        ({"peak": 5600 * MIB}, ["5600"]),
        ({"beside": 901 * MIB}, ["901"]),
        ({"peak_until_ready": 6001 * MIB}, ["301"]),
        ({"bytes_per_s": 0.9e9}, ["0.90"]),
        (
            {"load": {"failures": ["a"], "image_tokens": 1000, "longest": 5000}},
            ["1", "1000", "5000"],
        ),
        ({"free": None, "peak": 0, "bytes_per_s": 0.0}, []),  # without a card only what is served counts
    ],
)
def test_what_must_hold(changes: dict[str, Any], words: list[str]) -> None:
    result = a_result(**changes)
    assert result["planned"] == (736 + 3000 + 900 + 1000 + 100 + 50) * MIB
    wrong = [
        message for message, holds in memory.verdicts(Row("4B", "fp8", 6144, 1280, 4), result) if not holds
    ]
    assert len(wrong) == len(words)
    for expected, message in zip(words, wrong, strict=True):
        assert expected in message


def test_the_least_and_the_most_after_a_moment() -> None:
    curve = MemoryCurve(curve=[(1.0, 100), (2.0, 400), (3.0, 300), (8.0, 310)])
    assert curve.range_since(4.0) == (300, 310)
    assert curve.range_since(9.0) == (310, 310)
    assert curve.peak_until(2.5) == 400
    assert curve.peak_until(0.5) == 0
    assert MemoryCurve().range_since(1.0) == (0, 0)
    assert (curve.time_to(50), curve.time_to(300), curve.time_to(500)) == (1.0, 2.0, 8.0)


class Card:
    """A card as NVML and torch's allocator show it: pieces of 2 MiB."""

    def __init__(self, free: int) -> None:
        self.left = free

    def free(self) -> int:
        return self.left

    def take(self, count: int, **_: Any) -> int:
        self.left -= count if count > MIB else MIB
        return count


@pytest.mark.parametrize("free", [80_000 * MIB, 80_000 * MIB + 700_000, 7205 * MIB + 12_345])
def test_so_much_is_held_that_the_rest_is_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    card = Card(free)
    monkeypatch.setattr(torch, "empty", card.take)
    held: list[Any] = []
    gpu_memory.occupy(card, 7200 * MIB, held)  # type: ignore[arg-type]
    assert abs(card.left - 7200 * MIB) <= gpu_memory.TOLERANCE
    assert held


def test_random_weights_are_finite_and_everywhere(tmp_path: Path) -> None:
    stored = {
        "a.weight": torch.bfloat16,
        "b.weight": torch.float32,
        "c.weight": torch.float8_e4m3fn,
        "c.weight_scale_inv": torch.float32,
        "d.weight_packed": torch.int32,
        "d.weight_scale": torch.bfloat16,
        "e.weight": torch.int8,
    }
    tensors = {name: torch.zeros(300, 70, dtype=dtype) for name, dtype in stored.items()}
    tensors |= {"norm.weight": torch.zeros(70, dtype=torch.bfloat16), "d.weight_shape": torch.tensor([3, 4])}
    save_file(tensors, tmp_path / "model.safetensors")
    fill_with_random(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.pop("d.weight_shape").tolist() == [3, 4]
    assert found.pop("norm.weight").tolist() == [1.0] * 70
    for name, values in found.items():
        numbers = values.double()
        assert numbers.isfinite().all()
        assert (numbers[-1] != 0).any()
        assert numbers.std() > 0
        if "scale" in name:
            assert (numbers > 0).all()
    assert 0.01 < found["a.weight"].double().std() < 0.03
    assert found["c.weight"].double().abs().max() < 2


def test_the_holding_process_takes_anew_for_each_wish(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = Card(80_000 * MIB)

    class Piece:
        def __init__(self, count: int, **_: Any) -> None:
            self.count = count
            card.take(count)

        def __del__(self) -> None:
            card.left += max(self.count, MIB)

    class Meter:
        free = card.free

        def growth(self) -> int:
            return 500 * MIB

    monkeypatch.setattr(torch, "empty", Piece)
    monkeypatch.setattr(gpu_memory, "GpuMeter", Meter)
    for name, answer in (("synchronize", None), ("memory_reserved", 2 * MIB), ("empty_cache", None)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{7200 * MIB}\n{5000 * MIB}\n{7200 * MIB}\n"))
    gpu_memory.main()
    context, *answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert context == {"context": 498 * MIB}
    for answer, wanted in zip(answers, (7200, 5000, 7200), strict=True):
        assert abs(answer["free"] - wanted * MIB) <= MIB


def test_what_holds_memory_can_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import json, sys\nprint(json.dumps({'context': 7}), flush=True)\n"
        "for line in sys.stdin: print(json.dumps({'free': 7200 * 2**20 + 5}), flush=True)"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        "benchmarks.gpu_memory.subprocess.Popen",
        lambda words, **options: popen([sys.executable, "-c", program], **options),
    )
    with gpu_memory.MemoryHolder() as holder:
        assert holder.context == 7
        assert holder.leave_free(7200 * MIB) == 7200 * MIB + 5
        with pytest.raises(RuntimeError, match=r"7200\.0 .* 7000\.0"):
            holder.leave_free(7000 * MIB)
    assert holder._process.returncode is not None
