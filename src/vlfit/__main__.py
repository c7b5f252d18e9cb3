"""``python -m vlfit`` is ``vlfit``."""

import os
import signal

INTERRUPTED = 130  # exit code after Ctrl-C, by convention


def main() -> None:
    """Run ``vlfit``. Ctrl-C while its modules are imported ends it without a traceback."""
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interruptible:  # not if it is ignored, as for jobs in the background
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from vlfit.cli.main import main as run

    if is_interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
