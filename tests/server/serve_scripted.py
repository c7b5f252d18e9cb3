"""A server process without a model, for tests: ``python -m tests.server.serve_scripted``.

Arguments: a port; ``kept`` to run under the supervisor (``broken``: restarts fail; ``faulty``: the engine is
lost once; ``slow``: wait for a line on stdin before starting, and before exiting after such a loss);
``drain_seconds=600``, ``term_seconds=600``. Prints ``ready`` and the port once connections are accepted,
``stopped`` after a graceful stop.
"""

import os
import sys

from tests.server.scripted import ScriptedBackend
from vlfit.errors import VlfitError
from vlfit.server.app import create_app
from vlfit.server.http.listen import bind, serve_until_stopped
from vlfit.server.server_settings import ServerSettings
from vlfit.server.supervisor import supervise


def main() -> None:
    backend = ScriptedBackend(words=("word ",) * 10_000, delay=0.05)
    try:
        with bind("127.0.0.1", int(sys.argv[1])) as listener:
            port = listener.getsockname()[1]
            kept = supervise(listener) if "kept" in sys.argv else None
            if "slow" in sys.argv:
                print("starting", port, flush=True)
                sys.stdin.readline()
            if "broken" in sys.argv and kept and kept.restarts:
                os._exit(9)

            given = dict(word.split("=") for word in sys.argv if "=" in word)
            settings = ServerSettings(
                drain_seconds=float(given.get("drain_seconds", 1)),
                term_seconds=float(given.get("term_seconds", 30)),
                restarts=kept.restarts if kept else 0,
            )

            def ready() -> None:
                if kept:
                    kept.mark_ready()
                print("ready", port, flush=True)

            if "faulty" in sys.argv and not settings.restarts:
                backend.error = RuntimeError("CUDA error: an illegal memory access was encountered")
            app = create_app(backend, settings)
            serve_until_stopped(app, [kept.listener if kept else listener], settings, ready)
            if app.state.shutdown.crashed:
                if kept:
                    kept.mark_lost()
                if "slow" in sys.argv:
                    sys.stdin.readline()
                os._exit(70)
    except VlfitError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print("stopped", flush=True)


if __name__ == "__main__":
    main()
