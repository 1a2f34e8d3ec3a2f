"""The shape of the source tree: imports, folders, names and sizes.

Imports point down only, modules of one layer do not import each other, and no modules import each
other in a circle, not even for annotations. Folders, names and sizes have rules too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import slipstream
from slipstream.cli import commands

SOURCE = Path(slipstream.__file__).parent
LAYERS = [
    {"text"},
    {"errors", "events", "phases"},
    {"object_storage"},
    {"checksums", "rank", "run_names", "web_server"},
    {"config", "stats"},
    {"machine", "runs", "search_space"},
    {"kernels"},
    {"data", "models", "objectives"},
    {"portable"},
    {"engine"},
    {"workers"},
    {"clusters"},
    {"scoring"},
    {"autotune"},
    {"inference"},
    {"training", "pretraining", "evaluation", "prediction"},
    {"reporting"},
    {"profiling"},
    {"exporting"},
    {"bench", "catalog", "doctor", "ensembling", "inspection", "probing", "tracking", "tuning"},
    {"serving"},
    {"terminal", "webapp"},
    {"api"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
ORDER = {
    "data": [
        "io io.formats io.formats.mat_values io.compression io.memory io.options "
        "io.times labels missing prepare "
        "prepare.calendars prepare.chain prepare.chain.replay prepare.rolling prepare.spans "
        "simulated simulated.bars simulated.cache simulated.cell windows",
        "io.layout",
        "io.csv",
        "io.decimals io.table prepare.filters prepare.joins",
        "io.columns io.disk prepare.functions prepare.resampling",
        "io.formats.mat_files io.marks",
        "io.formats.excel io.formats.matlab",
        "io.formats.isolated",
        "io.files labels.classes prepare.formulas roles",
        "prediction_columns prepare.chain.plan series",
        "labels.intervals prepare.chain.frames prepare.labelling scaler splits",
        "prepare.chain.operations prepare.chain.source walk_forward",
        "prepare.chain.joined",
        "prepare.chain.lazy",
        "prepare.chain.tables",
        "folds labels.selection stream",
        "dataset",
        "checks",
    ],
    "portable": [
        "files filters lanes networks networks.arithmetic resampling table",
        "mixture networks.heads networks.shapes overrides rows",
        "cost model networks.encoders",
        "networks.windows",
        "networks.steps streaming streaming.parsing streaming.prepared",
        "streaming.preparation",
        "streaming.members",
        "stream",
    ],
    "engine": [
        "batches batches.source carried checkpoint lanes optim parallel parallel.ranks plan "
        "recovery",
        "batches.host capture lanes.flat_optim lanes.lane objective parallel.writing",
        "batches.augmented batches.stream carried.batches lanes.schedule progress step",
        "carried.predictor lanes.capacity lanes.gradients lanes.policy single.task",
        "lanes.epochs lanes.rows",
        "lanes.pack single.step",
        "single.program",
        "single",
        "monitor",
        "events",
        "state",
        "lanes.ended lanes.time_limit",
        "loop",
    ],
    "clusters": ["folders resources", "connection", "ray_tasks"],
    "scoring": [
        "answers batch",
        "baselines classification regression",
        "baseline_files filtering predict",
        "ensemble masked summary",
        "lane_summary",
    ],
    "autotune": [
        "rules timing",
        "candidates",
        "measure",
        "pack_size workload",
    ],
    "inference": [
        "alignment mixture new_data own_data",
        "trained",
        "own_baselines",
    ],
    "exporting": [
        "c c.arrays c.compiler hub interface onnx onnx.builder pytorch pytorch.recurrent servers "
        "standalone",
        "c.formulas c.networks formats onnx.layers pytorch.module servers.docker",
        "c.prepare hub.card onnx.window pytorch.files reference sources",
        "c.memory c.series onnx.model onnx.own_classes onnx.sessions verification",
        "c.checks c.header onnx.step",
        "api c.source onnx.files",
        "c.selftest hub.files servers.ray_serve servers.triton",
        "c.files",
    ],
    "ensembling": [
        "agreement scores",
        "api",
    ],
    "serving": [
        "batching carried formats limits",
        "formats.arrow formats.responses metrics streams streams.rows",
        "formats.requests guard streams.files streams.registry streams.stepwise tables",
        "model",
        "schema",
        "app",
        "api",
    ],
    "tuning": [
        "budget packing packing.dataset_cache packing.trial storage storage.database "
        "storage.journal storage.lock workers",
        "storage.shared_journal",
        "storage.shared",
        "packing.grouping study",
        "packing.pack sharing",
        "packing.scheduler search",
        "retraining workers.worker",
        "summary workers.main workers.processes workers.ray_cluster",
        "workers.launcher",
        "api",
    ],
}
"""Layers inside the larger packages, the lowest first; `python -m tests.test_layers` prints what
the imports are. A package's name stands for its `__init__`"""

