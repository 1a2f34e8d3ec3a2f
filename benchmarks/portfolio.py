"""Measures many recipes of models on the sets of `accuracy_sets.py`, to choose a portfolio from.

    python benchmarks/portfolio.py --minutes 25 --out benchmarks/records/<date>-<hardware>-portfolio
    python benchmarks/portfolio.py --sets illness --minutes 3 --device cpu --out /tmp/portfolio

A recipe names a model relative to the data: its context in horizons and seasons, its patches by the
number of tokens. So one recipe is a config on every set of its task. Each one trains from three
seeds as lanes of one run. All runs share one process; the first recipes are those that are expected
to be best, then come changes of one property of each of them, then random draws; each is measured
on all sets before the next begins, so that the time limit leaves complete rows. Each result, a set
and a recipe, is one line of `measurements.jsonl` in --out, and a repeated command goes on where the
last one ended.

The tables have the best recipes of each set by validation with their test scores, and a portfolio:
chosen greedily so that the best of it, on average over the sets of a task, is as good as possible
on validation, or with `--by test` on test: what is good on the sets of a study is a prior for other
sets, but no fair figure on these.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from accuracy_sets import HIGHER_IS_BETTER, SETS, TRAIN, AccuracySet, Problem, Task

import slipstream
from slipstream.config.model import SPECS
from slipstream.tools.bench import results
from slipstream.tools.bench.results import BenchResult, ResultRow, ResultTable

MEASUREMENTS = "measurements.jsonl"
SEEDS = 3
NUM_CHOSEN = 12
MAX_CONTEXT_SHARE = 0.25
"""A context is at most this share of a series' training rows"""


@dataclass(frozen=True)
class Recipe:
    """A model, relative to the data."""

    kind: str
    span: float = 1.0
    """The context, as a multiple of the set's usual one"""
    tokens: int | None = None
    """The context is cut into about so many patches; None: a row is a token"""
    normalize: str = "none"
    loss: str = "mse"
    channels: str = "together"
    inputs: str = "all"
    """"targets": of a forecast, no other columns"""
    scale_by: str = "global"
    hidden: int = 64
    layers: int = 2
    dropout: float = 0.1
    pool: str = "last"
    lr: float = 1e-3
    weight_decay: float = 1e-4
    batch: int = 128

    @property
    def name(self) -> str:
        """Every property that differs from the default, in short."""
        default = Recipe(self.kind)
        parts = [
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in asdict(self).items()
            if value != getattr(default, key)
        ]
        return " ".join([self.kind, *parts])


