"""A hub checkpoint's config and headers without its weights: some hundred kilobytes by HTTP ranges.

What comes is written into a folder of sparse files as long as the real ones, so that the code that reads and
checks a whole checkpoint reads this one too.
"""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from vlfit.checkpoint import hub
from vlfit.checkpoint.any_model import AnyCheckpoint, read_any
from vlfit.checkpoint.headers import INDEX_FILE, SINGLE_FILE, shard_names
from vlfit.checkpoint.source import Checkpoint, read_checkpoint
from vlfit.errors import (
    BrokenShard,
    HubAccessDenied,
    HubError,
    HubModelNotFound,
    HubUnreachable,
    NotACheckpoint,
    NotDownloaded,
)
from vlfit.models.registry import read_config

if TYPE_CHECKING:
    import httpx


_Checkpoint = TypeVar("_Checkpoint", Checkpoint, AnyCheckpoint)

_FIRST_BYTES = 256 * 1024  # most headers of a Qwen3-VL shard are shorter
_LONGEST_HEADER = 100_000_000
_LARGEST_JSON = 20_000_000
_SILENCE_S = 10.0  # a hub that says nothing for so long is down
_PATIENCE_S = 60.0  # for all requests together
_LATER = "Check the network, or plan from the catalog (vlfit plan lists it), a folder or a downloaded model."


def read_remote(name: str) -> Checkpoint:
    """Config and headers of ``org/name`` or ``org/name@revision`` on the hub. Its ``folder`` does not stay.

    Raises ``HubError`` or one of its kinds, and ``CheckpointError`` for what is no Qwen3-VL in safetensors.
    """
    return _read(name, read_config, read_checkpoint)


def read_remote_any(name: str) -> AnyCheckpoint:
    """The same of a model of any architecture, in safetensors."""
    return _read(name, lambda _: None, read_any)


