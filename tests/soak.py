"""Kills, stops, damages and starves real runs, and counts what became of them; random formulas and
damaged data files.

    make soak                        all of it, about five minutes on two cores
    python -m tests.soak --short     a sample, as in the tests

Every run is a process of its own, forked from one that has torch loaded. What goes on after a kill
is compared, bit by bit, with a run that was never broken. Lost and wrong must both be 0.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import psutil
import pyarrow.parquet
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import slipstream
from slipstream import Interrupted, UserError, runs
from slipstream import config as configs
from slipstream.base import storage as checksums
from slipstream.base.errors import ResumableError
from slipstream.engine import checkpoint
from slipstream.search import storage as shared
from tests.conftest import waves
from tests.data import damaged
from tests.data.prepare import hostile
from tests.logs import read_lines
from tests.training.test_resume import JOBS, configured, ended

KILLS, EARLY_KILLS, STOPS, DAMAGES, SEARCH_KILLS, WORKER_KILLS = 200, 40, 40, 200, 10, 20
WRITER_KILLS = 50
"""Of one of two processes that write to a shared journal"""
FORMULAS = 100_000
"""Random texts, of which each is refused or evaluated as a formula"""
FILES = 1000
"""Damaged files of each format, of which each is read or refused"""
PACKS = {
    "repeats": {"train": {"repeats": 3, "epochs": 4}},
}
TAKERS = 20
"""Pairs of processes that resume a killed run at the same moment"""
LEVELS_KB = (8, 16, 24, 32, 48, 64, 80, 100, 120, 150, 200)
STREAMED = {"engine": {"home": "stream", "workers": 0, "buffer_rows": 300}, "train": {"epochs": 3}}
LIMIT_S = 120
CHECKPOINTS = "*/checkpoints/step-*"


def forked(action: Callable[[], Any], log: Path) -> int:
    """Start a process that does it; its exit code is the one that `slipstream` would have."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        action()
        code = 0
    except Interrupted as error:
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except SystemExit as error:
        code = int(error.code or 0)
    except (UserError, ResumableError) as error:
        os.write(1, f"{error}\n".encode())
        code = 2 if isinstance(error, UserError) else 75
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def waited(pid: int, seconds: float = LIMIT_S) -> int:
    """The exit code; minus the signal's number where one ended it. None may hang."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 124


class Soak:
    """One worker's share of the trials."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.log = folder / "log.txt"
        self.counts: Counter[str] = Counter()
        self.table = waves(400)
        self.path = folder / "data.parquet"
        pyarrow.parquet.write_table(waves(900), self.path, row_group_size=100)
        self.wanted: dict[str, Any] = {}
        self.took: dict[str, float] = {}
        self.slowest_stop = 0.0

    def config(self, job: str, out: Path) -> Any:
        if job == "streamed":
            return configured(out, **STREAMED, data={"path": str(self.path)})
        if job in PACKS:
            return configured(out, **PACKS[job])
        return configured(out, job)

    def data(self, job: str) -> Any:
        return None if job == "streamed" else self.table

    def reference(self, job: str) -> None:
        """The unbroken run of a job, and how long it takes."""
        if job in self.wanted:
            return
        out = self.folder / "whole" / job.replace(" ", "-")
        began = time.monotonic()
        config = self.config(job, out)
        code = waited(forked(lambda: slipstream.train(config, self.data(job)), self.log))
        assert code == 0, self.log.read_text()
        self.took[job] = time.monotonic() - began
        self.wanted[job] = outcome(job, runs.open_run(runs.find_last(str(out))))

    def tell(self, what: str, outcome: str, detail: str = "") -> None:
        self.counts[f"{what}: tried"] += 1
        self.counts[f"{what}: {outcome}"] += 1
        if outcome in ("lost", "wrong"):
            print(f"{what}: {outcome}: {detail}", file=sys.stderr, flush=True)

    def wait_for(self, out: Path, pattern: str, pid: int) -> None:
        while not list(out.glob(pattern)):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
            time.sleep(0.002)

    def resumed(self, job: str, folder: Path) -> int:
        return forked(lambda: slipstream.train(data=self.data(job), resume=folder), self.log)

    def broken(self, job: str, number: int, *, early: bool = False) -> None:
        """Break a run off with a signal at any moment, perhaps again while it goes on; or as soon
        as its folder is there."""
        self.reference(job)
        what = "kill -9" if number == signal.SIGKILL else "SIGTERM / SIGINT"
        what += ", early" if early else ""
        out = Path(tempfile.mkdtemp(dir=self.folder))
        config = self.config(job, out)
        pid = forked(lambda: slipstream.train(config, self.data(job)), self.log)
        for _ in range(5):
            if early:
                self.wait_for(out, "[!.]*/config.toml", pid)
                time.sleep(self.random.uniform(0.0, self.took[job] / 10))
                early = False
            else:
                if self.random.random() < 0.9:  # else it may come before there is a checkpoint
                    self.wait_for(out, CHECKPOINTS, pid)
                time.sleep(self.random.uniform(0.0, self.took[job] / 2))
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                break
            began = time.monotonic()
            code = waited(pid)
            if number != signal.SIGKILL:
                self.slowest_stop = max(self.slowest_stop, time.monotonic() - began)
            if code == 2 and list(out.glob("*/metrics.json")):
                break  # the kill before this one came when all was done
            if code not in (0, -number, 128 + number):
                self.tell(what, "lost", f"{job}: exit code {code}, {self.log.read_text()[-2000:]}")
                return
            if code == 0:
                break
            found = [path.parent for path in out.glob("[!.]*/config.toml")]
            if not found:
                self.tell(what, "before there was a folder")
                shutil.rmtree(out)
                return
            if not list(found[0].glob("checkpoints/step-*")):
                self.counts[f"{what}: resumed without a checkpoint"] += 1
            pid = self.resumed(job, found[0])
            if self.random.random() < 0.6:
                code = waited(pid)
                break
        else:
            code = waited(pid)
        run = runs.open_run(runs.find_last(str(out)))
        if code == 2 and (run.folder / "metrics.json").exists():
            code = 0  # the kill came when all was done
        if code:
            self.tell(what, "lost", f"{job}: exit code {code}, {self.log.read_text()[-2000:]}")
        elif outcome(job, run) != self.wanted[job] or list(out.glob("**/.*")):
            self.tell(what, "wrong", f"{job}: {run.folder}")
            return
        else:
            self.tell(what, "survived")
        shutil.rmtree(out)

    def started(self, job: str, precision: str) -> None:
        """Kill a command once at a random moment after its first checkpoint, then go on.

        The first one of a job is left alone: it is what the others are compared with."""
        engine = {"device": "cuda", "precision": precision}
        out = Path(tempfile.mkdtemp(dir=self.folder))
        path, config = out / "data.parquet", out / "job.toml"
        pyarrow.parquet.write_table(self.table, path)
        many = {"epochs": 150, "patience": "off"} | JOBS[job].get("train", {})
        made = configured(out / "runs", job, engine=engine, train=many, data={"path": str(path)})
        config.write_text(configs.to_toml(made))
        command = [sys.executable, "-m", "slipstream", "train", str(config), "--quiet"]
        whole = f"{job}, {precision}"
        if whole not in self.wanted:
            subprocess.run(command, check=True)
            self.wanted[whole] = ended(runs.open_run(runs.find_last(str(out / "runs"))))
            return
        process = subprocess.Popen(command)
        self.wait_for(out / "runs", CHECKPOINTS, process.pid)
        time.sleep(self.random.uniform(0.0, 2.0))
        process.kill()
        process.wait()
        run = runs.open_run(runs.find_last(str(out / "runs")))
        again = subprocess.run([*command[:4], "--resume", str(run.folder), "--quiet"]).returncode
        if again == 2 and (run.folder / "metrics.json").exists():
            again = 0
        if again:
            self.tell("kill -9", "lost", f"{whole}: exit code {again}")
        else:
            same = ended(run)[:2] == self.wanted[whole][:2]
            self.tell("kill -9", "survived" if same else "wrong", whole)

    def damaged(self, times: int) -> None:
        """Flip a bit or cut a file of the newest checkpoint; resume must take the one before."""
        out = self.folder / "damaged"
        config = self.config("lstm, dropout", out)
        waited(forked(lambda: slipstream.train(config, self.table), self.log))
        run = runs.open_run(runs.find_last(str(out)))
        steps = checkpoint.list_steps(run)
        newest = run.checkpoints / f"step-{steps[-1]}"
        files = sorted(newest.iterdir())
        for _ in range(times):
            path = self.random.choice(files)
            whole = path.read_bytes()
            if self.random.random() < 0.7:
                bad = bytearray(whole)
                bad[self.random.randrange(len(bad))] ^= 1 << self.random.randrange(8)
                path.write_bytes(bad)
            else:
                path.write_bytes(whole[: self.random.randrange(len(whole))])
            try:
                found, told = checkpoint.read_newest(run)
                named = any(path.name in text or "manifest" in text for text in told)
                fine = found.step == steps[-2] and named
                self.tell("damaged files", "survived" if fine else "wrong", str(path))
            except Exception as error:
                self.tell("damaged files", "lost", f"{path}: {error!r}")
            path.write_bytes(whole)
        checksums.read_verified(newest)

    def full_disk(self, job: str, kilobytes: int) -> None:
        """A run that outgrows its disk: told, and it can go on when there is room."""
        disk = self.folder / "disk"
        disk.mkdir(exist_ok=True)
        size = f"size={kilobytes}k"
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], capture_output=True
        )
        if mounted.returncode:
            self.counts["full disk: not possible here"] += 1
            return
        try:
            self.reference(job)
            config = self.config(job, disk)
            code = waited(forked(lambda: slipstream.train(config, self.table), self.log))
            subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
            if code == 75:
                run = runs.open_run(runs.find_last(str(disk)))
                code = waited(self.resumed(job, run.folder))
            if code:
                told = f"{job}, {size}: exit code {code}, {self.log.read_text()[-2000:]}"
                self.tell("full disk", "lost", told)
                return
            found = outcome(job, runs.open_run(runs.find_last(str(disk))))
            fine = found[1:] == self.wanted[job][1:]  # a log that takes no more has gaps
            self.tell("full disk", "survived" if fine else "wrong", f"{job}, {size}")
        finally:
            subprocess.run(["umount", disk], check=True)

    def two_takers(self, job: str) -> None:
        """Kill a run, then resume it twice at the same moment: one does it, one is refused."""
        self.reference(job)
        out = Path(tempfile.mkdtemp(dir=self.folder))
        config = self.config(job, out)
        pid = forked(lambda: slipstream.train(config, self.data(job)), self.log)
        self.wait_for(out, CHECKPOINTS, pid)
        os.kill(pid, signal.SIGKILL)
        waited(pid)
        run = runs.open_run(runs.find_last(str(out)))
        pair = [self.resumed(job, run.folder) for _ in range(2)]
        codes = sorted(waited(pid) for pid in pair)
        # both may be refused where the kill came when all was done
        fine = codes == [0, 2] or (codes == [2, 2] and (run.folder / "metrics.json").exists())
        fine = fine and outcome(job, run) == self.wanted[job]
        self.tell("two takers of a stale lock", "survived" if fine else "wrong", f"{job}: {codes}")
        shutil.rmtree(out)

    def two_writers(self) -> None:
        out = self.folder / "two"
        config = configured(out, train={"epochs": 1000})
        first = forked(lambda: slipstream.train(config, self.table), self.log)
        while not list(out.glob("*/checkpoints/step-*")):
            time.sleep(0.05)
        run = runs.find_last(str(out))
        code = waited(forked(lambda: slipstream.train(data=self.table, resume=run), self.log))
        refused = code == 2 and "is writing to this run" in self.log.read_text()
        self.tell("second writer", "survived" if refused else "wrong", f"exit code {code}")
        os.kill(first, signal.SIGKILL)
        waited(first)
        over = ("train.epochs=2", "train.patience=off")
        code = waited(
            forked(lambda: slipstream.train(data=self.table, resume=run, overrides=over), self.log)
        )
        taken = code == 0 or "is finished" in self.log.read_text()
        self.tell("stale lock", "survived" if taken else "lost", f"exit code {code}")

    def malicious(self) -> None:
        """Files that would run code if they were unpickled, or lie about their sizes."""
        mark = self.folder / "code-ran"
        for name, content in hostile_files(mark).items():
            path = self.folder / name
            path.write_bytes(content)
            config = configured(self.folder / "hostile", data={"path": str(path)})
            code = waited(forked(lambda config=config: slipstream.train(config), self.log))
            fine = code == 2 and not mark.exists()
            self.tell("malicious files", "survived" if fine else "wrong", f"{name}: {code}")
            model = self.folder / f"model-of-{name}"
            source = self.folder / "damaged"
            shutil.copytree(runs.find_last(str(source)), model)
            weights = model / "model" / "weights.safetensors"
            weights.write_bytes(content)
            sums = json.loads((model / "model" / "manifest.json").read_text())
            sums[weights.name] = hashlib.sha256(content).hexdigest()
            (model / "model" / "manifest.json").write_text(json.dumps(sums))
            code = waited(
                forked(lambda model=model: slipstream.predict(model, self.table), self.log)
            )
            fine = code == 2 and not mark.exists()
            self.tell("malicious files", "survived" if fine else "wrong", f"{name}: {code}")

    def kill_at_random(self, config: Any, draw: random.Random, most: int) -> int | None:
        """Train on two workers to the end, with so many kills on the way; return their number, None
        where the run could not go on."""
        count = 0
        while True:
            begun = list(Path(config.out).glob("*/config.toml"))
            how: dict[str, Any] = {"resume": begun[0].parent} if begun else {"config": config}
            how |= {"workers": None if begun else 2, "quiet": True}
            pid, code = forked(lambda how=how: slipstream.train(**how), self.log), None
            while code is None:
                time.sleep(draw.uniform(0.5, 8.0))
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                elif count < most:
                    with suppress(psutil.NoSuchProcess):
                        command = psutil.Process(pid)
                        victim = draw.choice([command, *command.children()])
                        name = "command" if victim == command else "worker"
                        victim.kill()
                        count += 1
                        self.tell(f"kill -9 of a {name}", "survived")
            if code == 0:
                return count
            if code not in (-signal.SIGKILL, 75):
                self.tell("run on two workers", "lost", self.log.read_text()[-2000:])
                return None

    def formulas(self, count: int, seed: int) -> None:
        for outcome, number in hostile.fuzz(count, seed).items():
            self.counts["formulas: tried"] += number
            self.counts[f"formulas: {outcome}"] += number

    def files(self, count: int, seed: int) -> None:
        """Damaged data files, read by a process that none of them may end."""
        code = waited(
            forked(lambda: sys.exit(damaged.main([str(count), str(seed)])), self.log), 900
        )
        detail = f"exit code {code}: {self.log.read_text()[-2000:]}"
        self.tell("damaged data files", "read or refused" if code == 0 else "wrong", detail)