COMMANDS = {one.callback.__name__ for one in commands.app.registered_commands}
MOST_MODULES = 12
MOST_PARAMETERS = 7
MOST_LINES = 59
PARTICIPLES = {
    *("asked", "begun", "came", "drawn", "found", "given", "gone", "held", "judged", "kept"),
    *("laid", "made", "said", "shown", "taken", "told", "went"),
}
"""Verb forms that say nothing as a name; `result`, `config`, `requested`, `retained` ... do"""


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    parts = ("slipstream", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports_of(path: Path) -> set[str]:
    """Name every module of Slipstream that a file imports, wherever in the file it does so."""
    result = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            result |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
    return {name for name in result if name in MODULES} - {"slipstream"}


def part_of(module: str) -> str:
    """The package or module right below `slipstream`."""
    return module.split(".")[1]


def inner_modules() -> Iterator[tuple[str, Path]]:
    outer = ("slipstream", "slipstream.__main__")
    return ((name, path) for name, path in MODULES.items() if name not in outer)


def test_every_module_has_a_layer():
    assert {part_of(name) for name, _ in inner_modules()} <= set(RANK)


def test_imports_point_down_only():
    wrong = []
    for name, path in inner_modules():
        own = part_of(name)
        wrong += [
            f"{name} imports {other}"
            for other in imports_of(path)
            if part_of(other) != own and RANK[part_of(other)] >= RANK[own]
        ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: imports_of(path) - {name} for name, path in inner_modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def order_of(package: str) -> dict[str, int]:
    """The declared layer of each module of a package."""
    return {name: at for at, names in enumerate(ORDER[package]) for name in names.split()}


def inside(package: str) -> dict[str, set[str]]:
    """What every module of a package imports of that package."""
    prefix = f"slipstream.{package}."
    graph = {name: imports_of(path) for name, path in MODULES.items() if name.startswith(prefix)}
    return {
        name.removeprefix(prefix): {
            other.removeprefix(prefix) for other in imported & graph.keys() - {name}
        }
        for name, imported in graph.items()
    }


@pytest.mark.parametrize("package", ORDER)
def test_imports_inside_a_package_follow_its_order(package):
    order = order_of(package)
    wrong = [
        f"{name} imports {other}"
        for name, imported in inside(package).items()
        for other in imported
        if name in order and other in order and order[other] >= order[name]
    ]
    assert not wrong


@pytest.mark.parametrize("package", ORDER)
def test_every_module_of_a_package_has_a_place_in_its_order(package):
    assert inside(package).keys() == order_of(package).keys()


def test_the_upper_and_lower_layers_do_without_torch():
    code = (
        "import sys, slipstream, slipstream.cli, slipstream.config, slipstream.errors, "
        "slipstream.api.training, slipstream.api.inference, slipstream.api.results, "
        "slipstream.api.estimator, slipstream.api.model, "
        "slipstream.runs, slipstream.reporting.page; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_portable_model_does_without_torch():
    """A server and a device without torch import these modules."""
    names = [name for name in MODULES if name.startswith("slipstream.portable")]
    code = f"import sys, {', '.join(names)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# folders, names and sizes


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, path in MODULES.items():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.lineno} {node.name}", node


def crowded_folders() -> Counter[str]:
    folders = Counter(path.parent for path in MODULES.values() if not path.stem.startswith("__"))
    return Counter(
        {str(folder): n - MOST_MODULES for folder, n in folders.items() if n > MOST_MODULES}
    )


def repeated_classes() -> Counter[str]:
    names = Counter(
        node.name
        for path in MODULES.values()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
    )
    return Counter({name: n - 1 for name, n in names.items() if n > 1})


def is_interface(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the parameters are options that users name: of a command or a public function."""
    commands = (one.func for one in node.decorator_list if isinstance(one, ast.Call))
    command = any(isinstance(one, ast.Attribute) and one.attr == "command" for one in commands)
    return command or node.name in {*slipstream.__all__, *COMMANDS}


def long_signatures() -> Counter[str]:
    result: Counter[str] = Counter()
    for where, node in functions():
        if is_interface(node):
            continue
        signature = node.args
        names = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs]
        count = sum(name.arg not in ("self", "cls") for name in names)
        if count > MOST_PARAMETERS and part_of(where) != "kernels":
            result[where] = count - MOST_PARAMETERS
    return result


def long_bodies() -> Counter[str]:
    result: Counter[str] = Counter()
    for where, node in functions():
        body = node.body[ast.get_docstring(node) is not None :]
        lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
        if lines > MOST_LINES and part_of(where) != "kernels":
            result[where] = lines - MOST_LINES
    return result


def participles() -> Counter[str]:
    """Count what is named by a participle, and every function whose name begins with one."""
    result: Counter[str] = Counter()
    for module, path in MODULES.items():
        for node in ast.walk(parse(path)):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    wrong = name.strip("_").split("_")[0] in PARTICIPLES
                case (
                    ast.arg(arg=name)
                    | ast.Name(id=name, ctx=ast.Store())
                    | ast.Attribute(attr=name, ctx=ast.Store())
                ):
                    wrong = name.strip("_") in PARTICIPLES
                case _:
                    continue
            if wrong:
                result[f"{module} {name}"] += 1
    return result


RULES = {
    "modules beyond twelve in a folder": crowded_folders,
    "class names used twice": repeated_classes,
    "parameters beyond seven": long_signatures,
    "lines beyond fifty-nine in a body": long_bodies,
    "participles as names": participles,
}


@pytest.mark.parametrize("rule", RULES)
def test_nothing_new_breaks_a_rule(rule):
    offenders = RULES[rule]()
    listed = "\n".join(f"{n:4} {where}" for where, n in sorted(offenders.items()))
    assert not offenders, f"{rule}:\n{listed}"


def levels(graph: dict[str, set[str]]) -> list[list[str]]:
    """Each module one layer above the highest that it imports."""
    sorter, result = TopologicalSorter(graph), []
    sorter.prepare()
    while sorter.is_active():
        result.append(sorted(sorter.get_ready()))
        sorter.done(*result[-1])
    return result


if __name__ == "__main__":
    for package in ORDER:
        print(package, *(" ".join(names) for names in levels(inside(package))), sep="\n  ")
