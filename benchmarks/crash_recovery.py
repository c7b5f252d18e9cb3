"""A server whose process is killed: time until its clients get an error, and until it answers again.

    python -m benchmarks.crash_recovery                      mini on the CPU, three times: half a minute
    python -m benchmarks.crash_recovery --model FOLDER --device cuda

With `--restart` a relay keeps the connections: when the process is killed, one client reads a stream, one
waits for a whole answer, and a third sends a request when the process is dead. Printed for each kill: seconds
until each client had its error, and ``back_s``, until a request was answered again; at the end what the
server logged about its starts.

Exit code 1 if a client waited longer than 2 s or got anything but `engine_died` (503, or an event of the
stream), or if the server was not back within 10 s: limits for mini on a machine without other work.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import httpx

from benchmarks.harness import argument_parser
from benchmarks.serving import ServerProcess

MAX_ERROR_S, MAX_BACK_S = 2.0, 10.0
TIMEOUT = 120.0
LONG = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 3000, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 2}


class Errors:
    """When each client got its error, and which one."""

    def __init__(self) -> None:
        self.by_client: dict[str, tuple[float, str]] = {}
        self.streaming = threading.Event()

    def read_stream(self, url: str) -> None:
        body = {**LONG, "stream": True, "loop_guard": False}
        with httpx.stream("POST", url, json=body, timeout=TIMEOUT) as answer:
            for line in answer.iter_lines():
                self.streaming.set()
                if '"error"' in line:
                    code = json.loads(line.removeprefix("data: "))["error"]["code"]
                    self.by_client["stream"] = (time.perf_counter(), code)

    def wait_for_answer(self, url: str, client: str) -> None:
        answer = httpx.post(url, json={**LONG, "loop_guard": False}, timeout=TIMEOUT)
        code = answer.json().get("error", {}).get("code")
        self.by_client[client] = (time.perf_counter(), f"{answer.status_code} {code}")


def kill_once(server: ServerProcess) -> dict[str, Any]:
    """Kill the server's engine process under two clients; what they and a third one got."""
    url = f"{server.url}/v1/chat/completions"
    errors = Errors()
    clients = [
        threading.Thread(target=errors.read_stream, args=(url,), daemon=True),
        threading.Thread(target=errors.wait_for_answer, args=(url, "whole"), daemon=True),
    ]
    for client in clients:
        client.start()
    errors.streaming.wait(TIMEOUT)
    time.sleep(0.2)
    os.kill(int(server.get("/v1/vlfit/status")["pid"]), signal.SIGKILL)
    killed_at = time.perf_counter()
    time.sleep(0.05)
    errors.wait_for_answer(url, "later")
    for client in clients:
        client.join(TIMEOUT)
    back_at = wait_until_back(url)
    return {
        "told_s": {name: round(at - killed_at, 3) for name, (at, _) in errors.by_client.items()},
        "codes": {name: code for name, (_, code) in errors.by_client.items()},
        "back_s": round(back_at - killed_at, 2),
    }


def wait_until_back(url: str) -> float:
    deadline = time.perf_counter() + TIMEOUT
    while time.perf_counter() < deadline:
        if httpx.post(url, json=SHORT, timeout=TIMEOUT).status_code == 200:
            return time.perf_counter()
        time.sleep(0.02)
    raise TimeoutError(f"not back after {TIMEOUT:.0f} s")


def problems_of(row: dict[str, Any]) -> list[str]:
    problems = [
        f"{name} got its error after {seconds} s"
        for name, seconds in row["told_s"].items()
        if seconds > MAX_ERROR_S
    ]
    problems += [f"{name} got no error" for name in ("stream", "whole", "later") if name not in row["told_s"]]
    problems += [
        f"{name} got {code}" for name, code in row["codes"].items() if not str(code).endswith("engine_died")
    ]
    if row["back_s"] > MAX_BACK_S:
        problems.append(f"it was back after {row['back_s']} s")
    return problems


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    problems: list[str] = []
    arguments = [options.model, "--device", options.device, "--restart"]
    with ServerProcess(arguments, None) as server:
        print(json.dumps({"first_start_s": round(server.ready_s, 2)}))
        for _ in range(options.times):
            row = kill_once(server)
            print(json.dumps(row))
            problems += problems_of(row)
        print("\n".join(line for _, line in server.log if "after " in line))
    print("\n".join(problems) or "all within the limits")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