def outcome(job: str, run: runs.Run) -> tuple[Any, ...]:
    """All that must be the same in a broken run; of a pack, every lane's."""
    if job not in PACKS:
        return ended(run)
    kept = ("event", "step", "losses", "lane", "epoch", "train_loss", "val_loss", "best", "stopped")
    log = [
        {key: event[key] for key in kept if key in event}
        for event in read_lines(run)
        if event["event"] in ("log", "epoch", "lane", "recovery")
    ]
    files = {
        path: path.relative_to(run.folder)
        for name in ("model", "lanes")
        for path in sorted((run.folder / name).glob("weights.safetensors"))
    }
    weights = {str(name): path.read_bytes() for path, name in files.items()}
    figures = runs.read_metrics(run.folder)
    lanes = [{key: lane[key] for key in ("seed", "metrics")} for lane in figures["lanes"]]
    return log, weights, figures["metrics"], figures["detail"], lanes


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def hostile_files(mark: Path) -> dict[str, bytes]:
    bomb = pickle.dumps(Bomb(mark))
    packed = np.array([Bomb(mark)], dtype=object)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "x.npz", x=packed, allow_pickle=True)
        archive = (Path(folder) / "x.npz").read_bytes()
    huge = (2**62).to_bytes(8, "little") + b"{}"
    header = b'{"w":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}'
    lying = len(header).to_bytes(8, "little") + header + b"\0" * 16
    return {
        "bomb.pkl": bomb,
        "bomb.pt": bomb,
        "bomb.pth": bomb,
        "bomb.npz": archive,
        "bomb.csv": bomb,
        "bomb.parquet": b"PAR1" + bomb + b"PAR1",
        "huge.safetensors": huge,
        "lying.safetensors": lying,
    }


