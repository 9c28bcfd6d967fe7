"""The first signal is a flag, the second one ends the process."""

import os
import signal
import threading

import pytest

from recipes.runtime.interrupt import Interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_kept(number):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert interrupt.signal is None
        os.kill(os.getpid(), number)
        assert interrupt.signal == number
    assert signal.getsignal(number) is before


def test_a_second_interrupt_is_a_keyboard_interrupt():
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert interrupt.signal == signal.SIGTERM


def test_outside_the_main_thread_nothing_is_caught():
    seen = []

    def enter():
        with Interrupt() as interrupt:
            seen.append(interrupt.signal)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [None]
    assert signal.getsignal(signal.SIGINT) is before
