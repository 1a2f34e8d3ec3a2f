"""The exceptions that leave Slipstream.

Exception
├── UserError          a mistake in the config, the data or the call; exit code 2
│   └── DivergedError  no model reached a finite loss with these settings
├── ResumableError     the run ended early, but can be resumed from there; exit code 75
└── Interrupted        Ctrl-C or SIGTERM, after the run was saved; exit code 130 or 143

Any other exception is a bug and exits with 1.
"""

from slipstream.text import escape_controls


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


class ResumableError(Exception):
    """Something outside ended the run, such as a full disk or a read-only folder; it can resume."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM stopped a run, after it saved a checkpoint.

    Attributes:
        signal_number: The signal.

    Example:
        try:
            slipstream.train("job.toml", watch=watch)
        except slipstream.Interrupted as stop:
            sys.exit(128 + stop.signal_number)
    """

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
