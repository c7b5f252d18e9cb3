"""Every error that vlfit raises on purpose, as one tree.

Each class has a ``code``, an exit code of the command line (1 unless stated) and an HTTP status (500 unless
stated).

VlfitError
├── UsageError                     exit 2, HTTP 400
│   ├── InvalidRequest
│   ├── RequestTooLarge                HTTP 413
│   ├── RequestTooSlow                 HTTP 408
│   └── PackedRequest                  HTTP 415
├── DoesNotFit                     exit 3, HTTP 400
├── CheckpointError
│   ├── NotACheckpoint
│   ├── UnknownArchitecture
│   ├── UnknownWeightsFormat
│   ├── MissingFile
│   ├── BrokenShard
│   ├── MissingTensor
│   ├── WrongShape
│   └── SurplusTensor
├── HubError                       HTTP 502
│   ├── HubModelNotFound               HTTP 404
│   ├── HubAccessDenied
│   ├── HubUnreachable
│   └── NotDownloaded
├── PictureError                   HTTP 400
│   ├── NotAPicture
│   ├── PictureTooLarge
│   ├── PictureTooCostly
│   ├── PictureNotFound
│   └── PrivateAddress
├── DecodersUnavailable            HTTP 503
├── TemplatesUnavailable           HTTP 503
├── TooManyOpenFiles               HTTP 503
├── UnknownModel                   HTTP 404
├── ModelDownloading               HTTP 503
├── QueueFull                      HTTP 429
│   └── TooManyRequests
├── WrongApiKey                    HTTP 401
├── ForeignOrigin                  HTTP 403
├── ForeignHost                    HTTP 403
├── CannotListen
├── CannotWrite
├── ModelFailed
├── DeviceError
│   └── OutOfMemory                    HTTP 503
│       └── CannotWake
├── VllmFailed                     HTTP 503
├── ServerUnreachable              HTTP 502
├── RemoteError                    HTTP 502
├── ClusterError
├── UnreadableAnswer               HTTP 502
└── EngineStopped                  HTTP 503
    ├── ServerStopping
    └── EngineLost
"""

import errno
import re
from typing import ClassVar


class VlfitError(Exception):
    """Base class of the errors that vlfit raises on purpose.

    ``message``: what happened, with numbers. ``hint``: what to do about it; may be empty. ``param``: the
    request field at fault, or None. ``str()`` is the message, and the hint on a line of its own.
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, hint: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with all attributes, whatever the arguments of the constructor."""
        return _restore_error, (type(self), self.message, dict(self.__dict__))


def _restore_error(kind: type[VlfitError], message: str, fields: dict[str, object]) -> VlfitError:
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    return error


class UsageError(VlfitError):
    """What was asked for makes no sense: a wrong option, value or combination."""

    exit_code = 2
    http_status = 400
    code = "invalid_request"


class InvalidRequest(UsageError):
    """A field of a request is invalid; ``param`` names it."""


class RequestTooLarge(UsageError):
    """The body of a request is larger than the server's limit."""

    http_status = 413
    code = "request_too_large"


class RequestTooSlow(UsageError):
    """The body of a request did not arrive in time."""

    http_status = 408
    code = "request_timeout"


class PackedRequest(UsageError):
    """The body of a request has a Content-Encoding, which the server does not decode."""

    http_status = 415
    code = "unsupported_encoding"


class DoesNotFit(VlfitError):
    """The request or model is valid, but larger than the memory or context planned for it."""

    exit_code = 3
    http_status = 400
    code = "context_length_exceeded"


class CheckpointError(VlfitError):
    """A model's files are missing, damaged or of a kind that vlfit does not run."""

    code = "checkpoint_error"


class NotACheckpoint(CheckpointError):
    """The name or path of a model leads to no checkpoint: nothing is there, or no config.json."""


class UnknownArchitecture(CheckpointError):
    """A model architecture that vlfit does not run."""


class UnknownWeightsFormat(CheckpointError):
    """A quantization format that vlfit does not read."""


class MissingFile(CheckpointError):
    """A shard, tokenizer or chat template is missing."""


class BrokenShard(CheckpointError):
    """A safetensors file is truncated or unreadable, or its weights are NaN or infinite."""


class MissingTensor(CheckpointError):
    """The shards lack a tensor that the config requires."""


class WrongShape(CheckpointError):
    """A tensor's shape contradicts the config."""


class SurplusTensor(CheckpointError):
    """The shards have a tensor that the config does not require."""


class HubError(VlfitError):
    """Talking to the model hub failed."""

    http_status = 502
    code = "hub_error"


class HubModelNotFound(HubError):
    """The hub has no such model, or it is private."""

    http_status = 404


class HubAccessDenied(HubError):
    """The model is gated, or the token is wrong."""


class HubUnreachable(HubError):
    """There is no network, or the hub does not answer."""


class NotDownloaded(HubError):
    """The model is not on this computer, and is not downloaded: downloads are off, or the hub lacks it."""


class PictureError(VlfitError):
    """A picture cannot be used."""

    http_status = 400
    code = "invalid_image"


class NotAPicture(PictureError):
    """The data is not a picture of a supported format, or is truncated or damaged."""


class PictureTooLarge(PictureError):
    """A picture has more pixels, a larger aspect ratio or a larger decoded size than the limit."""


class PictureTooCostly(PictureError):
    """Decoding a picture hit a limit: memory, CPU time or wall time. The message says which."""

    code = "image_too_costly"


class PictureNotFound(PictureError):
    """The file does not exist or cannot be read, or the URL does not return a picture."""


