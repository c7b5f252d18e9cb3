"""A model hub on this computer: enough of huggingface.co's HTTP for huggingface_hub to list and download.

It can cut a connection in the middle of a file, stall there, gate a model, ask for a token, or fail. It keeps
a list of what was asked, so that a test can tell a resumed download from a new one.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

GOOD_TOKEN = "hf_goodtoken"
LARGE = 100_000  # bytes from which a file is kept as LFS, as the hub does with weights


@dataclass
class HubRepository:
    """One model on the hub.

    ``cut_after`` breaks the transfer of each file once, after so many bytes; ``stall_after`` stops sending
    there and sets ``stalled``, until the server stops.
    """

    files: dict[str, bytes]
    commit: str = "a" * 40
    gated: bool = False
    private: bool = False
    cut_after: int | None = None
    stall_after: int | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    fail_with: int | None = None
    cuts: set[str] = field(default_factory=set)
    _ids: dict[str, tuple[bytes, str, str]] = field(default_factory=dict)

    def ids(self, path: str) -> tuple[str, str]:
        """What git and LFS call the file ``path``; kept, as hashes of models take long."""
        data = self.files[path]
        known = self._ids.get(path)
        if known is None or known[0] is not data:
            lfs = hashlib.sha256(data).hexdigest() if len(data) >= LARGE else ""
            known = self._ids[path] = (data, _git_id(data), lfs)
        return known[1:]

    def etag(self, path: str) -> str:
        """The name of a file's content for caches: that of LFS, where it is kept there."""
        git, lfs = self.ids(path)
        return lfs or git


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    bytes_from: int