def on_gpu(folder: Path) -> Counter[str]:
    """Twenty kills of captured runs; processes of their own, since CUDA does not survive a fork."""
    soak = Soak(folder, 0)
    kinds = itertools.product(("lstm, dropout", "gru, accumulated"), ("fp32", "fp16"))
    jobs, precisions = zip(*kinds, strict=True)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(6):  # the first round is whole
            list(pool.map(soak.started, jobs, precisions))
    return soak.counts


def killed_search(folder: Path, *, kills: int = SEARCH_KILLS, seed: int = 0) -> Counter[str]:
    """One search, killed again and again and resumed: every trial once, each with the score that it
    has in a search that was never broken, and so the models that are retrained and tested."""
    from tests.search.searches import make_settings

    folder.mkdir(parents=True, exist_ok=True)
    soak, draw = Soak(folder, seed), random.Random(seed)
    tune = {"trials": 10, "parallel": 10, "retrain": 2, "retrain_seeds": 2}
    settings = make_settings(folder, train={"epochs": 30}, tune=tune)
    settings["engine"]["checkpoint_minutes"] = 0.002
    whole, broken = folder / "search-whole", folder / "search-broken"
    began = time.monotonic()
    code = waited(forked(lambda: slipstream.tune(settings | {"out": str(whole)}), soak.log))
    assert code == 0, soak.log.read_text()
    took = time.monotonic() - began
    wanted = _scores(runs.find_last(str(whole)))
    done = 0
    while True:
        found = list(broken.glob("*/study.log"))
        how = {"resume": found[0].parent} if found else {"config": settings | {"out": str(broken)}}
        pid = forked(lambda how=how: slipstream.tune(**how), soak.log)
        if done < kills:
            time.sleep(draw.uniform(0.05, 0.15) * took)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = waited(pid)
        if code == 0:
            break
        done += 1
        if code != -signal.SIGKILL:
            soak.tell("kill -9 of a search", "lost", soak.log.read_text()[-2000:])
            return soak.counts
        soak.tell("kill -9 of a search", "survived")
    scores = _scores(runs.find_last(str(broken)))
    one, other = (_retrained(runs.find_last(str(out))) for out in (broken, whole))
    if scores != wanted:
        soak.tell("search after kills", "wrong", f"{scores} instead of {wanted}")
    elif one.keys() != other.keys() or not np.allclose(
        [one[name] for name in other], list(other.values()), rtol=1e-4
    ):
        soak.tell("search after kills", "wrong", f"{one} instead of {other}")
    else:
        soak.tell("search after kills", "same trials, same scores, same best, same tests")
    return soak.counts


