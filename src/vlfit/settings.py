"""Settings from the command line, the environment and defaults, checked.

A setting's variable is ``VLFIT_`` and its name in capitals (``VLFIT_CONTEXT``); what it does stands with its
option in ``cli/options.py``. The Python API does not read settings, so that a script behaves alike on every
machine. Import this inside functions: pydantic-settings takes 0.2 s, too long for ``vlfit --help``.
"""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from vlfit.api.engine_options import plain_groups
from vlfit.errors import UsageError, plain_reason
from vlfit.units import parse_gibibytes, parse_seconds


def _tokens_or_auto(value: object) -> object:
    """One message instead of pydantic's one per type of the union."""
    if value is None or value == "auto" or (str(value).isdecimal() and int(str(value)) > 0):
        return value
    raise ValueError("must be auto or a number of tokens above 0")


def _gibibytes_or_auto(value: object) -> object:
    """Parse a size such as ``800MiB``; a bare number is GiB. Numbers are bytes already."""
    if not isinstance(value, str) or value == "auto":
        return value
    try:
        return parse_gibibytes(value)
    except UsageError as error:
        raise ValueError(error.message) from error


def _seconds(value: object) -> object:
    """Parse a duration such as ``5m``. Numbers are seconds already."""
    if not isinstance(value, str):
        return value
    try:
        return parse_seconds(value)
    except UsageError as error:
        raise ValueError(error.message) from error


def _kernels(value: str) -> str:
    """Check the form of ``--kernels``."""
    try:
        plain_groups(value)
    except UsageError as error:
        raise ValueError("these are unknown") from error
    return value


def _origin(value: object) -> object:
    """Check a web origin: scheme, host and optional port; or ``*``."""
    if value is None or value == "*":
        return value
    try:
        parts = urlsplit(str(value))
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or value != f"{parts.scheme}://{parts.netloc}":
        raise ValueError("must be the origin of a web page, like https://example.org, or *")
    return value


def _image_formats(value: object) -> object:
    """Check names of ``--image-formats``, separated by commas."""
    names = [name.strip() for name in str(value).split(",")]
    if not names or not set(names) <= {"default", "all", "pdf", "raw", "video"}:
        raise ValueError("must be default or all, with any of pdf, raw and video: default,pdf")
    return ",".join(names)


class Settings(BaseSettings):
    """All settings, from keyword arguments, then the environment (``VLFIT_CONTEXT``), then these defaults.

    ``context``, ``kv``, ``image_tokens``, ``chunk`` and ``max_tokens`` are in tokens, ``offload`` in bytes,
    ``idle_sleep`` and ``drain`` in seconds. None: off, or for the engine to choose. Create it with
    ``read_settings``, which raises ``UsageError`` in place of pydantic's errors.
    """

    # An empty variable counts as not set: `VLFIT_SERVER= vlfit ...` switches a setting off.
    model_config = SettingsConfigDict(env_prefix="VLFIT_", env_ignore_empty=True, extra="forbid", frozen=True)

    model: str = Field("auto", min_length=1)
    yes: bool = False
    backend: Literal["native", "vllm", "transformers", "remote"] | None = None
    server: str | None = None
    server_key: SecretStr | None = None
    api_key: SecretStr | None = None

    device: str = "auto"
    dtype: str = "auto"
    context: int | None = Field(None, ge=1)
    kv: Annotated[int | Literal["auto"] | None, BeforeValidator(_tokens_or_auto)] = None
    kv_dtype: Literal["auto", "bf16", "fp8"] = "auto"
    kernels: Annotated[str, AfterValidator(_kernels)] = "auto"
    sequences: int = Field(4, ge=1)
    queue: int | None = Field(None, ge=0)
    prefix_cache: bool = True
    speculate: bool | None = None
    image_tokens: int | None = Field(None, ge=1)
    chunk: int = Field(1024, ge=1)
    max_tokens: int | None = Field(None, ge=1)

    offload: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"] | None, BeforeValidator(_gibibytes_or_auto)
    ] = None
    idle_sleep: Annotated[float | None, BeforeValidator(_seconds)] = Field(None, gt=0)

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    ollama: bool = False
    models: str | None = Field(None, min_length=1)
    pull: bool = False
    api_keys: Path | None = None
    allow_anyone: bool = False
    allow_host: str | None = None
    allow_files: Path | None = None
    search: Path | None = None
    key_rate: int | None = Field(None, ge=1)
    key_at_once: int | None = Field(None, ge=1)
    drain: Annotated[float, BeforeValidator(_seconds)] = Field(30.0, ge=0)
    restart: bool = False
    log_format: Literal["text", "json"] = "text"
    allow_private_urls: bool = False
    image_formats: Annotated[str, BeforeValidator(_image_formats)] = "default"
    allow_origin: Annotated[str | None, BeforeValidator(_origin)] = None

    vllm_python: str | None = None

    debug: bool = False


def read_settings(**given: object) -> Settings:
    """Build ``Settings`` from options of the command line, else the environment, else the defaults.

    ``given``: options by the names of ``Settings``; None: not given. Raises ``UsageError`` with option and
    variable of every invalid value, or for an unknown name.
    """
    try:
        return Settings.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        faults = [
            (str(fault["loc"][0]), fault["input"], plain_reason(fault["msg"])) for fault in error.errors()
        ]
        message = "; ".join(f"{name} is {value!r}: {why}" for name, value, why in faults)
        ways = ", ".join(f"--{name.replace('_', '-')} or VLFIT_{name.upper()}" for name, _, _ in faults)
        causes = [fault.get("ctx", {}).get("error") for fault in error.errors()]
        refusals = [cause.__cause__ for cause in causes if isinstance(cause, ValueError)]
        hints = [refusal.hint for refusal in refusals if isinstance(refusal, UsageError)]
        hint = " ".join((*hints, f"Set it with {ways}."))
        raise UsageError(message, hint, param=faults[0][0]) from None
