"""Weights & Biases: one run, and one for each model in the same group. WANDB_MODE=offline writes
files only; `out` is their folder."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.base.errors import UserError
from slipstream.reporting.tracking.tracker import WHOLE, FollowedRun, Memory, Point, Tracker


class WeightsAndBiases(Tracker):
    """Logs points with their step as a value of its own, since its steps can only grow."""

    def __init__(self, about: FollowedRun, memory: Memory) -> None:
        import wandb

        super().__init__(about, memory)
        self._wandb: Any = wandb
        self._runs: dict[str, Any] = {}
        self._is_offline = os.environ.get("WANDB_MODE") == "offline"

    def _get_run(self, part: str) -> Any:
        if part not in self._runs:
            if part not in self.remote:
                self.remote[part] = secrets.token_hex(4)
                self.memory.save()
            if self.about.out is not None:
                Path(self.about.out).mkdir(parents=True, exist_ok=True)
            settings = self._wandb.Settings(silent=True, console="off", x_disable_stats=True)
            try:
                self._runs[part] = self._wandb.init(
                    project=self.about.project,
                    id=self.remote[part],
                    name=f"{self.about.name} {part}".strip(),
                    group=self.about.name,
                    job_type=part.partition("-")[0] or "run",
                    config=self.get_settings(part),
                    dir=self.about.out,
                    resume=None if self._is_offline else "allow",
                    reinit="create_new",
                    settings=settings,
                )
            except (self._wandb.Error, OSError) as error:
                reason = str(error).rstrip(".")
                raise UserError(
                    f"wandb: {reason}; log in, or set WANDB_MODE=offline to write files only"
                ) from None
            self._runs[part].define_metric("*", step_metric="step")
        return self._runs[part]

    def send(self, points: Sequence[Point]) -> None:
        lines: dict[tuple[str, int, float], dict[str, float]] = {}
        for point in points:
            line = lines.setdefault((point.part, point.step, point.at), {})
            line[point.name] = point.value
        for (part, step, logged_at), values in lines.items():
            self._get_run(part).log(values | {"step": step, "logged_at": logged_at})

    def begin_anew(self) -> None:
        """Remove the runs: their files in offline mode, else those on the server."""
        self.close()
        folder = Path(self.about.out or ".") / "wandb"
        for part, name in list(self.remote.items()):
            for files in folder.glob(f"offline-run-*-{name}"):
                shutil.rmtree(files, ignore_errors=True)
            if not self._is_offline:
                with suppress(self._wandb.Error, OSError):  # somebody has deleted it
                    self._wandb.Api().run(f"{self.about.project}/{name}").delete()
            del self.remote[part]

    def find_missing(self, points: Sequence[Point]) -> None:
        """Nothing says which of them have arrived."""

    def end_part(self, part: str, state: str) -> None:
        if part in self._runs:
            self._runs[part].summary["state"] = state
            self._runs.pop(part).finish()

    def stop(self) -> None:
        """`close` ends the runs; they go on with the next follower."""

    def finish(self, figures: Sequence[Point], files: dict[str, Path]) -> None:
        run = self._get_run(WHOLE)
        run.summary.update({figure.name: figure.value for figure in figures})
        pictures = [file for file in files.values() if file.suffix == ".png"]
        if pictures:
            run.log({file.stem: self._wandb.Image(str(file)) for file in pictures})
        artifact = self._wandb.Artifact(f"{self.about.name.replace('/', '-')}-files", type="run")
        for name, file in files.items():
            artifact.add_file(str(file), name=name)
        run.log_artifact(artifact)

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()
        self._runs = {}

    def describe(self) -> str:
        place = f"project {self.about.project!r}, group {self.about.name!r}"
        files = Path(self.about.out or ".") / "wandb" / "offline-run-*"
        return f"{place} (wandb sync {files})" if self._is_offline else place