def killed_workers(folder: Path, *, kills: int = WORKER_KILLS, seed: int = 0) -> Counter[str]:
    """Runs on two workers, of which one, or the command itself, is killed again and again; each
    ends as one that was never broken: the same log, the same figures."""
    from tests.training.shares.test_launcher import configured

    folder.mkdir(parents=True, exist_ok=True)
    soak, draw = Soak(folder, seed), random.Random(seed)
    config = configured(folder, train={"repeats": 8, "epochs": 300, "patience": "off"})
    whole = config.model_copy(update={"out": str(folder / "whole")})
    pid = forked(lambda: slipstream.train(whole, workers=2, quiet=True), soak.log)
    code = waited(pid, 5 * LIMIT_S)
    assert code == 0, soak.log.read_text()
    wanted, done = _outcome_of_workers(runs.find_last(whole.out)), 0
    for number in itertools.count():
        if done >= kills:
            return soak.counts
        broken = config.model_copy(update={"out": str(folder / f"broken-{number}")})
        count = soak.kill_at_random(broken, draw, kills - done)
        if count is None:
            return soak.counts
        done += count
        outcome = _outcome_of_workers(runs.find_last(broken.out))
        same = "same log, same figures"
        soak.tell("run on two workers after kills", same if outcome == wanted else "wrong")
    raise AssertionError


