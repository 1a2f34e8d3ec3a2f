"""The exceptions that leave Slipstream.

Exception
├── UserError      a mistake in the config, the data or the call; exit code 2
│   └── Diverged   no model reached a finite loss with these settings
├── Resumable      the run could not end as it should, but can go on from there; exit code 75
└── Interrupted    Ctrl-C or SIGTERM, after what was reached has been saved; exit code 130 or 143

Anything else that escapes is our fault and exits with 1.
"""


class UserError(Exception):
    """Says which setting, file or line is wrong, what was found, what is accepted and the fix."""


class DivergedError(UserError):
    """Training ended without a finite validation loss, which a search takes as a finding."""


class ResumableError(Exception):
    """Something outside of the run ended it: a full disk, a folder that cannot be written to."""


class Interrupted(Exception):
    """Training was asked to stop; `signal_number` says by which signal."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
