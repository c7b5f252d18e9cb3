"""``python -m vlfit`` is ``vlfit``."""

import os  # Python has it already

INTERRUPTED = 130  # exit code after Ctrl-C, by convention


def main() -> None:
    """Run ``vlfit``. Ctrl-C ends it without a traceback from here on, with one while Python starts."""
    import _signal  # type: ignore[import-not-found]  # not signal, which imports enum first

    is_interruptible = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    if is_interruptible:  # not if it is ignored, as for jobs in the background
        _signal.signal(_signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from vlfit.cli.main import main as run

    try:
        if is_interruptible:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