def _outcome_of_workers(folder: Path) -> tuple[Any, ...]:
    """All that must be the same."""
    from tests.training.shares.test_launcher import lane_events

    metrics = runs.read_metrics(folder)
    lanes = [{**one, "seconds": None} for one in metrics["lanes"]]
    return lane_events(folder), metrics["metrics"], metrics["detail"], lanes


def killed_writers(folder: Path, *, kills: int = WRITER_KILLS, seed: int = 0) -> Counter[str]:
    """Two processes write trials to one journal, and one of them is killed again and again: every
    result that was acknowledged is there, no trial went to both, and Optuna reads the file."""
    folder.mkdir(parents=True, exist_ok=True)
    soak, draw = Soak(folder, seed), random.Random(seed)
    path, done = folder / "study.log", folder / "done"
    outputs = [folder / f"output-{number}" for number in range(kills + 1)]
    lasting = forked(lambda: _write_trials(path, outputs[0], done), soak.log)
    for output in outputs[1:]:
        pid = forked(lambda output=output: _write_trials(path, output, done), soak.log)
        soak.wait_for(folder, output.name, pid)
        time.sleep(draw.uniform(0.0, 0.1))
        os.kill(pid, signal.SIGKILL)
        killed = waited(pid) == -signal.SIGKILL
        soak.tell("kill -9 of a writer", "survived" if killed else "lost", soak.log.read_text())
    done.touch()
    code = waited(lasting)
    lines = [line for one in outputs for line in one.read_text().splitlines(keepends=True)]
    known = dict(line.split() for line in lines if line.endswith("\n"))
    trials = JournalStorage(JournalFileBackend(str(path))).get_all_trials(0)
    values = {str(one.number): str(one.value) for one in trials if one.state.is_finished()}
    fine = code == 0 and known.items() <= values.items() and len(known) == len(lines)
    unfinished = len(trials) - len(known)
    fine = fine and unfinished <= kills  # at most the one that a killed process had under way
    detail = f"exit code {code}, {len(lines)} acknowledged, {len(trials)} trials"
    soak.tell("journal after kills", "nothing lost" if fine else "wrong", detail)
    return soak.counts


