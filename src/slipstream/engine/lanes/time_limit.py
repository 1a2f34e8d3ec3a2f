"""The time limit of a training: when it is over, and schedules that are fitted to what is left."""

import math
import time

from slipstream.engine.lanes import schedule
from slipstream.engine.parallel.ranks import Ranks
from slipstream.engine.state import TrainingState

FIRST_PACE, MAX_PACES = 0.05, 200
"""Share of the time after which schedules follow it, and how often they are fitted to it at most"""


class TimeLimit:
    """`train.minutes` of the lanes that train; the first rank's clock counts."""

    def __init__(self, state: TrainingState, ranks: Ranks | None) -> None:
        self.state, self.ranks = state, ranks
        self.started_at = time.perf_counter() - state.train_s - state.validate_s
        self.paced_at = self.measure_elapsed()
        """When the schedules were last fitted to the time"""

    def is_over(self) -> bool:
        return self.measure_elapsed() > self._find_seconds()

    def measure_elapsed(self) -> float:
        """The seconds of training so far, validations and earlier parts of the run included."""
        elapsed_s = time.perf_counter() - self.started_at
        return elapsed_s if self.ranks is None else self.ranks.lead(elapsed_s)

    def _find_seconds(self) -> float:
        minutes = [one.train.minutes for _, one in self.state.list_active()]
        return min((60 * limit for limit in minutes if limit), default=math.inf)

    def fit_schedules(self, launched: int) -> None:
        """Fit the schedules to the time that is left, where it ends before the epochs do.

        `launched` steps are under way. The speed is that of all steps so far but the first ones; in
        the first part of the time it is not known well enough.
        """
        state, limit_s, now_s = self.state, self._find_seconds(), self.measure_elapsed()
        is_known = state.steps > 0 and now_s >= FIRST_PACE * limit_s
        if not is_known or now_s < self.paced_at + limit_s / MAX_PACES:
            return
        self.paced_at = now_s
        since_s, since_steps = state.timed_from or (0.0, 0)
        if state.steps == since_steps:
            since_s, since_steps = 0.0, 0
        steps_in_time = (limit_s - now_s) * (state.steps - since_steps) / (now_s - since_s)
        epochs = {}
        for place, one in state.list_active():
            at, num_steps = one.progress, state.program.num_steps(place)
            epoch = at.next_epoch()._replace(step=at.done + launched)
            if schedule.follows_time(one.train, epoch):
                left = steps_in_time - launched
                at.pace = schedule.choose_pace(one.train, epoch, num_steps, left)
                if at.pace != epoch.pace:
                    epochs[place] = epoch._replace(pace=at.pace)
        if epochs:
            state.program.update_rates(epochs)
