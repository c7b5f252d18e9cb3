"""Config and headers of a checkpoint on the hub without its weights: some 100 KB by HTTP range requests.

They are written to sparse files of the real sizes, which the code for whole checkpoints reads and checks.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlsplit

from vlfit.checkpoint import hub
from vlfit.checkpoint.any_model import AnyCheckpoint, read_any_checkpoint
from vlfit.checkpoint.headers import INDEX_FILE, MAX_HEADER_BYTES, SINGLE_FILE, is_html, shard_names
from vlfit.checkpoint.source import Checkpoint, read_checkpoint
from vlfit.errors import BrokenShard, HubError, HubUnreachable, NotACheckpoint, NotDownloaded
from vlfit.models.registry import read_config

if TYPE_CHECKING:
    import httpx


_Checkpoint = TypeVar("_Checkpoint", Checkpoint, AnyCheckpoint)

_HEADER_PREFIX_BYTES = 256 * 1024  # longer than most headers of a shard
_MAX_JSON_BYTES = 20_000_000
_READ_TIMEOUT_S = 10.0
_TOTAL_TIMEOUT_S = 60.0  # for all requests together
_PARALLEL = 8  # requests at a time
_NETWORK_HINT = (
    "Check the network, or plan from the catalog (vlfit plan lists it), a folder or a downloaded model."
)


def read_remote_checkpoint(name: str) -> Checkpoint:
    """Config and headers of ``org/name`` or ``org/name@revision`` on the hub, without the weights.

    The result is for planning only: its ``folder`` and files no longer exist on return. Gives up after a
    minute. Raises ``HubError`` or a subclass, ``NotDownloaded`` with ``HF_HUB_OFFLINE``, and
    ``CheckpointError`` for a model that vlfit does not run.
    """
    return _read(name, read_config, read_checkpoint)


def read_remote_any_checkpoint(name: str) -> AnyCheckpoint:
    """``read_remote_checkpoint`` for a safetensors model of any architecture.

    Config and headers are not checked against each other. Raises ``HubError`` or a subclass,
    ``NotDownloaded`` with ``HF_HUB_OFFLINE``, and ``CheckpointError`` for files that cannot be read.
    """
    return _read(name, lambda _: None, read_any_checkpoint)


def _read(
    name: str, check: Callable[[Path], object], read: Callable[[str, Path], _Checkpoint]
) -> _Checkpoint:
    """``check`` gets the folder as soon as its config is there, ``read`` when it is complete."""
    with remote_files(name) as files, TemporaryDirectory(prefix="vlfit-plan-") as place:
        folder = Path(place)
        files.fetch(folder, check)
        try:
            return read(name, folder)
        except BrokenShard as error:  # its path and hint are of a temporary file
            raise files.unexpected_answer(error.message.replace(f"{folder}/", "")) from error


@contextmanager
def remote_files(name: str) -> "Iterator[RemoteFiles]":
    """Within the block, the files of ``org/name`` or ``org/name@revision`` on the hub can be read in parts.

    For a minute in all. Raises ``NotDownloaded`` with ``HF_HUB_OFFLINE``, and ``HubError`` for errors of HTTP
    in the block.
    """
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        raise NotDownloaded(
            f"{name} is neither in the catalog nor in the local cache, and HF_HUB_OFFLINE is set",
            "Unset HF_HUB_OFFLINE, or name a folder or a model of the catalog (vlfit plan lists it).",
        )
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    try:
        with httpx.Client(headers=headers, follow_redirects=True, timeout=_READ_TIMEOUT_S) as client:
            yield RemoteFiles(client, constants.ENDPOINT, name)
    except httpx.InvalidURL as error:
        raise hub.endpoint_error(constants.ENDPOINT) from error
    except httpx.HTTPError as error:
        raise HubUnreachable(
            f"the headers of {name} could not be read from {constants.ENDPOINT}: "
            f"{type(error).__name__}: {error}",
            _NETWORK_HINT,
        ) from error


class RemoteFiles:
    """Reads parts of a repository's files."""

    def __init__(self, client: "httpx.Client", endpoint: str, name: str) -> None:
        self.client = client
        self.endpoint = endpoint.rstrip("/")
        self.name = name
        self.repository, self.revision = hub.split_name(name)
        self.deadline = time.monotonic() + _TOTAL_TIMEOUT_S
        self._direct: dict[str, str] = {}  # where the hub's redirects for a file lead

    def fetch(self, folder: Path, check: Callable[[Path], object]) -> None:
        """Download config and headers into ``folder``; ``check``: called as soon as the config is there."""
        if not self._fetch_json(folder, "config.json"):
            raise NotACheckpoint(
                f"{self.repository} on the hub holds no config.json",
                "Name the original model, or a repository of GGUF files by its type: org/name-GGUF:Q4_K_M.",
            )
        check(folder)
        self._fetch_json(folder, INDEX_FILE)
        for shard in shard_names(folder):
            self._fetch_header(folder, shard)

    def read_ranges(self, file: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Pieces of ``file`` by (offset, bytes), up to ``_PARALLEL`` at a time; fewer bytes at its end."""
        if len(ranges) == 1:
            return [self._read_range(file, *ranges[0])[0]]
        with ThreadPoolExecutor(min(_PARALLEL, len(ranges))) as pool:
            return [data for data, _ in pool.map(lambda part: self._read_range(file, *part), ranges)]

    def _fetch_json(self, folder: Path, file: str) -> bool:
        """Download a JSON file; False if the repository has none of that name."""
        data, total = self._read_range(file, 0, _MAX_JSON_BYTES, optional=True)
        if total < 0:
            return False
        if not _is_json_object(data):
            what = "a web page" if is_html(data) else f"{len(data):,} bytes that are not a JSON object"
            raise self.unexpected_answer(f"{file} came as {what}")
        (folder / file).write_bytes(data)
        return True

    def _fetch_header(self, folder: Path, file: str) -> None:
        """Download the header of a safetensors file into a sparse file of the same size."""
        data, total = self._read_range(file, 0, _HEADER_PREFIX_BYTES)
        needed = 8 + int.from_bytes(data[:8], "little")
        if len(data) < needed <= min(total, MAX_HEADER_BYTES):
            data += self._read_range(file, len(data), needed - len(data))[0]
        with (folder / file).open("wb") as target:
            target.write(data[:needed] if needed <= len(data) else data)
            target.truncate(total)

    def _read_range(self, file: str, start: int, count: int, *, optional: bool = False) -> tuple[bytes, int]:
        """Up to ``count`` bytes of ``file`` from ``start``, and its size (-1: ``optional`` and missing)."""
        url = f"{self.endpoint}/{self.repository}/resolve/{self.revision or 'main'}/{quote(file)}"
        headers = {"Range": f"bytes={start}-{start + count - 1}"}
        direct = self._direct.get(file)
        with self._get(direct or url, headers) as reply:
            if direct is not None and reply.status_code in (401, 403, 404):  # it has expired
                self._direct.pop(file, None)
                return self._read_range(file, start, count)
            if reply.history:
                self._direct[file] = str(reply.url)
            if optional and reply.status_code == 404 and reply.headers.get("X-Error-Code") == "EntryNotFound":
                return b"", -1
            if reply.status_code not in (200, 206):
                raise self._status_error(reply, file)
            # A server may ignore the range and send the whole file.
            skip, data = (start, bytearray()) if reply.status_code == 200 else (0, bytearray())
            if skip > MAX_HEADER_BYTES:
                raise self.unexpected_answer(f"it does not send parts of {file}")
            for piece in reply.iter_raw():
                data += piece
                if len(data) >= skip + count and not _ends_at(reply, len(data)):
                    break  # a reply that is read to its end leaves the connection open
                if time.monotonic() > self.deadline:
                    raise HubUnreachable(
                        f"the hub sent {len(data):,} bytes of {file} and was too slow with the rest",
                        _NETWORK_HINT,
                    )
            found, total = bytes(data[skip : skip + count]), self._file_size(reply, file)
            if len(found) < min(count, total - start):
                raise self.unexpected_answer(
                    f"{len(found):,} of {min(count, total - start):,} bytes of {file} came"
                )
            return found, total

    def _get(self, url: str, headers: dict[str, str]) -> "AbstractContextManager[httpx.Response]":
        """A reply whose body is not read yet. Servers other than the hub's own do not see the token."""
        request = self.client.build_request("GET", url, headers=headers)
        if urlsplit(url).netloc != urlsplit(self.endpoint).netloc:
            request.headers.pop("Authorization", None)

        @contextmanager
        def reply() -> "Iterator[httpx.Response]":
            found = self.client.send(request, stream=True)
            try:
                yield found
            finally:
                found.close()

        return reply()

    def unexpected_answer(self, what: str) -> HubError:
        """The error for ``what`` a hub would not send."""
        return HubError(
            f"{self.endpoint} answered for {self.name} unlike a hub: {what}",
            f"Open {self.endpoint}/{self.repository} in a browser: a login page, a proxy or a mirror may "
            "answer in its place. Or plan from the catalog (vlfit plan lists it), which needs no network.",
        )

    def _file_size(self, reply: "httpx.Response", file: str) -> int:
        """Size of the whole file, from the headers of ``reply``."""
        said = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", reply.headers.get("Content-Range", ""))
        if said:
            return int(said[1])
        if reply.status_code == 200 and reply.headers.get("Content-Length", "").isdigit():
            return int(reply.headers["Content-Length"])
        raise self.unexpected_answer(f"it does not give the size of {file}")

    def _status_error(self, reply: "httpx.Response", file: str) -> HubError:
        status, code = reply.status_code, reply.headers.get("X-Error-Code", "")
        if code == "GatedRepo":
            return hub.gated_error(self.repository, self.endpoint)
        if code == "RepoNotFound" or (status == 404 and not code):
            return hub.no_model_error(self.repository, self.endpoint)
        if code == "RevisionNotFound":
            return hub.no_revision_error(self.repository, self.revision)
        if code == "EntryNotFound":
            is_single = file == SINGLE_FILE
            missing = "no safetensors weights" if is_single else f"no file {file}, which its index names"
            return hub.no_file_error(self.repository, missing)
        return hub.status_error(status, self.name, _NETWORK_HINT)


def _ends_at(reply: "httpx.Response", count: int) -> bool:
    """Whether ``reply`` says that it has ``count`` bytes."""
    return str(reply.headers.get("Content-Length")) == str(count)


def _is_json_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False
