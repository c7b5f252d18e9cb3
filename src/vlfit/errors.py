"""Every error a person can meet, as one tree.

Each class has its ``code``, its exit code on the command line and its status over HTTP.

VlfitError
├── UsageError                     exit 2, HTTP 400: what was asked for makes no sense
│   ├── InvalidRequest                 one field of a request is wrong; ``param`` names it
│   ├── RequestTooLarge                HTTP 413: the body of a request is larger than the server takes
│   ├── RequestTooSlow                 HTTP 408: the body of a request does not come
│   └── PackedRequest                  HTTP 415: the body of a request would have to be unpacked
├── DoesNotFit                     exit 3, HTTP 400: it makes sense, but is larger than the plan
├── CheckpointError                the files of a model are not what they should be
│   ├── NotACheckpoint                 the folder is missing or holds no config.json
│   ├── UnknownArchitecture            a model that vlfit does not run
│   ├── UnknownWeightsFormat           a quantization that vlfit does not read
│   ├── MissingFile                    a shard, a tokenizer or a template is not there
│   ├── BrokenShard                    a safetensors file is truncated or unreadable
│   ├── MissingTensor                  the shards lack a tensor that the config calls for
│   ├── WrongShape                     a tensor is there with another shape than the config says
│   └── SurplusTensor                  the shards hold a tensor that the config does not call for
├── HubError                       talking to the model hub failed
│   ├── HubModelNotFound               HTTP 404: no such model, or it is private
│   ├── HubAccessDenied                the model is gated or the token is wrong
│   ├── HubUnreachable                 no network, or the hub does not answer
│   └── NotDownloaded                  offline, and the model is not in the cache
├── PictureError                   HTTP 400: a picture cannot be used
│   ├── NotAPicture                    the bytes are no picture, or broken off
│   ├── PictureTooLarge                more pixels, or a longer side ratio, than is decoded
│   ├── PictureTooCostly               its decoder took more memory, CPU time or time than one picture may
│   ├── PictureNotFound                no such file, or the URL does not answer with a picture
│   └── PrivateAddress                 a URL points into a private network (servers refuse it)
├── DecodersUnavailable            HTTP 503: the processes that decode pictures do not start
├── UnknownModel                   HTTP 404: the server runs another model
├── QueueFull                      HTTP 429: as many requests run and wait as the server takes; come again
│   └── TooManyRequests                the same of one client
├── WrongApiKey                    HTTP 401: the server wants an API key, and this is not it
├── ForeignOrigin                  HTTP 403: a script of a web page whose origin is not allowed
├── ForeignHost                    HTTP 403: the Host header names a host that is not one of the server's
├── CannotListen                   the address to serve on is taken, or is not ours
├── CannotWrite                    a file that results go into takes no more: the disk is full, or refuses
├── ModelFailed                    the model computed NaN or infinity instead of words
├── DeviceError                    the GPU is missing, broken or full
│   └── OutOfMemory                    HTTP 503: an allocation failed while a request ran
│       └── CannotWake                     others have the memory of a model that sleeps; come again
├── VllmFailed                     vLLM ended instead of serving, and nothing cheaper was left to try
├── ServerUnreachable              no vlfit server answers at the URL
├── RemoteError                    a server answered with an error
├── ClusterError                   a Ray cluster cannot be reached, or cannot do the work
├── UnreadableAnswer               the model answered in another form than the task asked for
└── EngineStopped                  HTTP 503: the engine is shutting down
    └── EngineLost                     it ended by a mistake of ours, and stays so until it is started again
"""

from typing import ClassVar


