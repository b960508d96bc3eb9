"""The effect of signals on a rank, delivered for real."""

import io
import signal
import sys
from collections.abc import Iterator

import pytest

from dist_transformer.training.fault_tolerance import signals as module
from dist_transformer.training.fault_tolerance.signals import Signals

WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def signals() -> Iterator[Signals]:
    """A listener; afterwards signals do what they did before."""
    before = {number: signal.getsignal(number) for number in WATCHED}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # nohup ignores it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_ctrl_c_is_acknowledged_at_once_by_the_rank_that_speaks(
    signals: Signals, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signals.listen()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr() == ("", "stopping after this step; press Ctrl-C again to end now\n")
    for silent in (Signals(speaks=False), Signals()):
        silent.listen()
        # A request that comes from SLURM is no Ctrl-C.
        signal.raise_signal(signal.SIGINT if not silent.speaks else signal.SIGTERM)
        assert silent.received is not None
    assert capfd.readouterr() == ("", "")
    # Where nobody can read it, it is lost and nothing else happens.
    with open("/dev/full", "w") as full:
        for stderr in (full, None, io.StringIO()):
            monkeypatch.setattr(sys, "stderr", stderr)
            deaf = Signals()
            deaf.listen()
            signal.raise_signal(signal.SIGINT)
            assert deaf.received is signal.SIGINT


@pytest.mark.parametrize("number", WATCHED)
def test_a_signal_is_remembered_and_does_nothing_else(signals: Signals, number: signal.Signals) -> None:
    signals.listen()
    assert signals.received is None
    signal.raise_signal(number)
    assert signals.received is number


def test_of_several_the_first_is_remembered(signals: Signals) -> None:
    signals.listen()
    signal.raise_signal(signal.SIGUSR1)
    for number in WATCHED:
        signal.raise_signal(number)
    assert signals.received is signal.SIGUSR1


def test_before_training_signals_do_what_they_always_do(signals: Signals) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_ctrl_c_ends_at_once(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    signals.listen()
    signal.raise_signal(signal.SIGINT)
    # A launcher passes on what the terminal has delivered already: the same Ctrl-C.
    signal.raise_signal(signal.SIGINT)
    assert signals.received is signal.SIGINT
    monkeypatch.setattr(module, "_SECOND_CTRL_C_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_ignored_ctrl_c_stays_ignored(signals: Signals) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.listen()
    signal.raise_signal(signal.SIGINT)
    assert signals.received is None


def test_a_rank_that_failed_can_be_ended(signals: Signals) -> None:
    signals.listen()
    signals.forget()
    assert [signal.getsignal(number) for number in WATCHED[:3]] == [signal.SIG_DFL] * 3


def test_under_nohup_a_closed_terminal_stays_ignored(signals: Signals) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals.listen()
    signals.forget()
    signal.raise_signal(signal.SIGHUP)
    assert signals.received is None
