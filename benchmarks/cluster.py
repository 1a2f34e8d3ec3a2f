"""A discrete-event simulation of searches and walk-forwards on many GPUs; `scale.py` feeds it.

Every worker is a generator that yields how long it is busy; the simulation resumes the one that is
due first. The storage of a study serves one write at a time, in the order of arrival. A worker does
one thing at a time, as the real one: while it waits for the storage, its GPU has nothing to do.

Times are in seconds. All randomness comes from the seed: the length of a trial from its number, so
that every variant trains the same trials.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

POLL_S = 1.0
"""Between looks of a worker without work for trials that come back from failed machines"""
MAX_ATTEMPTS = 2
"""Of a trial whose machine fails, as in the real search"""
TRAINING, FEW_LANES, STORAGE, QUEUE, SAMPLER, START_UP, CHECKPOINTS, LOST, DOWN, IDLE = (
    "training",
    "too few trials a GPU",
    "storage",
    "queue at the storage",
    "sampler and pruner",
    "start-up",
    "checkpoints",
    "lost work",
    "machines down",
    "waiting for the last",
)
CAUSES = (FEW_LANES, STORAGE, QUEUE, SAMPLER, START_UP, CHECKPOINTS, LOST, DOWN, IDLE)


Part = tuple[str, float]
"""What a worker does, and for how long"""
Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Operation:
    """What one operation costs its worker, and how long it keeps the storage from others."""

    client_s: float = 0.0
    serial_s: float = 0.0


@dataclass(frozen=True)
class StorageCosts:
    """The storage of a study."""

    name: str
    ask: Operation = Operation()
    report: Operation = Operation()
    tell: Operation = Operation()
    heartbeat: Operation = Operation()
    read: Operation = Operation()
    read_running: Operation = Operation()
    """What a read costs besides, for each trial under way"""
    parse_s: float = 0.0
    """What a read costs besides, for each write of any worker since the last one"""
    read_every_s: float = 0.0
    """The least time between two reads of a worker"""


FREE = StorageCosts("free")


@dataclass(frozen=True)
class SearchJob:
    """A search. `ms` has the milliseconds per step and model by the number of lanes."""

    trials: int
    epochs: int
    steps_per_epoch: int
    ms: Mapping[int, float]
    max_lanes: int
    share_under_way: float = 0.5
    """Of the trials, at most, at a time: the sampler learns from the others"""
    pruned_share: float = 0.0
    warmup_epochs: int = 2

    def compute_ms(self, lanes: int) -> float:
        """Return the milliseconds per step and model, log-log between the measured numbers."""
        known = sorted(self.ms)
        if lanes <= known[0]:
            return self.ms[known[0]]
        for low, high in pairwise(known):
            if lanes <= high:
                share = math.log(lanes / low) / math.log(high / low)
                return self.ms[low] * (self.ms[high] / self.ms[low]) ** share
        return self.ms[known[-1]]

    def draw_epochs(self, number: int, seed: int) -> int:
        """Return the epochs of a trial: after the warm-up, each is the last with one chance."""
        later = self.epochs - self.warmup_epochs
        if not self.pruned_share or later <= 0:
            return self.epochs
        stays = (1 - self.pruned_share) ** (1 / later)
        draw = random.Random(f"{seed} trial {number}").random()
        return min(self.warmup_epochs + 1 + int(math.log(draw) / math.log(stays)), self.epochs)


@dataclass(frozen=True)
class WorkerCosts:
    """What a worker pays besides training and storage."""

    start_up_s: float = 0.0
    ask_s: float = 0.0
    ask_finished_s: float = 0.0
    """For each finished trial"""
    ask_running_s: float = 0.0
    """For each trial under way"""
    prune_s: float = 0.0
    prune_finished_s: float = 0.0
    checkpoint_s: float = 0.0
    """For each lane"""
    prunes: bool = True
    """Whether every epoch is followed by a decision, for which the trials are read"""


@dataclass(frozen=True)
class Faults:
    """Failures and differences between GPUs. Hours are the mean time between failures of one."""

    process_hours: float = math.inf
    machine_hours: float = math.inf
    gpus_per_machine: int = 8
    checkpoint_every_s: float = 60.0
    grace_s: float = 60.0
    replace_s: float = 300.0
    """Until a failed machine, or another one in its place, starts again"""
    speed_spread: float = 0.0
    """Standard deviation of the logarithm of the GPUs' speeds"""