class PrivateAddress(PictureError):
    """A picture URL leads into a private network, which servers refuse to fetch from (SSRF)."""


class DecodersUnavailable(VlfitError):
    """The processes that decode pictures do not start, or have ended."""

    http_status = 503
    code = "decoders_unavailable"


class TemplatesUnavailable(VlfitError):
    """The process that renders chat templates does not start, or was killed or stopped."""

    http_status = 503
    code = "templates_unavailable"


class TooManyOpenFiles(VlfitError):
    """This process, or the system, has no file descriptor left for a file or connection."""

    http_status = 503
    code = "too_many_open_files"


class UnknownModel(VlfitError):
    """The request names a model that this server does not run."""

    http_status = 404
    code = "model_not_found"


class ModelDownloading(VlfitError):
    """The request names a model that is being downloaded.

    ``retry_after``: seconds after which a retry may succeed.
    """

    http_status = 503
    code = "model_downloading"

    def __init__(
        self, message: str, hint: str = "", *, param: str | None = None, retry_after: int = 30
    ) -> None:
        super().__init__(message, hint, param=param)
        self.retry_after = retry_after


class QueueFull(VlfitError):
    """The admission queue is full. ``retry_after``: seconds after which a retry may succeed."""

    http_status = 429
    code = "queue_full"

    def __init__(
        self, message: str, hint: str = "", *, param: str | None = None, retry_after: int = 1
    ) -> None:
        super().__init__(message, hint, param=param)
        self.retry_after = retry_after


class TooManyRequests(QueueFull):
    """One client exceeds its requests per minute, or its concurrent requests."""

    code = "rate_limit_exceeded"


class WrongApiKey(VlfitError):
    """The server requires an API key; the request has none, or a wrong one."""

    http_status = 401
    code = "invalid_api_key"


class ForeignOrigin(VlfitError):
    """A web page from an origin that is not allowed sent the request (CORS)."""

    http_status = 403
    code = "foreign_origin"


class ForeignHost(VlfitError):
    """The Host header names a host that this server does not serve (a defence against DNS rebinding)."""

    http_status = 403
    code = "foreign_host"


class CannotListen(VlfitError):
    """The server's address is in use, or does not belong to this computer."""

    code = "cannot_listen"


class CannotWrite(VlfitError):
    """A results file cannot be written: the disk is full, or access is denied."""

    code = "cannot_write"


class ModelFailed(VlfitError):
    """The model computed NaN or infinity."""

    code = "model_error"


class DeviceError(VlfitError):
    """The GPU is missing, broken or full."""

    code = "device_error"


class OutOfMemory(DeviceError):
    """A GPU allocation failed while a request ran."""

    http_status = 503
    code = "out_of_memory"


class CannotWake(OutOfMemory):
    """A sleeping model cannot wake: other programs hold the GPU memory that it needs.

    ``retry_after``: seconds after which a retry may succeed.
    """

    code = "cannot_wake"

    def __init__(
        self, message: str, hint: str = "", *, param: str | None = None, retry_after: int = 10
    ) -> None:
        super().__init__(message, hint, param=param)
        self.retry_after = retry_after


class VllmFailed(VlfitError):
    """vLLM ended instead of serving, after every cheaper setting was tried."""

    http_status = 503
    code = "vllm_failed"


class ServerUnreachable(VlfitError):
    """No server answers at the URL."""

    http_status = 502
    code = "server_unreachable"


class RemoteError(VlfitError):
    """A server answered with an error. ``status``: HTTP status; None if the connection broke before it."""

    http_status = 502
    code = "remote_error"

    def __init__(
        self, message: str, hint: str = "", *, param: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(message, hint, param=param)
        self.status = status


class ClusterError(VlfitError):
    """The Ray cluster cannot be reached, or cannot run the job."""

    code = "cluster_error"


class UnreadableAnswer(VlfitError):
    """The model's answer cannot be parsed as the task requires. ``answer``: its full text."""

    http_status = 502
    code = "unreadable_answer"

    def __init__(self, message: str, hint: str = "", *, answer: str) -> None:
        super().__init__(message, hint)
        self.answer = answer


class EngineStopped(VlfitError):
    """The engine is shutting down and takes no requests."""

    http_status = 503
    code = "engine_stopped"


class ServerStopping(EngineStopped):
    """A remote server is shutting down. It may come back."""


class EngineLost(EngineStopped):
    """The engine ended because of a bug, and must be started again."""

    code = "engine_lost"


def raise_if_out_of_files(error: BaseException) -> None:
    """Raise ``TooManyOpenFiles`` if ``error``, or an error that caused it, is a lack of file descriptors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            raise TooManyOpenFiles(
                f"no file descriptor is left: {cause.strerror}", "Try again in a moment."
            ) from error
        cause = cause.__cause__ or cause.__context__


_PYDANTIC_WORDS = (
    (r"^Value error, ", ""),
    (r"^Input should be a valid integer.*", "not a whole number"),
    (r"^Input should be a valid number.*", "not a number"),
    (r"^Input should be a valid boolean.*", "not true or false"),
    (r"^Input should be greater than or equal to (.*)", r"must be at least \1"),
    (r"^Input should be less than or equal to (.*)", r"must be at most \1"),
    (r"^Input should be greater than (.*)", r"must be above \1"),
    (r"^Input should be less than (.*)", r"must be below \1"),
    (r"^Input should be ", "must be "),
)


def plain_reason(message: str) -> str:
    """What pydantic says of a wrong value in plain words, ``must be at most 65535``; other text unchanged."""
    for pattern, words in _PYDANTIC_WORDS:
        message = re.sub(pattern, words, message)
    return message
