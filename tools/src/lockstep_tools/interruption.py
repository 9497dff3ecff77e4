"""Which signals end a command. It installs no handler."""

import signal


def stopping_signals(*numbers: signal.Signals) -> tuple[signal.Signals, ...]:
    """These signals, and SIGHUP unless the command was started to ignore it, as `nohup` does."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return numbers if is_ignored else (*numbers, signal.SIGHUP)