@dataclass
class Outcome:
    """The result of a simulation: `spent_s` has the time of all GPUs by what they did."""

    gpus: int
    wall_s: float
    spent_s: Counter[str]
    finished: int = 0
    failed: int = 0
    failures: int = 0
    slowest_heartbeat_s: float = 0.0

    @property
    def gpu_s(self) -> float:
        return self.gpus * self.wall_s

    def compute_shares(self) -> dict[str, float]:
        return {cause: self.spent_s[cause] / self.gpu_s for cause in (TRAINING, *CAUSES)}

    @property
    def limit(self) -> str:
        """What costs most besides training."""
        return max(CAUSES, key=lambda cause: self.spent_s[cause])


@dataclass(eq=False)
class Trial:
    number: int
    epochs: int
    done: int = 0
    attempts: int = 1
    is_finished: bool = False


@dataclass(order=True)
class Lane:
    ends_at: float
    """In steps of its worker, when the epoch ends"""
    number: int
    trial: Trial = field(compare=False)


class Simulation:
    """One search."""

    def __init__(
        self,
        job: SearchJob,
        costs: WorkerCosts,
        storage: StorageCosts,
        faults: Faults = Faults(),  # noqa: B008
        *,
        gpus: int,
        seed: int = 0,
    ) -> None:
        self.job, self.costs, self.storage, self.faults = job, costs, storage, faults
        self.gpus, self.seed = gpus, seed
        self.now = self.storage_free_at = 0.0
        self.writes = self.running = 0
        self.outcome = Outcome(gpus, 0.0, Counter())
        self.started = 0
        self.retries: list[tuple[float, int, Trial]] = []
        under_way = max(math.floor(job.trials * job.share_under_way), 1)
        self.parallel = min(-(-under_way // gpus), job.max_lanes)
        self._heap: list[tuple[float, int, Iterator[float]]] = []
        self._order = count()

    def run(self) -> Outcome:
        workers = [Worker(self, number) for number in range(self.gpus)]
        for worker in workers:
            self.start(worker.run())
            if self.storage.heartbeat != Operation():
                self.start(worker.beat())
        while self._heap and not self.is_over:
            self.now, _, process = heapq.heappop(self._heap)
            if (pause := next(process, None)) is not None:
                heapq.heappush(self._heap, (self.now + pause, next(self._order), process))
        outcome = self.outcome
        for worker in workers:
            worker.stop(outcome.wall_s)
            outcome.spent_s.update(worker.spent_s)
        return outcome

    def start(self, process: Iterator[float]) -> None:
        heapq.heappush(self._heap, (self.now, next(self._order), process))

    @property
    def is_over(self) -> bool:
        return self.outcome.finished + self.outcome.failed == self.job.trials

    def serve(self, serial_s: float) -> float:
        """Reserve the storage; return the seconds until it has done this."""
        self.storage_free_at = max(self.now, self.storage_free_at) + serial_s
        return self.storage_free_at - self.now

    def take_trial(self) -> Trial | None:
        """Return the next trial to train."""
        if self.retries and self.retries[0][0] <= self.now:
            return heapq.heappop(self.retries)[2]
        if self.started == self.job.trials:
            return None
        trial = Trial(self.started, self.job.draw_epochs(self.started, self.seed))
        self.started += 1
        return trial

    def end(self, trial: Trial, *, failed: bool = False) -> None:
        assert not trial.is_finished
        trial.is_finished = True
        self.outcome.failed += failed
        self.outcome.finished += not failed
        self.outcome.wall_s = self.now


class Worker:
    """One process on one GPU."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self.sim, self.draw = simulation, random.Random(f"{simulation.seed} worker {number}")
        faults = simulation.faults
        self.speed = math.exp(self.draw.gauss(0.0, 1.0) * faults.speed_spread)
        machine = random.Random(f"{simulation.seed} machine {number // faults.gpus_per_machine}")
        self.machine = machine  # the workers of a machine draw the same failures
        self.process_fails_at = self._draw_failure(self.draw, faults.process_hours)
        self.machine_fails_at = self._draw_failure(machine, faults.machine_hours)
        self.lanes: list[Lane] = []
        self.steps = 0.0
        """Steps that each lane has made, since the worker started"""
        self.saved: dict[int, tuple[int, float]] = {}
        """Of the last checkpoint, by trial: epochs that were done, steps since"""
        self.saved_at = self.unsaved_s = 0.0
        self.seen = 0
        self.read_at = -math.inf
        self.spent_s: Counter[str] = Counter()
        self.parts: Parts = ()
        self.until = 0.0
        self.is_done = False

    def _draw_failure(self, draw: random.Random, hours: float) -> float:
        drawn = draw.expovariate(1.0)  # always, so that rates do not change what is drawn later
        return self.sim.now + 3600 * hours * drawn if math.isfinite(hours) else math.inf

    def spend(self, *parts: Part) -> Iterator[float]:
        """Be busy for the seconds of all parts."""
        total_s = 0.0
        for cause, seconds in parts:
            self.spent_s[cause] += seconds
            total_s += seconds
        if total_s > 0:
            self.parts, self.until = parts, self.sim.now + total_s
            yield total_s

    def stop(self, at: float) -> None:
        """Count nothing that lies after the end of the search, and the time before as idle."""
        excess_s = max(self.until - at, 0.0)
        for cause, seconds in reversed(self.parts):
            self.spent_s[cause] -= min(seconds, excess_s)
            excess_s -= min(seconds, excess_s)
        self.spent_s[IDLE] += max(at - self.until, 0.0)

    def run(self) -> Iterator[float]:
        sim = self.sim
        yield from self.spend((START_UP, sim.costs.start_up_s))
        self.saved_at = sim.now
        may_come_back = math.isfinite(sim.faults.machine_hours)
        while True:
            yield from self.fill()
            if self.lanes:
                yield from self.train()
            elif may_come_back:
                yield from self.spend((IDLE, POLL_S))
            else:
                break
        self.is_done = True

    def beat(self) -> Iterator[float]:
        """Record a heartbeat for each trial every ten seconds, as a thread does."""
        sim = self.sim
        while not self.is_done:
            yield 10.0
            operation, lanes = sim.storage.heartbeat, len(self.lanes)
            took_s = sim.serve(lanes * operation.serial_s) + lanes * operation.client_s
            slowest = max(sim.outcome.slowest_heartbeat_s, took_s)
            sim.outcome.slowest_heartbeat_s = slowest
            yield took_s

    def write(self, operation: Operation) -> Parts:
        """Return the parts of a write: the wait for others, then the storage's and its own time."""
        sim, serial_s = self.sim, operation.serial_s
        sim.writes += 1
        wait_s = sim.serve(serial_s) - serial_s if serial_s else 0.0
        return (QUEUE, wait_s), (STORAGE, serial_s + operation.client_s)

    def read(self) -> Parts:
        """Return the parts of reading what the others wrote."""
        sim, storage = self.sim, self.sim.storage
        if sim.now - self.read_at < storage.read_every_s:
            return ()
        self.read_at = sim.now
        running, unseen = sim.running, sim.writes - self.seen
        self.seen = sim.writes
        client_s = storage.read.client_s + running * storage.read_running.client_s
        serial_s = storage.read.serial_s + running * storage.read_running.serial_s
        wait_s = sim.serve(serial_s) - serial_s if serial_s else 0.0
        return (QUEUE, wait_s), (STORAGE, serial_s + client_s + unseen * storage.parse_s)

    def fill(self) -> Iterator[float]:
        """Ask for trials until every lane has one."""
        sim, costs = self.sim, self.sim.costs
        while len(self.lanes) < sim.parallel and (trial := sim.take_trial()):
            sampler_s = costs.ask_s + sim.running * costs.ask_running_s
            sampler_s += sim.outcome.finished * costs.ask_finished_s
            parts = (*self.read(), *self.write(sim.storage.ask))
            yield from self.spend((SAMPLER, sampler_s), *parts)
            sim.running += 1
            self.add(trial)

    def add(self, trial: Trial, steps: float = 0.0) -> None:
        ends_at = self.steps + self.sim.job.steps_per_epoch - steps
        heapq.heappush(self.lanes, Lane(ends_at, trial.number, trial))

    def train(self) -> Iterator[float]:
        """Train until an epoch ends, a checkpoint is due or something fails."""
        sim, job, lanes = self.sim, self.sim.job, len(self.lanes)
        step_s = lanes * job.compute_ms(lanes) / 1e3 / self.speed
        train_s = max(self.lanes[0].ends_at - self.steps, 0.0) * step_s
        checkpoint_at = self.saved_at + sim.faults.checkpoint_every_s
        fails_at = min(self.process_fails_at, self.machine_fails_at)
        stop_s = max(min(checkpoint_at, fails_at) - sim.now, 0.0)
        is_epoch = train_s <= stop_s
        spent_s = min(train_s, stop_s)
        useful = job.compute_ms(job.max_lanes) / job.compute_ms(lanes)
        yield from self.spend((FEW_LANES, spent_s * (1 - useful)), (TRAINING, spent_s * useful))
        self.unsaved_s += spent_s * useful
        self.steps = self.lanes[0].ends_at if is_epoch else self.steps + spent_s / step_s
        if is_epoch:
            yield from self.end_epochs()
        elif fails_at <= checkpoint_at:
            yield from self.fail()
        else:
            yield from self.save()

    def end_epochs(self) -> Iterator[float]:
        sim, costs = self.sim, self.sim.costs
        while self.lanes and self.lanes[0].ends_at <= self.steps + 1e-9:
            trial = heapq.heappop(self.lanes).trial
            trial.done += 1
            parts = self.write(sim.storage.report)
            if costs.prunes:
                prune_s = costs.prune_s + sim.outcome.finished * costs.prune_finished_s
                parts = (*parts, *self.read(), (SAMPLER, prune_s))
            if trial.done < trial.epochs:
                self.add(trial)
                yield from self.spend(*parts)
                continue
            yield from self.spend(*parts, *self.write(sim.storage.tell))
            sim.running -= 1
            sim.end(trial)

    def save(self) -> Iterator[float]:
        yield from self.spend((CHECKPOINTS, len(self.lanes) * self.sim.costs.checkpoint_s))
        steps = self.sim.job.steps_per_epoch
        self.saved = {
            lane.number: (lane.trial.done, self.steps - lane.ends_at + steps) for lane in self.lanes
        }
        self.saved_at, self.unsaved_s = self.sim.now, 0.0

    def fail(self) -> Iterator[float]:
        """Lose what is not in the checkpoint; with the machine, all of it."""
        sim, faults = self.sim, self.sim.faults
        sim.outcome.failures += 1
        self.spent_s[TRAINING] -= self.unsaved_s
        self.spent_s[LOST] += self.unsaved_s
        self.unsaved_s = 0.0
        trials = [lane.trial for lane in self.lanes]
        self.lanes = []
        if self.machine_fails_at <= self.process_fails_at:
            for trial in trials:
                self.give_back(trial)
            yield from self.spend((DOWN, faults.replace_s))
            self.machine_fails_at = self._draw_failure(self.machine, faults.machine_hours)
        else:
            self.process_fails_at = self._draw_failure(self.draw, faults.process_hours)
            for trial in trials:
                trial.done, steps = self.saved.get(trial.number, (0, 0.0))
                self.add(trial, steps)
        yield from self.spend((START_UP, sim.costs.start_up_s))
        self.saved_at = sim.now

    def give_back(self, trial: Trial) -> None:
        """Queue a trial for any worker, from its start, once the heartbeats are missing."""
        sim = self.sim
        sim.running -= 1
        if trial.attempts == MAX_ATTEMPTS:
            sim.end(trial, failed=True)
            return
        again = replace(trial, done=0, attempts=trial.attempts + 1)
        heapq.heappush(sim.retries, (sim.now + sim.faults.grace_s, trial.number, again))


@dataclass(frozen=True)
class WalkForward:
    """Folds times repeats as lanes, spread over GPUs in equal shares."""

    lanes: int
    job: SearchJob
    """Its epochs, steps and times of steps"""
    score_s: float = 0.0
    """Of a share, and for each lane"""
    score_lane_s: float = 0.0
    merge_lane_s: float = 0.0
    """In the command, after the last share, for each lane"""


def simulate_walk_forward(
    work: WalkForward,
    costs: WorkerCosts,
    faults: Faults = Faults(),  # noqa: B008
    *,
    gpus: int,
    seed: int = 0,
) -> Outcome:
    """Simulate a walk-forward: each GPU trains one share, in packs, and scores it."""
    job = replace(
        work.job, trials=work.lanes, share_under_way=1.0, pruned_share=0.0, warmup_epochs=0
    )
    plain = replace(costs, ask_s=0.0, ask_finished_s=0.0, ask_running_s=0.0, prunes=False)
    outcome = Simulation(job, plain, FREE, faults, gpus=gpus, seed=seed).run()
    share = -(-work.lanes // gpus)
    score_s, merge_s = work.score_s + share * work.score_lane_s, work.lanes * work.merge_lane_s
    outcome.wall_s += score_s + merge_s
    outcome.spent_s[START_UP] += gpus * score_s
    outcome.spent_s[IDLE] += gpus * merge_s
    return outcome
