"""The exceptions that leave Slipstream.

Exception
├── UserError          a mistake in the config, the data or the call; exit code 2
│   ├── DivergedError  no model reached a finite loss with these settings
│   └── StorageError   object storage cannot be reached; a run that trains then can be resumed
├── ResumableError     the run ended early, but can be resumed from there; exit code 75
└── Interrupted        Ctrl-C, SIGTERM or SIGUSR1, after the run was saved; exit code 130, 143 or 75

Any other exception is a bug and exits with 1.
"""

import signal

from slipstream.base.text import escape_controls

EXIT_RESUMABLE = 75
"""The exit code of a run that stopped early and can be resumed"""
WARNING: signal.Signals | None = getattr(signal, "SIGUSR1", None)
"""With which batch systems warn of a time limit; Windows has no such signal"""


class UserError(Exception):
    """A mistake in the config, the data or a call.

    The message says which setting, file or line is wrong, its value, what is accepted and the fix.

    Example:
        try:
            slipstream.train("job.toml")
        except slipstream.UserError as error:
            print(error)
    """

    def __str__(self) -> str:
        """Return the message; a terminal must not act on what it quotes from files."""
        return escape_controls(super().__str__())


class DivergedError(UserError):
    """Training ended without a finite validation loss; a search records it as a failed trial."""


class StorageError(UserError):
    """Object storage cannot be reached, or denies access."""


class ResumableError(Exception):
    """Something outside ended the run, such as a full disk or a read-only folder; it can resume."""


class Interrupted(Exception):
    """Ctrl-C, SIGTERM or SIGUSR1 stopped a run, after it saved a checkpoint.

    Attributes:
        signal_number: The signal.
        exit_code: The exit code of the command: 130, 143, or 75 for SIGUSR1, with which batch
            systems warn of a time limit.

    Example:
        try:
            slipstream.train("job.toml", on_event=show)
        except slipstream.Interrupted as stop:
            sys.exit(stop.exit_code)
    """

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        is_warning = signal_number == WARNING
        self.exit_code = EXIT_RESUMABLE if is_warning else 128 + signal_number
