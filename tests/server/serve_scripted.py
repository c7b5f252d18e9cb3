"""A server process without a model, for tests: ``python -m tests.server.serve_scripted``.

Takes a port; prints ``ready`` and the port when connections are taken, ``stopped`` after a stop in order.
"""

import sys

from tests.server.scripted import ScriptedBackend
from vlfit.errors import VlfitError
from vlfit.server.address import bind
from vlfit.server.app import create_app
from vlfit.server.listen import serve_until_stopped
from vlfit.server.settings import ServerSettings


def main() -> None:
    settings = ServerSettings()
    backend = ScriptedBackend(words=("word ",) * 1000, delay=0.05)
    try:
        with bind("127.0.0.1", int(sys.argv[1])) as listener:
            port = listener.getsockname()[1]
            serve_until_stopped(
                create_app(backend, settings),
                listener,
                settings,
                lambda: print("ready", port, flush=True),
            )
    except VlfitError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print("stopped", flush=True)


if __name__ == "__main__":
    main()
