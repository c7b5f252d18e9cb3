"""Settings: what comes from where, and what is refused."""

import pytest

from vlfit.cli.options import CommandOptions, declarations
from vlfit.errors import UsageError
from vlfit.settings import Settings, read_settings


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"VLFIT_{name.upper()}", raising=False)


def test_defaults_then_environment_then_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings().model == "auto"
    monkeypatch.setenv("VLFIT_MODEL", "mini")
    monkeypatch.setenv("VLFIT_CONTEXT", "2048")
    assert read_settings(model=None).model == "mini"
    assert read_settings(model="other").model == "other"
    assert read_settings().context == 2048


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_SERVER", "")
    assert read_settings().server is None


def test_a_bad_value_names_the_variable_and_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_PORT", "eighty")
    with pytest.raises(UsageError) as caught:
        read_settings(image_tokens=0)
    assert caught.value.exit_code == 2
    assert "'eighty'" in caught.value.message
    assert "VLFIT_PORT" in caught.value.hint
    assert "--image-tokens" in caught.value.hint


def test_the_key_is_not_shown_when_settings_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_API_KEY", "opensesame")
    settings = read_settings()
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "opensesame"
    assert "opensesame" not in repr(settings)


def test_a_time_is_written_as_people_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_IDLE_SLEEP", "5m")
    assert read_settings().idle_sleep == 300
    assert read_settings(idle_sleep="1.5h").idle_sleep == 5400
    with pytest.raises(UsageError) as caught:
        read_settings(idle_sleep="300")
    assert caught.value.param == "idle_sleep"
    assert all(
        word in caught.value.hint for word in ("300s", "300m", "300h", "--idle-sleep", "VLFIT_IDLE_SLEEP")
    )


@pytest.mark.parametrize(
    ("name", "value", "example"),
    [
        ("idle_sleep", "5", "5m"),
        ("idle_sleep", "0", "90s"),
        ("idle_sleep", "0s", "90s"),
        ("kv", "x", "--kv"),
        ("offload", "x", "7.5GiB"),
    ],
)
def test_a_wrong_value_is_named_with_an_example(name: str, value: str, example: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_settings(**{name: value})
    assert caught.value.param == name
    assert caught.value.message.startswith(f"{name} is {value!r}: ")
    assert caught.value.message.count("Value error") == 0  # pydantic's prefix
    assert example in caught.value.hint


@pytest.mark.parametrize("origin", ["https://example.org", "http://localhost:3000", "*"])
def test_a_web_page_that_may_call(origin: str) -> None:
    assert read_settings(allow_origin=origin).allow_origin == origin


@pytest.mark.parametrize(
    "origin",
    ["foo", "example.org", "https://example.org/", "https://", "ftp://x", "http://[::1", "http://x:y"],
)
def test_what_no_browser_calls_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(UsageError, match=r"https://example\.org") as caught:
        read_settings(allow_origin=origin)
    assert "--allow-origin" in caught.value.hint


def test_every_setting_has_its_option_and_every_option_with_a_variable_its_setting() -> None:
    variables = {
        name.removeprefix("no_")
        for name, declaration in declarations(CommandOptions).items()
        if declaration.variable
    }
    assert variables - {"url"} == set(Settings.model_fields) - {"debug"}  # --url sets VLFIT_SERVER
