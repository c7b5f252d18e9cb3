"""One typed table of everything that can be set from the outside, for the command line and the server.

Knows: the names, types and defaults, and that each can come from the environment as ``VLFIT_`` and its name
in capitals (``VLFIT_SERVER``, ``VLFIT_CONTEXT``). Does not know: what any of them does. The Python API takes
its own arguments and never looks here, so that a script behaves alike on every machine.

Import it inside functions: pydantic-settings costs a fifth of a second, which ``vlfit --help`` need not pay.
"""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from vlfit.errors import UsageError
from vlfit.units import parse_gibibytes, parse_seconds


def _tokens_or_auto(value: object) -> object:
    """A union of types would be refused with a sentence for each of them."""
    if value is None or value == "auto" or (str(value).isdecimal() and int(str(value)) > 0):
        return value
    raise ValueError("must be auto or a number of tokens above 0")


def _gibibytes_or_auto(value: object) -> object:
    """A size as people write it, a bare number in GiB; what is a number already is in bytes."""
    if not isinstance(value, str) or value == "auto":
        return value
    try:
        return parse_gibibytes(value)
    except UsageError as error:
        raise ValueError(f"{error.message}; {error.hint}") from None


def _seconds(value: object) -> object:
    """A duration as people write it; what is a number already is in seconds."""
    if not isinstance(value, str):
        return value
    try:
        return parse_seconds(value)
    except UsageError as error:
        raise ValueError(f"{error.message}; {error.hint}") from None


def _origin(value: object) -> object:
    """What a browser calls the origin of a page: a scheme, a host and perhaps a port; ``*`` for all."""
    if value is None or value == "*":
        return value
    try:
        parts = urlsplit(str(value))
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or value != f"{parts.scheme}://{parts.netloc}":
        raise ValueError("must be the origin of a web page, like https://example.org, or *")
    return value


class Settings(BaseSettings):
    """What a person set: options of the command line first, then the environment, then these defaults.

    ``context``, ``image_tokens`` and ``max_tokens`` count tokens. None leaves the choice to the engine.
    """

    # An empty variable means "not set": `VLFIT_SERVER= vlfit ...` is how a shell switches a setting off.
    model_config = SettingsConfigDict(env_prefix="VLFIT_", env_ignore_empty=True, extra="forbid", frozen=True)

    model: str = Field("auto", min_length=1, description="auto, mini, a folder or a hub id")
    backend: Literal["native", "vllm", "transformers", "remote"] | None = Field(
        None, description="who runs the model; None: remote if a server is named, else native"
    )
    server: str | None = Field(None, description="URL of a running server, used instead of loading here")
    server_key: SecretStr | None = Field(
        None, description="key that the server behind --backend remote asks for"
    )
    api_key: SecretStr | None = Field(None, description="key that the server asks for, or is asked for")

    device: str = Field("auto", description="auto, cpu, cuda or cuda:1")
    dtype: str = Field("auto", description="auto, or a name such as bfloat16")
    context: int | None = Field(None, ge=1, description="most tokens of one request, prompt and answer")
    kv: Annotated[int | Literal["auto"] | None, BeforeValidator(_tokens_or_auto)] = Field(
        None, description="tokens of the KV cache that all requests share, or auto"
    )
    kv_dtype: Literal["auto", "bf16", "fp8"] = Field("auto", description="dtype of the KV cache")
    sequences: int = Field(4, ge=1, description="requests that run at once at full context")
    queue: int | None = Field(None, ge=0, description="requests that may wait while others run")
    prefix_cache: bool = Field(True, description="take over what earlier requests computed of a prompt")
    speculate: bool = Field(True, description="check several tokens a pass where text before tells them")
    image_tokens: int | None = Field(None, ge=1, description="most tokens of one picture")
    chunk: int = Field(1024, ge=1, description="most tokens of one pass through the model")
    max_tokens: int | None = Field(None, ge=1, description="most tokens of an answer")

    offload: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"] | None, BeforeValidator(_gibibytes_or_auto)
    ] = Field(None, description="bytes of weights that leave the GPU for RAM, or auto")
    idle_sleep: Annotated[float | None, BeforeValidator(_seconds)] = Field(
        None, gt=0, description="time without a request after which a server sleeps, like 5m"
    )

    host: str = Field("127.0.0.1", description="address that the server listens on")
    port: int = Field(8000, ge=0, le=65535, description="port that the server listens on; 0 takes a free one")
    api_keys: Path | None = Field(None, description="file of keys that the server asks for, one a line")
    allow_anyone: bool = Field(False, description="serve other computers without a key")
    allow_host: str | None = Field(None, description="name by which a browser may call the server")
    allow_files: Path | None = Field(None, description="folder whose files requests may name")
    key_rate: int | None = Field(None, ge=1, description="requests that one key may begin in a minute")
    key_at_once: int | None = Field(None, ge=1, description="requests that one key may have running")
    drain: Annotated[float, BeforeValidator(_seconds)] = Field(
        30.0, ge=0, description="time that SIGTERM leaves to requests that run, like 30s"
    )
    restart: bool = Field(False, description="run the engine apart, and start it again if it dies")
    log_format: Literal["text", "json"] = Field("text", description="lines for people, or JSON")
    allow_private_urls: bool = Field(False, description="let requests name pictures in the private network")
    allow_origin: Annotated[str | None, BeforeValidator(_origin)] = Field(
        None, description="web origin that may call the server from a browser"
    )

    vllm_python: str | None = Field(None, description="Python, environment or program that has vLLM")

    debug: bool = Field(False, description="show tracebacks")


def read_settings(**given: object) -> Settings:
    """The settings, with what was ``given`` on the command line on top; a given None counts as not given.

    Raises ``UsageError`` naming the option and the variable of every value that makes no sense.
    """
    try:
        return Settings.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        faults = [
            # What our own checks say, pydantic tells with words of its own before it.
            (str(fault["loc"][0]), fault["input"], fault["msg"].removeprefix("Value error, "))
            for fault in error.errors()
        ]
        message = "; ".join(f"{name} is {value!r}: {why}" for name, value, why in faults)
        ways = ", ".join(f"--{name.replace('_', '-')} or VLFIT_{name.upper()}" for name, _, _ in faults)
        raise UsageError(message, f"set it with {ways}", param=faults[0][0]) from None