def _write_trials(path: Path, output: Path, done: Path) -> None:
    """Finish trials in a journal, and note each one when that is acknowledged."""
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage, sampler = shared.open_storage(f"journal:{path}"), optuna.samplers.RandomSampler()
    study = optuna.create_study(
        study_name="s", storage=storage, sampler=sampler, load_if_exists=True
    )
    with output.open("w", buffering=1) as file:
        while not done.exists():
            trial = study.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
            trial.set_user_attr("notes", "n" * 9000)  # of several pages, which a kill may separate
            study.tell(trial, trial.params["x"])
            file.write(f"{trial.number} {trial.params['x']}\n")


def _retrained(folder: Path) -> dict[str, list[float]]:
    """What was retrained, by name: losses and test errors; other packs round otherwise."""
    summary = runs.read_json(folder / "metrics.json")
    losses = {one["what"]: sorted(one["losses"]) for one in summary["retrained"]}
    for name in ("best", "default"):
        lanes = runs.read_metrics(folder / "retrained" / name)["lanes"]
        losses[name] = [lane["metrics"]["test"]["mse"] for lane in lanes]
    return losses


def _scores(folder: Path) -> dict[str, Any]:
    trials = runs.read_json(folder / "trials.json")
    told = [event["trial"] for event in read_lines(runs.Run(folder)) if event["event"] == "trial"]
    best = runs.read_json(folder / "metrics.json")["best"]["trial"]
    scores = {t["trial"]: [t["state"], f"{t['value']:.9g}", t["params"]] for t in trials}
    return {"scores": scores, "told": sorted(set(told)), "best": best}


