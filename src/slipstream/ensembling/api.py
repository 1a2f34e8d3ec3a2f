"""From finished runs to one run folder that holds them all."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.data.splits import SETS
from slipstream.engine import checkpoint, recovery
from slipstream.ensembling import agreement, scores
from slipstream.errors import UserError
from slipstream.inference.trained import (
    Member,
    bind_members,
    load_member,
    load_own_sets,
    note_left_out,
)
from slipstream.portable import files, mixture
from slipstream.portable.lanes import LANES_FOLDER
from slipstream.portable.overrides import load_changed_config
from slipstream.run_names import ENSEMBLE_FILE
from slipstream.runs import Event, Run
from slipstream.scoring import summary as summaries
from slipstream.training.overview import summarize_data
from slipstream.training.result import FinishedRun

COMMENT = """\
# An ensemble of {count} runs. These are the settings of the member "{name}", whose
# windows it predicts; those of each member are in members/.
"""


@recovery.explain_out_of_memory()
def ensemble(
    members: Sequence[str | Path],
    data: Any = None,
    *,
    name: str = "ensemble",
    out: str | Path | None = None,
    overrides: tuple[str, ...] = (),
    watch: Callable[[Event], None] | None = None,
    allow_code: bool = False,
) -> FinishedRun:
    """Join finished runs; `slipstream.ensemble` documents the arguments."""
    began = time.perf_counter()
    loaded = _load_members(members, overrides, allow_code)
    agreement.refuse_disagreement(loaded)
    for member in loaded:
        runs.require_data(member.run, member.config, data, runs.SAME_ROWS)
    datasets = load_own_sets(loaded, data)
    agreement.refuse_other_data(loaded, datasets)
    reference = max(range(len(loaded)), key=lambda i: loaded[i].trained.signature.context)
    first = loaded[reference]
    own = {"name": name} | ({} if out is None else {"out": str(out)})
    config = configs.replace_settings(first.config, {"out": loaded[0].config.out, **own})
    comment = COMMENT.format(count=len(loaded), name=first.name)
    result: dict[str, Any] = {}

    def fill(run: Run) -> None:
        result.update(_build(run, config, loaded, datasets, reference))

    created = runs.create_locked(
        config.name,
        out=config.out,
        files={"config.toml": runs.format_config(config, comment)},
        watch=watch,
        fill=fill,
    )
    with created as run:
        detail = result.pop("detail")
        result |= {"run": str(run.folder), "seconds": time.perf_counter() - began}
        runs.write_metrics(run, result | {"detail": detail})
        run.append("end", seconds=result["seconds"])
    return FinishedRun(run.folder, result)


def _load_members(
    members: Sequence[str | Path], overrides: tuple[str, ...], allow_code: bool
) -> list[Member]:
    """Load the members' models; refuse runs that are not finished, and what is no list of runs."""
    if len(members) < 2:
        raise UserError("an ensemble needs two runs or more; name each of them")
    opened: dict[Path, Run] = {}
    names: dict[str, int] = {}
    loaded = []
    for one in members:
        run = runs.open_run(one)
        if (run.folder / ENSEMBLE_FILE).exists():
            raise UserError(f"{run.folder}: is an ensemble itself; name its members instead")
        model_run, _ = runs.find_model_run(run)
        if not (run.folder / "metrics.json").exists():
            raise UserError(
                f"{run.folder}: is not finished, so it cannot be a member; resume it first"
            )
        if model_run.folder in opened:
            raise UserError(f"{run.folder}: is named twice; a member counts by its weight")
        opened[model_run.folder] = run
        count = names[run.folder.name] = names.get(run.folder.name, 0) + 1
        label = run.folder.name + (f" ({count})" if count > 1 else "")
        config = load_changed_config(model_run, overrides)
        if config.predict != load_changed_config(model_run, ()).predict:
            raise UserError(
                "predict.filter of an ensemble is that of its members; change it when the ensemble "
                "is used: evaluate and predict take it"
            )
        options: dict[str, Any] = {"overrides": overrides, "allow_code": allow_code}
        loaded.append(load_member(model_run, label, config, **options))
    return loaded


def _build(
    run: Run, config: Config, members: Sequence[Member], datasets: Sequence[Dataset], reference: int
) -> dict[str, Any]:
    """Fill the folder with the members, the predictions and the baselines; return the summary."""
    first = members[reference]
    dataset, predictors = bind_members(members, datasets, reference)
    dataset = note_left_out(members, datasets, dataset, reference, SETS)
    copy_members(run, members)
    with first.plan.flags():
        run.append("scoring", what=f"{len(members)} runs and the baselines")
        assert dataset.memory is not None
        series = dataset.memory.series.to(first.plan.device)
        folds = scores.list_folds(dataset, datasets[reference], predictors)
        scored = scores.score_folds(run, config, folds, series)
    mixture.save_mixture(
        run,
        reference,
        [scores.describe_member(one) | {"data": _read_fingerprint(one)} for one in members],
        [one.mixture for one in scored],
    )
    summaries.save_scored_baselines(run, [one.baselines for one in scored])
    runs.write_json(run.folder / "plan.json", first.plan.to_dict())
    summary, detail = scores.summarize_ensemble(run, config, dataset, members, scored)
    parameters = sum(checkpoint.count_parameters(one.run) for one in members)
    return summary | {
        "parameters": parameters,
        "plan": first.plan.to_dict(),
        "data": summarize_data(dataset, config),
        **runs.describe_origin(),
        "detail": detail,
    }


def _read_fingerprint(member: Member) -> str | None:
    return files.read_origin(member.run).get("data")


def copy_members(run: Run, members: Sequence[Member]) -> None:
    """Copy what evaluate and predict need of each member."""
    for number, member in enumerate(members, start=1):
        to = run.folder / mixture.MEMBERS / str(number)
        to.mkdir(parents=True)
        shutil.copyfile(member.run.folder / "config.toml", to / "config.toml")
        for name in (member.run.model.name, LANES_FOLDER):
            if (member.run.folder / name).exists():
                shutil.copytree(member.run.folder / name, to / name)
