"""A server whose process is killed while it answers: how soon its clients are told, and when it is back.

    python -m benchmarks.killed                          mini on the CPU, three times
    python -m benchmarks.killed --model FOLDER --device cuda

With `--restart` a relay holds the connections: one client streams, one waits for a whole answer, one asks
when the process is dead already. Each tells how long after the kill it had its error, in seconds, and
``back_s`` is when a request was answered again; what the server said of each start comes last.

Exit code 1 if somebody was told later than 2 s, otherwise than by 503 or an event that says so, or if it was
not back within 10 s: limits for mini on a machine without other work.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import httpx

from benchmarks.served import Served

MOST_TOLD, MOST_BACK = 2.0, 10.0
PATIENCE = 120.0
LONG = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 3000, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 2}


def streamed(url: str, found: dict[str, Any], begun: threading.Event) -> None:
    with httpx.stream(
        "POST", url, json={**LONG, "stream": True, "loop_guard": False}, timeout=PATIENCE
    ) as answer:
        for line in answer.iter_lines():
            begun.set()
            if '"error"' in line:
                found["stream"] = (
                    time.perf_counter(),
                    json.loads(line.removeprefix("data: "))["error"]["code"],
                )


def whole(url: str, name: str, found: dict[str, Any]) -> None:
    answer = httpx.post(url, json={**LONG, "loop_guard": False}, timeout=PATIENCE)
    code = answer.json().get("error", {}).get("code")
    found[name] = (time.perf_counter(), f"{answer.status_code} {code}")


def killed(served: Served) -> dict[str, Any]:
    """One kill, and what came of it."""
    url = f"{served.url}/v1/chat/completions"
    found: dict[str, Any] = {}
    begun = threading.Event()
    clients = [
        threading.Thread(target=streamed, args=(url, found, begun), daemon=True),
        threading.Thread(target=whole, args=(url, "whole", found), daemon=True),
    ]
    for client in clients:
        client.start()
    begun.wait(PATIENCE)
    time.sleep(0.2)
    os.kill(int(served.ask("/v1/vlfit/status")["pid"]), signal.SIGKILL)
    at = time.perf_counter()
    time.sleep(0.05)
    whole(url, "later", found)
    for client in clients:
        client.join(PATIENCE)
    back = answered_again(url)
    told = {name: round(when - at, 3) for name, (when, _) in found.items()}
    return {
        "told_s": told,
        "codes": {name: code for name, (_, code) in found.items()},
        "back_s": round(back - at, 2),
    }


def answered_again(url: str) -> float:
    end = time.perf_counter() + PATIENCE
    while time.perf_counter() < end:
        if httpx.post(url, json=SHORT, timeout=PATIENCE).status_code == 200:
            return time.perf_counter()
        time.sleep(0.02)
    raise TimeoutError(f"not back after {PATIENCE:.0f} s")


def wrong(row: dict[str, Any]) -> list[str]:
    found = [f"{name} was told after {late} s" for name, late in row["told_s"].items() if late > MOST_TOLD]
    found += [f"{name} heard nothing" for name in ("stream", "whole", "later") if name not in row["told_s"]]
    found += [
        f"{name} got {code}" for name, code in row["codes"].items() if not str(code).endswith("engine_died")
    ]
    return found + ([f"it was back after {row['back_s']} s"] if row["back_s"] > MOST_BACK else [])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    found: list[str] = []
    arguments = [options.model, "--device", options.device, "--restart"]
    with Served(arguments, None) as served:
        print(json.dumps({"first_start_s": round(served.ready_s, 2)}))
        for _ in range(options.times):
            row = killed(served)
            print(json.dumps(row))
            found += wrong(row)
        print("\n".join(line for _, line in served.told if "after " in line))
    print("\n".join(found) or "all within the limits")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