def share(folder: Path, number: int, of: int, scale: float, seed: int) -> Counter[str]:
    """What one of several workers does."""
    folder.mkdir(parents=True)
    soak = Soak(folder, seed + number)
    jobs = [*PACKS, *JOBS, "streamed"]
    for i in range(number, int(KILLS * scale), of):
        soak.broken(jobs[i // of % len(jobs)], signal.SIGKILL)
    for i in range(number, int(EARLY_KILLS * scale), of):
        soak.broken(jobs[i // of % len(jobs)], signal.SIGKILL, early=True)
    for i in range(number, int(STOPS * scale), of):
        stop = signal.SIGTERM if i // of % 2 else signal.SIGINT
        soak.broken(jobs[i // of % len(jobs)], stop)
    soak.damaged(int(DAMAGES * scale) // of)
    soak.formulas(int(FORMULAS * scale) // of, seed + number)
    soak.files(int(FILES * scale) // of, seed + number)
    print(f"the slowest stop took {soak.slowest_stop:.2f} s", flush=True)
    if number == 0:
        every = len(LEVELS_KB) // max(int(len(LEVELS_KB) * scale), 1)
        for job in ("lstm, dropout", *PACKS):
            for kilobytes in LEVELS_KB[every // 2 :: every]:
                soak.full_disk(job, kilobytes)
        for i in range(max(int(TAKERS * scale), 2)):
            soak.two_takers(("lstm, dropout", *PACKS)[i % 2])
        soak.two_writers()
        soak.malicious()
        kills = max(int(SEARCH_KILLS * scale), 1)
        soak.counts += killed_search(folder / "search", kills=kills, seed=seed)
        kills = max(int(WORKER_KILLS * scale), 1)
        soak.counts += killed_workers(folder / "workers", kills=kills, seed=seed)
        kills = max(int(WRITER_KILLS * scale), 2)
        soak.counts += killed_writers(folder / "writers", kills=kills, seed=seed)
    return soak.counts


def soaked(folder: Path, *, scale: float = 1.0, workers: int = 2, seed: int = 0) -> Counter[str]:
    """All trials, over some processes that each fork their own."""
    pids = []
    for number in range(workers):
        result = folder / f"result-{number}.json"

        def work(number: int = number, result: Path = result) -> None:
            counts = share(folder / f"worker-{number}", number, workers, scale, seed)
            result.write_text(json.dumps(counts))

        pids.append(forked(work, folder / "log.txt"))
    for pid in pids:
        waited(pid, 3600)
    total: Counter[str] = Counter()
    for number in range(workers):
        result = folder / f"result-{number}.json"
        if not result.exists():
            raise SystemExit((folder / "log.txt").read_text())
        total.update(json.loads(result.read_text()))
    return total


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--short", action="store_true")
    arguments.add_argument("--gpu", action="store_true", help="kills of captured runs only")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    if given.gpu:
        counts = on_gpu(folder)
    else:
        counts = soaked(folder, scale=0.05 if given.short else 1.0, seed=given.seed)
        print((folder / "log.txt").read_text()[-4000:], file=sys.stderr)
    kinds = dict.fromkeys(key.partition(":")[0] for key in counts)
    for kind in kinds:
        of_kind = {k.partition(": ")[2]: n for k, n in counts.items() if k.startswith(f"{kind}:")}
        of_kind = {"lost": 0, "wrong": 0} | of_kind
        print(f"{kind}: " + ", ".join(f"{n} {outcome}" for outcome, n in of_kind.items()))
    print(f"{time.monotonic() - began:.0f} s")
    bad = sum(n for key, n in counts.items() if key.endswith((": lost", ": wrong")))
    if not bad:
        shutil.rmtree(folder)
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
