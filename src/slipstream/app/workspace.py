"""The folder that the app shows, and the options that it was started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from slipstream.app.jobs import JobStore, Supervisor
from slipstream.app.rows import RowCache
from slipstream.app.tables.service import Tables, Uploads
from slipstream.base.run_names import OUT
from slipstream.reporting.run_rows import looks_like_run


@dataclass(frozen=True)
class Workspace:
    """One folder in the browser."""

    folder: Path
    """Absolute, links resolved"""
    allow_code: bool = False
    """Whether configs may name classes to import"""
    warm: bool = True
    """Whether a worker waits with torch imported"""
    rows: RowCache = field(default_factory=RowCache)

    @cached_property
    def store(self) -> JobStore:
        return JobStore(self.folder)

    @cached_property
    def supervisor(self) -> Supervisor:
        return Supervisor(self.store, warm=self.warm)

    @cached_property
    def tables(self) -> Tables:
        return Tables(self.store.root / "tables")

    @cached_property
    def uploads(self) -> Uploads:
        return Uploads(self.folder)

    @property
    def out(self) -> Path:
        """The folder of new runs: `runs` below the folder, or the folder itself where it holds runs
        already."""
        runs = self.folder / OUT
        if runs.is_dir():
            return runs
        return self.folder if self.folder.name == OUT or self._holds_runs() else runs

    def _holds_runs(self) -> bool:
        try:
            return any(map(looks_like_run, self.folder.iterdir()))
        except OSError:
            return False

    @property
    def run_folders(self) -> tuple[Path, ...]:
        """The folders whose runs are listed."""
        return (self.folder / OUT, self.folder)