def _read(
    name: str, check: Callable[[Path], object], read: Callable[[str, Path], _Checkpoint]
) -> _Checkpoint:
    """``check`` is given the folder when its config is there and nothing else, ``read`` when all is."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        raise NotDownloaded(
            f"{name} is neither in the catalog nor in the local cache, and HF_HUB_OFFLINE forbids asking",
            "Unset HF_HUB_OFFLINE, or name a folder or a model of the catalog (vlfit plan lists it).",
        )
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    try:
        with (
            TemporaryDirectory(prefix="vlfit-plan-") as place,
            httpx.Client(headers=headers, follow_redirects=True, timeout=_SILENCE_S) as client,
        ):
            folder = Path(place)
            files = _Files(client, constants.ENDPOINT, name, folder)
            files.fetch(check)
            try:
                return read(name, folder)
            except BrokenShard as error:  # of files that nobody can look at: the folder is gone by then
                raise files.broken(error.message.replace(f"{folder}/", "")) from error
    except httpx.InvalidURL as error:
        raise HubError(
            f"HF_ENDPOINT is {constants.ENDPOINT!r}, which is no URL: {error}",
            "Unset HF_ENDPOINT, or write a whole address: HF_ENDPOINT=https://huggingface.co",
        ) from error
    except httpx.HTTPError as error:
        raise HubUnreachable(
            f"the headers of {name} could not be read from {constants.ENDPOINT}: "
            f"{type(error).__name__}: {error}",
            _LATER,
        ) from error


class _Files:
    """The files of one repository, fetched into ``folder`` as far as they are needed."""

    def __init__(self, client: "httpx.Client", endpoint: str, name: str, folder: Path) -> None:
        self.client = client
        self.endpoint = endpoint.rstrip("/")
        self.name = name
        self.repository, self.revision = hub.split_name(name)
        self.folder = folder
        self.until = time.monotonic() + _PATIENCE_S

    def fetch(self, check: Callable[[Path], object]) -> None:
        if not self._whole("config.json"):
            raise NotACheckpoint(
                f"{self.repository} on the hub holds no config.json",
                "vlfit plans for safetensors checkpoints; GGUF ones have none. Name the original model.",
            )
        check(self.folder)  # before anything is asked for that would be of no use
        self._whole(INDEX_FILE)
        for shard in shard_names(self.folder):
            self._header(shard)

    def _whole(self, file: str) -> bool:
        """Fetch a small file; False when the repository has none of that name."""
        data, total = self._bytes(file, 0, _LARGEST_JSON, optional=True)
        if total < 0:
            return False
        if not _is_object(data):
            what = "a web page" if _is_page(data) else f"{len(data):,} bytes that are no JSON object"
            raise self.broken(f"{file} came as {what}")
        (self.folder / file).write_bytes(data)
        return True

    def _header(self, file: str) -> None:
        """Fetch the header of a safetensors file; make a file as long with nothing behind it."""
        data, total = self._bytes(file, 0, _FIRST_BYTES)
        needed = 8 + int.from_bytes(data[:8], "little")
        if len(data) < needed <= min(total, _LONGEST_HEADER):
            data += self._bytes(file, len(data), needed - len(data))[0]
        with (self.folder / file).open("wb") as target:
            target.write(data[:needed] if needed <= len(data) else data)
            target.truncate(total)

    def _bytes(self, file: str, start: int, count: int, *, optional: bool = False) -> tuple[bytes, int]:
        """At most ``count`` bytes of ``file`` from ``start``, and its length (-1: optional, missing)."""
        url = f"{self.endpoint}/{self.repository}/resolve/{self.revision or 'main'}/{file}"
        with self.client.stream("GET", url, headers={"Range": f"bytes={start}-{start + count - 1}"}) as reply:
            if optional and reply.status_code == 404 and reply.headers.get("X-Error-Code") == "EntryNotFound":
                return b"", -1
            if reply.status_code not in (200, 206):
                raise self._refused(reply, file)
            # A server may send the whole file in spite of the range: what was not asked for is skipped.
            skip, data = (start, bytearray()) if reply.status_code == 200 else (0, bytearray())
            for piece in reply.iter_raw():
                data += piece
                if len(data) >= skip + count:
                    break
                if time.monotonic() > self.until:
                    raise HubUnreachable(
                        f"the hub sent {len(data):,} bytes of {file} and was too slow with the rest", _LATER
                    )
            found, total = bytes(data[skip : skip + count]), self._length(reply, file)
            if len(found) < min(count, total - start):
                raise self.broken(f"of {file} came {len(found):,} bytes of {min(count, total - start):,}")
            return found, total

    def broken(self, what: str) -> HubError:
        """The error for an answer that is not what the hub would send; ``what`` came."""
        return HubError(
            f"{self.endpoint} did not answer for {self.name} as a hub does: {what}",
            "A login page of the network, a proxy or a mirror may answer in its place: open "
            f"{self.endpoint}/{self.repository} in a browser, and try again. Or plan from the catalog "
            "(vlfit plan lists it), which needs no network.",
        )

    def _length(self, reply: "httpx.Response", file: str) -> int:
        """How long the whole file is, by what the server says of the part that it sent."""
        said = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", reply.headers.get("Content-Range", ""))
        if said:
            return int(said[1])
        if reply.status_code == 200 and reply.headers.get("Content-Length", "").isdigit():
            return int(reply.headers["Content-Length"])
        raise self.broken(f"it does not say how long {file} is")

    def _refused(self, reply: "httpx.Response", file: str) -> HubError:
        status, code = reply.status_code, reply.headers.get("X-Error-Code", "")
        if code == "GatedRepo":
            return HubAccessDenied(
                f"{self.repository} is gated: its makers want their terms accepted first",
                f"Accept them at {self.endpoint}/{self.repository}, then set HF_TOKEN to your token.",
            )
        if code == "RepoNotFound" or (status == 404 and not code):
            return HubModelNotFound(
                f"{self.endpoint} has no model {self.repository}, or it is private",
                "Check the spelling (org/name); for a private model set HF_TOKEN.",
            )
        if code == "RevisionNotFound":
            return HubModelNotFound(
                f"{self.repository} has no revision {self.revision}", "Leave @revision out for the newest."
            )
        if code == "EntryNotFound":
            what = (
                "no safetensors weights" if file == SINGLE_FILE else f"no file {file}, which its index names"
            )
            return HubModelNotFound(
                f"{self.repository} has {what}",
                "vlfit reads safetensors only (no .bin, no .gguf): look for another upload of the model.",
            )
        if status in (401, 403):
            return HubAccessDenied(
                f"the hub refused access to {self.name} (HTTP {status})",
                "The token is wrong or may not read this model: set HF_TOKEN to a valid one, or unset it.",
            )
        return HubUnreachable(f"the hub answered HTTP {status} for {self.name}", _LATER)


def _is_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


def _is_page(data: bytes) -> bool:
    return data.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html", b"<head"))
