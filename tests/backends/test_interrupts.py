"""Ctrl-C is delayed, never lost."""

import signal
import threading

import pytest

from vlfit.backends.in_process import defer_interrupts


def test_interrupt_comes_after_the_block() -> None:
    steps: list[str] = []

    def work() -> None:
        with defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            steps.append("the block went on")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens() -> None:
    before = signal.getsignal(signal.SIGINT)
    with defer_interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_errors_in_the_block_pass_through() -> None:
    with pytest.raises(ValueError, match="mine"), defer_interrupts():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_left_alone() -> None:
    handlers = []

    def work() -> None:
        with defer_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