PATCHED = Recipe("transformer", tokens=21, pool="flatten", normalize="last")
FORECASTS = (
    replace(PATCHED, channels="independent"),
    replace(PATCHED, channels="independent", normalize="window", loss="mae"),
    Recipe("mlp", normalize="window", loss="mae", channels="independent", hidden=256),
    Recipe("linear", normalize="last", channels="independent", lr=3e-3),
    Recipe("lstm", tokens=21, normalize="last", channels="independent", hidden=128, layers=1),
    Recipe("gru", tokens=21, normalize="window", channels="independent", hidden=128, layers=1),
    Recipe("tcn", tokens=42, normalize="last", channels="independent", hidden=64),
    Recipe("nhits", normalize="last", channels="independent", hidden=256),
    Recipe("nhits", normalize="window", loss="mae", channels="independent", hidden=256),
    replace(PATCHED, channels="independent", span=2, loss="huber"),
    Recipe("mlp", normalize="last", channels="independent", hidden=256, dropout=0.3),
    Recipe("linear", normalize="window", loss="mae", channels="independent", span=2, lr=3e-3),
    Recipe("mlp", normalize="last", hidden=256, inputs="targets", scale_by="series", loss="mae"),
    Recipe("gru", tokens=21, normalize="last", hidden=128, loss="huber", inputs="targets"),
    Recipe("lstm", tokens=24, normalize="window", hidden=64, loss="mae"),
    Recipe("tcn", tokens=42, normalize="window", loss="mae", channels="independent", span=0.5),
    Recipe("linear", normalize="last", span=0.5, channels="independent", inputs="targets"),
    Recipe("gru", tokens=48, normalize="none", hidden=64, loss="mae"),
)
ESTIMATES = (
    Recipe("lstm", tokens=30, layers=1, lr=2e-3, batch=256),
    Recipe("gru", tokens=30, layers=1, lr=2e-3, batch=256),
    Recipe("lstm", tokens=30, layers=2, hidden=128, lr=2e-3, batch=256, loss="mae"),
    Recipe("gru", tokens=60, layers=2, hidden=64, lr=2e-3, batch=256, span=2),
    Recipe("tcn", tokens=60, hidden=64, layers=4, lr=2e-3, batch=256),
    Recipe("mlp", hidden=256, lr=1e-3, batch=256, loss="huber"),
    Recipe("transformer", tokens=30, hidden=64, pool="mean", batch=256),
    Recipe("lstm", tokens=60, layers=1, hidden=64, lr=2e-3, span=2, batch=256, dropout=0.0),
    Recipe("gru", tokens=30, layers=1, hidden=128, lr=3e-3, batch=512, loss="huber"),
    Recipe("linear", lr=3e-3, batch=256),
)
CLASSES = (
    Recipe("tcn", hidden=64, layers=3, pool="mean", dropout=0.2, batch=32),
    Recipe("gru", hidden=64, layers=1, pool="mean", batch=32, lr=2e-3),
    Recipe("transformer", hidden=64, pool="mean", dropout=0.2, batch=32),
    Recipe("mlp", hidden=256, dropout=0.3, batch=32),
    Recipe("tcn", hidden=128, layers=4, pool="attention", dropout=0.3, batch=32),
    Recipe("lstm", hidden=64, layers=1, pool="attention", batch=32, lr=2e-3),
    Recipe("linear", batch=32, lr=3e-3, weight_decay=1e-2),
    Recipe("tcn", hidden=64, layers=3, pool="mean", normalize="window", dropout=0.2, batch=32),
    Recipe("gru", hidden=128, layers=2, pool="mean", dropout=0.3, batch=32),
    Recipe("mlp", hidden=256, dropout=0.3, batch=32, normalize="window"),
)
FIRST: dict[Task, tuple[Recipe, ...]] = {
    "forecast": FORECASTS,
    "estimate": ESTIMATES,
    "classify": CLASSES,
}
CHOICES: dict[Task, dict[str, tuple[Any, ...]]] = {
    "forecast": {
        "normalize": ("none", "last", "window"),
        "loss": ("mse", "mae", "huber"),
        "span": (0.5, 1.0, 2.0, 4.0),
        "channels": ("together", "independent"),
        "inputs": ("all", "targets"),
        "scale_by": ("global", "series"),
        "tokens": (None, 12, 21, 42),
        "hidden": (32, 64, 128, 256),
        "layers": (1, 2, 3),
        "lr": (3e-4, 1e-3, 3e-3),
        "dropout": (0.0, 0.1, 0.3),
        "batch": (32, 128, 512),
        "pool": ("last", "mean", "flatten"),
        "weight_decay": (1e-4, 1e-2),
    },
    "estimate": {
        "loss": ("mse", "mae", "huber"),
        "span": (1.0, 2.0),
        "tokens": (None, 15, 30, 60),
        "hidden": (32, 64, 128),
        "layers": (1, 2, 3),
        "lr": (5e-4, 2e-3, 5e-3),
        "dropout": (0.0, 0.1, 0.3),
        "batch": (64, 256, 1024),
        "pool": ("last", "mean", "attention"),
        "weight_decay": (1e-4, 1e-2),
    },
    "classify": {
        "normalize": ("none", "window"),
        "hidden": (32, 64, 128, 256),
        "layers": (1, 2, 3, 4),
        "lr": (5e-4, 1e-3, 3e-3),
        "dropout": (0.0, 0.2, 0.4),
        "batch": (16, 32, 64),
        "pool": ("last", "mean", "attention", "flatten"),
        "weight_decay": (1e-4, 1e-2),
    },
}
"""The values of each property, the most promising property first"""
UNUSED = {
    "mlp": ("tokens", "pool"),
    "nhits": ("tokens", "pool"),
    "linear": ("tokens", "pool", "hidden", "layers", "dropout"),
}
"""Properties that a kind does not have"""
MAX_RECURRENT_TOKENS = 120
"""A longer context of a recurrent model without patches is left out: it takes minutes"""