class Hub:
    """The server. Give it folders with ``add``; ``url`` is what goes into ``HF_ENDPOINT``."""

    def __init__(self) -> None:
        self.repositories: dict[str, HubRepository] = {}
        self.requests: list[Request] = []
        self.bytes_sent = 0  # of files, whole answers only
        self.stopping = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name: str, folder: Path, **options: Any) -> HubRepository:
        """Offer the files of ``folder`` as the model ``name``."""
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        self.repositories[name] = HubRepository(files, **options)
        return self.repositories[name]

    def downloads(self, file: str) -> list[Request]:
        """The GET requests that asked for the contents of ``file``, in order; redirects are not counted."""
        large = any(len(kept.files.get(file, b"")) >= LARGE for kept in self.repositories.values())
        home = "/storage/" if large else "/"
        return [
            request
            for request in self.requests
            if request.method == "GET" and request.path.startswith(home) and request.path.endswith(f"/{file}")
        ]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    hub.start()
    try:
        yield hub
    finally:
        hub.stop()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # headers and body are written one after the other

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(Request(self.command, path, self._bytes_from()))
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"] and len(parts) >= 4:
                self._answer_api("/".join(parts[2:4]), parts[4:])
            elif len(parts) == 4 and parts[0] == "storage":
                self._send_file(hub.repositories["/".join(parts[1:3])], parts[3])
            elif len(parts) >= 5 and parts[2] == "resolve":
                self._answer_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
            else:
                self._refuse(404, "EntryNotFound", "no such page")

        def _answer_api(self, name: str, rest: list[str]) -> None:
            """``/api/models/NAME``, ``.../revision/REVISION`` and ``.../tree/REVISION``."""
            repository = self._repository(name)
            if repository is None:
                return
            if rest and not self._knows(repository, rest[1] if len(rest) > 1 else "main"):
                return
            if rest[:1] == ["tree"]:
                self._send_json([_tree_entry(repository, path) for path in repository.files])
            else:
                siblings = [{"rfilename": path} for path in repository.files]
                facts = {"id": name, "sha": repository.commit, "siblings": siblings}
                self._send_json(facts | _config_facts(repository))

        def _answer_file(self, name: str, revision: str, path: str) -> None:
            repository = self._repository(name)
            if repository is None or not self._knows(repository, revision):
                return
            if repository.gated and self._token() != GOOD_TOKEN:
                self._refuse(403, "GatedRepo", "accept the terms first")
                return
            if path not in repository.files:
                self._refuse(404, "EntryNotFound", "no such file")
            elif len(repository.files[path]) >= LARGE:
                self._send_elsewhere(repository, name, path)
            else:
                self._send_file(repository, path)

        def _send_elsewhere(self, repository: HubRepository, name: str, path: str) -> None:
            """Large files lie on another server; the hub says where, how large and with which checksum."""
            data = repository.files[path]
            self.send_response(302)
            self.send_header("Location", f"{hub.url}/storage/{name}/{path}")
            self.send_header("X-Repo-Commit", repository.commit)
            self.send_header("X-Linked-Etag", f'"{repository.etag(path)}"')
            self.send_header("X-Linked-Size", str(len(data)))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _repository(self, name: str) -> HubRepository | None:
            token = self._token()
            if token not in (None, GOOD_TOKEN):
                self._refuse(401, None, "Invalid credentials in Authorization header")
                return None
            repository = hub.repositories.get(name)
            if repository is None or (repository.private and token is None):
                # The hub does not tell strangers which private models there are.
                self._refuse(401, "RepoNotFound", "Repository not found")
                return None
            if repository.fail_with is not None:
                self._refuse(repository.fail_with, None, "the hub is down")
                return None
            return repository

        def _knows(self, repository: HubRepository, revision: str) -> bool:
            known = revision in ("main", repository.commit)
            if not known:
                self._refuse(404, "RevisionNotFound", "no such revision")
            return known

        def _token(self) -> str | None:
            header = self.headers.get("Authorization", "")
            return header.removeprefix("Bearer ") or None

        def _bytes_from(self) -> int:
            wanted = self.headers.get("Range", "")
            return int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0

        def _bytes_to(self, size: int) -> int:
            """Where the piece that was asked for ends; ``size`` without an end."""
            end = self.headers.get("Range", "").rpartition("-")[2]
            return min(int(end) + 1, size) if end else size

        def _send_file(self, repository: HubRepository, path: str) -> None:
            data = repository.files[path]
            start, end = self._bytes_from(), self._bytes_to(len(data))
            is_part = start > 0 or end < len(data)
            self.send_response(206 if is_part else 200)
            self.send_header("X-Repo-Commit", repository.commit)
            self.send_header("ETag", f'"{repository.etag(path)}"')
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(end - start))
            if is_part:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
            self.end_headers()
            if self.command == "HEAD":
                return
            left = end - start
            cut, stall = repository.cut_after, repository.stall_after
            if stall is not None and stall < left:
                self.wfile.write(data[start : start + stall])
                repository.stalled.set()
                hub.stopping.wait()
                self.close_connection = True
            elif cut is not None and cut < left and path not in repository.cuts:
                repository.cuts.add(path)
                self.wfile.write(data[start : start + cut])
                self.close_connection = True
            else:
                self.wfile.write(data[start:end])
                hub.bytes_sent += end - start

        def _send_json(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def _refuse(self, status: int, code: str | None, message: str) -> None:
            body = json.dumps({"error": message}).encode()
            self.send_response(status)
            if code is not None:
                self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler


def _git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _config_facts(repository: HubRepository) -> dict[str, Any]:
    """What the hub tells of a model's config.json without sending it; nothing where it cannot be read."""
    try:
        config = json.loads(repository.files["config.json"])
        told = {name: config[name] for name in ("architectures", "model_type")}
    except (KeyError, ValueError, TypeError):
        return {}
    return {"config": told, "library_name": "transformers"}


def _tree_entry(repository: HubRepository, path: str) -> dict[str, Any]:
    git, lfs = repository.ids(path)
    size = len(repository.files[path])
    entry: dict[str, Any] = {"type": "file", "path": path, "size": size, "oid": git}
    if lfs:
        entry["lfs"] = {"oid": lfs, "size": size, "pointerSize": 134}
    return entry
