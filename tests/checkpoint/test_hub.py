"""Errors of a download and its progress. Whole downloads: tests/cli/test_pull.py."""

import errno

import pytest

from tests.wording import figures_in
from vlfit.checkpoint.hub import download, hub_error
from vlfit.checkpoint.transfer import StderrProgress
from vlfit.errors import HubError, HubUnreachable, NotDownloaded
from vlfit.units import MIB


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST])
def test_disk(number: int) -> None:
    from huggingface_hub import constants

    error = hub_error(OSError(number, "what the system says"), "org/model")
    assert type(error) is HubError
    assert constants.HF_HUB_CACHE in error.message
    assert "HF_HOME" in error.hint
    assert "network" not in error.hint
    assert ("vlfit models rm" in error.hint) == (number == errno.ENOSPC)


def test_not_in_the_cache_gives_its_cause() -> None:
    """huggingface_hub looks into the cache as a last resort, and raises for that."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    error = LocalEntryNotFoundError("nothing cached")
    assert isinstance(hub_error(error, "org/model"), HubUnreachable)
    error.__cause__ = OfflineModeIsEnabled("offline")
    assert isinstance(hub_error(error, "org/model"), NotDownloaded)
    error.__cause__ = TimeoutError("10 s passed")
    found = hub_error(error, "org/model")
    assert "TimeoutError: 10 s passed" in found.message
    assert isinstance(found, HubUnreachable)


def test_asking_for_a_list_is_no_download_to_resume() -> None:
    error = TimeoutError("10 s passed")
    download, asked = hub_error(error, "org/model"), hub_error(error, "org/model", resumes=False)
    assert type(asked) is type(download) is HubUnreachable
    assert "TimeoutError: 10 s passed" in asked.message
    assert download.hint.removeprefix(asked.hint).strip()  # says more


def test_every_failure_is_a_hub_error() -> None:
    assert isinstance(hub_error(RuntimeError("?"), "org/model@v1"), HubError)


def test_progress_in_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line at the start, one every five seconds, one at the end; speed leaves out resumed bytes."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = StderrProgress("org/model")
    for step in range(11):
        progress((100 + 10 * step) * MIB, 200 * MIB)
        now += 1.0
    progress.close()
    out, err = capsys.readouterr()
    assert out == ""
    # Percent, MiB so far, MiB in all, MiB/s, seconds left.
    assert [figures_in(line) for line in err.splitlines()] == [
        [50, 100, 200],
        [75, 150, 200, 10, 5],
        [100, 200, 200, 10],
    ]


def test_progress_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    StderrProgress("org/model")(0, 0)
    assert "100 %" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["foo", "huggingface.co", "ftp://hub.example", "https://", "http://[x"])
def test_an_endpoint_that_is_not_a_url(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(HubError) as error:
        download("org/model")
    assert type(error.value) is HubError
    assert "HF_ENDPOINT" in error.value.message
    assert repr(endpoint) in error.value.message
    assert "HF_ENDPOINT" in error.value.hint