def list_recipes(task: Task, seed: int = 0) -> Iterator[Recipe]:
    """Yield the recipes of a task without end: the first ones, then each with one property changed,
    then random ones; none twice, and only of kinds that exist."""
    seen = set[Recipe]()
    for recipe in _propose(task, seed):
        default = Recipe(recipe.kind)
        unused = {name: getattr(default, name) for name in UNUSED.get(recipe.kind, ())}
        recipe = replace(recipe, **unused)
        if recipe.kind in SPECS and recipe not in seen:
            seen.add(recipe)
            yield recipe


def _propose(task: Task, seed: int) -> Iterator[Recipe]:
    yield from FIRST[task]
    for name, values in CHOICES[task].items():
        for recipe in FIRST[task]:
            for value in values:
                yield replace(recipe, **{name: value})
    draw = np.random.default_rng(seed)
    kinds = sorted({recipe.kind for recipe in FIRST[task]})
    while True:
        chosen = {
            name: values[draw.integers(len(values))] for name, values in CHOICES[task].items()
        }
        yield Recipe(kinds[draw.integers(len(kinds))], **chosen)


def build_config(
    recipe: Recipe, problem: Problem, data: Path, work: Path, device: str, minutes: float
) -> dict[str, Any] | None:
    """Return the config of a recipe on a set, or None where it is the same as another recipe."""
    accuracy_set, task = problem.set, problem.set.task
    config = accuracy_set.build_config(data, work)
    section = config["data"]
    is_sequential = SPECS[recipe.kind].is_sequential
    model: dict[str, Any] = {"kind": recipe.kind, "normalize": recipe.normalize}
    if SPECS[recipe.kind].has_hidden:
        model |= {"hidden": recipe.hidden, "layers": recipe.layers, "dropout": recipe.dropout}
    if is_sequential:
        model["pool"] = recipe.pool
    if task != "classify":
        context = _choose_context(recipe, problem)
        patch = max(context // recipe.tokens, 1) if recipe.tokens and is_sequential else 1
        context = patch * math.ceil(context / patch)
        if SPECS[recipe.kind].is_recurrent and context // patch > MAX_RECURRENT_TOKENS:
            return None
        section["context"] = context
        if is_sequential:
            model["patch"] = patch
    if task == "forecast":
        has_more = problem.series[0].inputs.shape[1] > 0
        if recipe.inputs == "targets" and not has_more:
            return None
        if recipe.inputs == "targets":
            section["inputs"] = section["targets"]
        section["channels"] = recipe.channels
        if recipe.scale_by == "series" and len(problem.series) == 1:
            return None
        section["scale_by"] = recipe.scale_by
    train = {
        "lr": recipe.lr,
        "weight_decay": recipe.weight_decay,
        "batch": recipe.batch,
        "repeats": SEEDS,
        "minutes": minutes,
        "epochs": 200 if task == "classify" else 40,
        "patience": 30 if task == "classify" else 6,
    }
    if task != "classify":
        train["loss"] = recipe.loss
    return config | {"model": model, "train": train, "engine": {"device": device}}


def _choose_context(recipe: Recipe, problem: Problem) -> int:
    accuracy_set = problem.set
    context = round(recipe.span * accuracy_set.context)
    if accuracy_set.task == "forecast":
        rows = min(int((series.sets == TRAIN).sum()) for series in problem.series)
        context = min(context, int(MAX_CONTEXT_SHARE * rows))
    return max(context, 8)


# Measurements


@dataclass(frozen=True)
class RecipeResult:
    """The scores of one recipe on one set."""

    set_name: str
    recipe: dict[str, Any]
    val: list[float] = field(default_factory=list)
    """The set's first metric on the validation windows, of each seed"""
    test: list[float] = field(default_factory=list)
    joined_val: float | None = None
    """Of the mean of the seeds' predictions"""
    joined_test: float | None = None
    training_s: float | None = None
    seconds: float | None = None
    epochs: float | None = None
    parameters: int | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        return Recipe(**self.recipe).name

    @property
    def key(self) -> tuple[str, str]:
        return self.set_name, self.name


def read_results(path: Path) -> dict[tuple[str, str], RecipeResult]:
    """Return the results of a file; a line that a kill cut off is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            result = RecipeResult(**json.loads(line))
        except json.JSONDecodeError:
            continue
        found[result.key] = result
    return found


def read_metric(scores: Any, set_part: str, accuracy_set: AccuracySet) -> float:
    """Return the first metric of a set from a summary's scores: in deviations for forecasts, as
    `accuracy_sets` scores them."""
    name = accuracy_set.metrics[0]
    if accuracy_set.task == "forecast" and name in ("mse", "mae"):
        return float(scores["scaled"][set_part][name])
    unit = 100.0 if accuracy_set.name == "lg" else 1.0
    return unit * float(scores["metrics"][set_part][name])


def measure(recipe: Recipe, problem: Problem, config: dict[str, Any], folder: Path) -> RecipeResult:
    """Train a recipe from three seeds and return its scores; a failure is one, with its reason."""
    began = time.perf_counter()
    try:
        summary: Any = slipstream.train(config | {"out": str(folder)}, quiet=True).summary
        lanes, joined = summary["lanes"], summary["ensemble"]
        val, test = (
            [read_metric(lane, part, problem.set) for lane in lanes] for part in ("val", "test")
        )
        joined_val, joined_test = (
            read_metric(joined, part, problem.set) for part in ("val", "test")
        )
    except Exception as error:  # one recipe's failure is a line of the record
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        return RecipeResult(problem.set.name, asdict(recipe), problem=reason)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return RecipeResult(
        problem.set.name,
        asdict(recipe),
        val,
        test,
        joined_val,
        joined_test,
        training_s=summary["seconds_by_phase"]["training"],
        seconds=time.perf_counter() - began,
        epochs=summary["epochs"],
        parameters=summary["parameters"],
    )


def run_all(options: argparse.Namespace, work: Path) -> None:
    """Measure recipe after recipe on all sets until the time is up."""
    path = options.out / MEASUREMENTS
    path.parent.mkdir(parents=True, exist_ok=True)
    known = read_results(path)
    until = time.perf_counter() + 60 * options.minutes
    problems = {name: SETS[name].load(options.data, work) for name in options.sets}
    recipes = {task: list_recipes(task) for task in FIRST}
    for number in range(options.limit):
        for task, proposals in recipes.items():
            recipe = next(proposals)
            for problem in (p for p in problems.values() if p.set.task == task):
                left = (until - time.perf_counter()) / 60
                if left < options.recipe_minutes:
                    return
                config = build_config(
                    recipe, problem, options.data, work, options.device, options.recipe_minutes
                )
                if config is None or (problem.set.name, recipe.name) in known:
                    continue
                result = measure(recipe, problem, config, work / "runs")
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
                known[result.key] = result
                print(f"{number}: {describe(result)}", flush=True)


def describe(result: RecipeResult) -> str:
    if result.problem:
        return f"{result.set_name}: {result.name}: {result.problem}"
    val, test = (statistics.fmean(values) for values in (result.val, result.test))
    return (
        f"{result.set_name}: {result.name}: val {val:.4g}, test {test:.4g}, joined "
        f"{result.joined_val:.4g} and {result.joined_test:.4g}; {result.seconds:.1f} s"
    )


# Tables


def compute_regret(
    found: Sequence[RecipeResult], by: Literal["val", "test"] = "val"
) -> dict[tuple[str, str], float]:
    """Return how much worse the mean score of a recipe is than the best of its set, as a share of
    the best (for accuracy: of the best one's errors plus one percent)."""
    regret = {}
    for set_name in dict.fromkeys(result.set_name for result in found):
        of_set = [result for result in found if result.set_name == set_name]
        means = {result.name: statistics.fmean(getattr(result, by)) for result in of_set}
        if SETS[set_name].metrics[0] in HIGHER_IS_BETTER:
            means = {name: 1.01 - value for name, value in means.items()}
        best = min(means.values())
        for name, value in means.items():
            regret[set_name, name] = value / best - 1
    return regret


def choose_portfolio(
    found: Sequence[RecipeResult], count: int, by: Literal["val", "test"] = "val"
) -> list[tuple[str, float]]:
    """Choose recipes one by one, each so that the regret of the best chosen one, on average over
    sets, becomes least; return them with that average. A recipe without a result on a set counts as
    twice as bad as the worst one there."""
    regret = compute_regret(found, by)
    sets = list(dict.fromkeys(set_name for set_name, _ in regret))
    names = list(dict.fromkeys(name for _, name in regret))
    worst = {s: max(v for (owner, _), v in regret.items() if owner == s) for s in sets}
    table = np.array([[regret.get((s, n), 2 * worst[s] + 1) for s in sets] for n in names])
    chosen: list[tuple[str, float]] = []
    best = np.full(len(sets), np.inf)
    for _ in range(min(count, len(names))):
        means = np.minimum(table, best).mean(axis=1)
        number = int(means.argmin())
        if chosen and means[number] >= chosen[-1][1]:
            break  # every set has its best recipe
        best = np.minimum(best, table[number])
        chosen.append((names[number], float(means[number])))
    return chosen


def build_tables(
    found: Iterable[RecipeResult], by: Literal["val", "test"] = "val"
) -> list[ResultTable]:
    """Return the portfolio of each task, and the best recipes of each set by validation."""
    done = [result for result in found if not result.problem]
    tables = []
    for task in FIRST:
        of_task = [result for result in done if SETS[result.set_name].task == task]
        if not of_task:
            continue
        chosen = choose_portfolio(of_task, NUM_CHOSEN, by)
        cells = [
            [str(number), name, f"{100 * value:.2f} %"]
            for number, (name, value) in enumerate(chosen, start=1)
        ]
        note = (
            "The regret is how much worse the best of the recipes so far is than the best of all, "
            f"by {'validation' if by == 'val' else 'test'}, as a mean over sets."
        )
        tables.append(ResultTable(f"Portfolio: {task}", ["", "recipe", "regret"], cells, note))
    for set_name in dict.fromkeys(result.set_name for result in done):
        metric = SETS[set_name].metrics[0]
        sign = -1 if metric in HIGHER_IS_BETTER else 1
        of_set = [result for result in done if result.set_name == set_name]
        of_set.sort(key=lambda result: sign * statistics.fmean(result.val))
        cells = [_format_result(result) for result in of_set[:NUM_CHOSEN]]
        headings = ["recipe", "validation", "test", "joined, test", "training, s", "wall, s"]
        note = f"{metric}; the best {len(cells)} of {len(of_set)} recipes by validation."
        tables.append(ResultTable(set_name, headings, cells, note))
    return tables


def _format_result(result: RecipeResult) -> list[str]:
    spreads = [
        f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.1g}"
        for values in (result.val, result.test)
    ]
    return [
        result.name,
        *spreads,
        f"{result.joined_test:.4f}",
        f"{result.training_s:.1f}",
        f"{result.seconds:.1f}",
    ]


def summarize(options: argparse.Namespace, seconds: float) -> BenchResult:
    """Write the record of all results of a folder."""
    found = list(read_results(options.out / MEASUREMENTS).values())
    rows = []
    for result in found:
        extra = asdict(result) | {"name": result.name}
        metric = SETS[result.set_name].metrics[0]
        for key in ("set_name", "problem", "recipe"):
            extra.pop(key)
        rows.append(
            ResultRow(result.set_name, result.name, metric, result.test, extra, result.problem)
        )
    num_recipes = len({result.name for result in found})
    num_sets = len({result.set_name for result in found})
    headline = f"{num_recipes} recipes on {num_sets} sets, {SEEDS} seeds each"
    settings = {"device": options.device, "seeds": SEEDS, "by": options.by}
    result = BenchResult(
        "portfolio", headline, rows, build_tables(found, options.by), settings, seconds, notes=[]
    )
    results.write_result(result, options.out)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--out", type=Path, required=True, help="the folder of the record")
    parser.add_argument("--data", type=Path, default=root.parent / "shared" / "data")
    parser.add_argument("--sets", nargs="+", choices=[*SETS], default=[*SETS])
    parser.add_argument("--minutes", type=float, default=25.0, help="the time of all runs")
    parser.add_argument(
        "--recipe-minutes", type=float, default=0.5, help="the training time of a recipe on a set"
    )
    parser.add_argument("--limit", type=int, default=10_000, help="the number of recipes")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--by", choices=("val", "test"), default="val", help="what chooses")
    parser.add_argument("--summarize", action="store_true", help="write the tables only")
    options = parser.parse_args()
    options.data = options.data.resolve()
    began = time.perf_counter()
    if not options.summarize:
        with tempfile.TemporaryDirectory() as name:
            run_all(options, Path(name))
    result = summarize(options, time.perf_counter() - began)
    print(*(table.to_markdown() for table in result.tables), sep="\n")
    print(result.headline)


if __name__ == "__main__":
    main()
