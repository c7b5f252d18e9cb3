"""What failures of a download mean, and how progress is shown. Whole downloads: tests/cli/test_pull.py."""

import errno

import pytest

from vlfit.checkpoint.hub import download, translate
from vlfit.checkpoint.transfer import StderrProgress
from vlfit.errors import HubError, HubUnreachable, NotDownloaded
from vlfit.units import MIB


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "cannot write"), (errno.EROFS, "cannot write")],
)
def test_disk(number: int, words: str) -> None:
    error = translate(OSError(number, "what the system says"), "org/model")
    assert words in error.message
    assert "HF_HOME" in error.hint
    assert not isinstance(error, HubUnreachable)


def test_the_reason_behind_not_in_the_cache() -> None:
    """huggingface_hub looks into the cache as a last resort, and then complains about that."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    error = LocalEntryNotFoundError("nothing cached")
    assert isinstance(translate(error, "org/model"), HubUnreachable)
    error.__cause__ = OfflineModeIsEnabled("offline")
    assert isinstance(translate(error, "org/model"), NotDownloaded)
    error.__cause__ = TimeoutError("10 s passed")
    found = translate(error, "org/model")
    assert "TimeoutError: 10 s passed" in found.message
    assert "goes on where it stopped" in found.hint


def test_every_failure_is_a_hub_error() -> None:
    assert isinstance(translate(RuntimeError("?"), "org/model@v1"), HubError)


def test_progress_in_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line at the start, one every five seconds, one at the end; speed leaves out what was there before."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = StderrProgress("org/model")
    for step in range(11):
        progress((100 + 10 * step) * MIB, 200 * MIB)
        now += 1.0
    progress.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "org/model:  50 %  100 MiB of 200 MiB",
        "org/model:  75 %  150 MiB of 200 MiB  10.0 MiB/s  5.0 s left",
        "org/model: 100 %  200 MiB of 200 MiB  10.0 MiB/s",
    ]


def test_progress_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    StderrProgress("org/model")(0, 0)
    assert "100 %" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["foo", "huggingface.co", "ftp://hub.example", "https://", "http://[x"])
def test_an_endpoint_that_is_no_url(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(HubError) as error:
        download("org/model")
    assert error.value.message == f"HF_ENDPOINT is {endpoint!r}, which is no URL"
    assert "Unset HF_ENDPOINT" in error.value.hint
