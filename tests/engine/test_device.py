"""Compute dtype by device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gguf_files import as_gguf
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.device import check_kernel_capability, choose_dtype
from vlfit.errors import DeviceError, UsageError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def is_a_card_of(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")

    return is_a_card_of


def test_a_gpu_older_than_the_kernels_is_refused(card: Callable[[int, int], None]) -> None:
    check_kernel_capability(torch.device("cpu"))
    for capability in ((8, 0), (8, 6), (12, 0)):
        card(*capability)
        check_kernel_capability(CUDA)
    card(7, 5)
    with pytest.raises(DeviceError, match=r"a card.*7\.5.*8\.0") as caught:
        check_kernel_capability(CUDA)
    assert "--backend transformers" in caught.value.hint


def test_a_gpu_without_bfloat16_uses_float16_with_a_warning(
    card: Callable[[int, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = open_checkpoint("mini")
    card(8, 0)
    assert choose_dtype("auto", checkpoint, CUDA) is torch.bfloat16
    assert choose_dtype("bfloat16", checkpoint, CUDA) is torch.bfloat16
    assert not caplog.text
    card(7, 5)
    assert choose_dtype("auto", checkpoint, CUDA) is torch.float16
    assert all(part in caplog.text for part in ("a card", "7.5", "bfloat16", "float16"))
    assert choose_dtype("float32", checkpoint, CUDA) is torch.float32
    with pytest.raises(UsageError, match="bfloat16") as caught:
        choose_dtype("bfloat16", checkpoint, CUDA)
    assert "float16" in caught.value.hint


def test_float32_is_the_default_on_a_cpu(tiny: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(tiny("tied"))
    assert choose_dtype("auto", checkpoint, CPU) is torch.float32
    assert choose_dtype("bfloat16", checkpoint, CPU) is torch.bfloat16


def test_float32_norms_beside_quantized_weights_do_not_make_a_float32_model(
    card: Callable[[int, int], None], tmp_path: Path
) -> None:
    model, _ = as_gguf(open_checkpoint("mini").folder, tmp_path, "q8_0")
    card(8, 0)
    assert choose_dtype("auto", open_checkpoint(model), CUDA) is torch.bfloat16