class VlfitError(Exception):
    """The root of all errors that vlfit raises on purpose.

    ``message`` says what happened, with numbers. ``hint`` says what to do about it.
    ``param`` names the field of a request that is at fault, if one is.
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
        """Errors cross processes whole, whatever their constructor wants."""
        return _same_error, (type(self), self.message, dict(self.__dict__))


def _same_error(kind: type[VlfitError], message: str, fields: dict[str, object]) -> VlfitError:
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    return error


class UsageError(VlfitError):
    exit_code = 2
    http_status = 400
    code = "invalid_request"


class InvalidRequest(UsageError):
    """One field of a request is wrong."""


class RequestTooLarge(UsageError):
    http_status = 413
    code = "request_too_large"


class RequestTooSlow(UsageError):
    http_status = 408
    code = "request_timeout"


class PackedRequest(UsageError):
    """The body has a Content-Encoding."""

    http_status = 415
    code = "unsupported_encoding"


class DoesNotFit(VlfitError):
    exit_code = 3
    http_status = 400
    code = "context_length_exceeded"


class CheckpointError(VlfitError):
    code = "checkpoint_error"


class NotACheckpoint(CheckpointError): ...


class UnknownArchitecture(CheckpointError): ...


class UnknownWeightsFormat(CheckpointError): ...


class MissingFile(CheckpointError): ...


class BrokenShard(CheckpointError): ...


class MissingTensor(CheckpointError): ...


class WrongShape(CheckpointError): ...


class SurplusTensor(CheckpointError): ...


class HubError(VlfitError):
    http_status = 502
    code = "hub_error"


class HubModelNotFound(HubError):
    http_status = 404


class HubAccessDenied(HubError): ...


class HubUnreachable(HubError): ...


class NotDownloaded(HubError): ...


class PictureError(VlfitError):
    http_status = 400
    code = "invalid_image"


class NotAPicture(PictureError): ...


class PictureTooLarge(PictureError): ...


class PictureTooCostly(PictureError):
    """Decoding hit a limit of memory, CPU seconds or wall seconds, which the message names."""

    code = "image_too_costly"


class PictureNotFound(PictureError): ...


class PrivateAddress(PictureError): ...


class DecodersUnavailable(VlfitError):
    http_status = 503
    code = "decoders_unavailable"


class UnknownModel(VlfitError):
    http_status = 404
    code = "model_not_found"


class QueueFull(VlfitError):
    """As many requests run and wait as the server takes. ``retry_after``: seconds until there may be room."""

    http_status = 429
    code = "queue_full"

    def __init__(
        self, message: str, hint: str = "", *, param: str | None = None, retry_after: int = 1
    ) -> None:
        super().__init__(message, hint, param=param)
        self.retry_after = retry_after


class TooManyRequests(QueueFull):
    """One client asks too often, or too much at once."""

    code = "rate_limit_exceeded"


class WrongApiKey(VlfitError):
    http_status = 401
    code = "invalid_api_key"


class ForeignOrigin(VlfitError):
    """A web page of another origin sent the request (CORS)."""

    http_status = 403
    code = "foreign_origin"


class ForeignHost(VlfitError):
    """The Host header names a host that this server does not accept (DNS rebinding)."""

    http_status = 403
    code = "foreign_host"


class CannotListen(VlfitError):
    code = "cannot_listen"


class CannotWrite(VlfitError):
    code = "cannot_write"


class ModelFailed(VlfitError):
    code = "model_error"


class DeviceError(VlfitError):
    """The GPU is missing, broken or full."""

    code = "device_error"


class OutOfMemory(DeviceError):
    http_status = 503
    code = "out_of_memory"


class CannotWake(OutOfMemory):
    """Others have the memory of a model that sleeps. ``retry_after``: seconds until there may be room."""

    code = "cannot_wake"

    def __init__(
        self, message: str, hint: str = "", *, param: str | None = None, retry_after: int = 10
    ) -> None:
        super().__init__(message, hint, param=param)
        self.retry_after = retry_after


class VllmFailed(VlfitError):
    http_status = 503
    code = "vllm_failed"


class ServerUnreachable(VlfitError):
    http_status = 502
    code = "server_unreachable"


class RemoteError(VlfitError):
    """A server answered with an error. ``status``: of HTTP; None: the connection failed before one came."""

    http_status = 502
    code = "remote_error"

    def __init__(
        self, message: str, hint: str = "", *, param: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(message, hint, param=param)
        self.status = status


class ClusterError(VlfitError):
    code = "cluster_error"


class UnreadableAnswer(VlfitError):
    """The model answered in another form than the task asked for; ``answer`` is what it said, whole."""

    http_status = 502
    code = "unreadable_answer"

    def __init__(self, message: str, hint: str = "", *, answer: str) -> None:
        super().__init__(message, hint)
        self.answer = answer


class EngineStopped(VlfitError):
    http_status = 503
    code = "engine_stopped"


class ServerStopping(EngineStopped):
    """A server elsewhere takes nothing any more. It may be back in a while."""


class EngineLost(EngineStopped):
    code = "engine_lost"
