"""Settings that were changed but have no effect beside the others."""

from collections.abc import Iterator

from slipstream.config.model import SPECS, list_kinds
from slipstream.config.sections import Config
from slipstream.config.train import KINDS


def list_unused(config: Config) -> list[str]:
    """Say of each setting that differs from its default and has no effect why it has none."""
    unused = [*_find_in_train(config), *_find_in_data(config)]
    if "model.kind" not in config.tune.space:
        unused = [*_find_in_model(config), *unused]
    unused += [
        (f"augment.{kind}_chance", f"augment.{kind} is off")
        for kind in KINDS
        if not getattr(config.augment, kind)
    ]
    return [
        f"{name} = {format_setting(config, name)} has no effect: {why}"
        for name, why in unused
        if _is_changed(config, name)
    ]


def _is_changed(config: Config, name: str) -> bool:
    section, key = name.split(".")
    settings = getattr(config, section)
    return bool(getattr(settings, key) != type(settings).model_fields[key].default)


def format_setting(config: Config, name: str) -> str:
    """Format the value of a setting as TOML has it, roughly."""
    section, _, key = name.partition(".")
    value = getattr(getattr(config, section), key) if key else getattr(config, section)
    if isinstance(value, tuple):
        return f"[{', '.join(_format_value(one) for one in value)}]"
    return _format_value(value)


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def _find_in_model(config: Config) -> Iterator[tuple[str, str]]:
    model, spec = config.model, config.model.spec
    kind = "your own class" if spec.is_custom else f'model.kind = "{model.kind}"'
    if not spec.is_sequential:
        reads = "has layers of its own" if spec.is_custom else "reads all rows of a window at once"
        yield from ((f"model.{name}", f"{kind} {reads}") for name in ("patch", "pool"))
    if not spec.has_hidden:
        names = ["hidden", "layers", "dropout"]
        if isinstance(model.hidden, tuple):  # the layers follow from it
            names.remove("layers")
        what = "has layers of its own" if spec.is_custom else "has no hidden layer"
        yield from ((f"model.{name}", f"{kind} {what}") for name in names)
    elif spec.is_recurrent and len(model.sizes) == 1:
        yield "model.dropout", "it drops between layers, and there is one"
    if config.data.task == "classify" or config.masked:
        yield "model.output_range", "it limits predicted numbers, and there are none"
    others = {name for other in SPECS.values() for name in other.settings} - set(spec.settings)
    for name in sorted(others):
        yield f"model.{name}", f"it is for {' and '.join(list_kinds(name))}, not {kind}"


def _find_in_train(config: Config) -> Iterator[tuple[str, str]]:
    train = config.train
    goes_with: dict[str, dict[str, tuple[str, ...]]] = {
        "loss": {"quantiles": ("quantile",), "huber_delta": ("huber",), "focal_gamma": ("focal",)},
        "optimizer": {"momentum": ("sgd",)},
        "schedule": {
            **dict.fromkeys(("step_epochs", "step_factor"), ("step",)),
            **dict.fromkeys(("plateau_patience", "plateau_factor"), ("plateau",)),
            **dict.fromkeys(("restart_epochs", "restart_growth"), ("restarts",)),
            "lr_min": ("cosine", "restarts", "plateau"),
        },
    }
    for choice, settings in goes_with.items():
        value = getattr(train, choice)
        for name, values in settings.items():
            if value not in values:
                wanted = " or ".join(f'"{one}"' for one in values)
                yield (
                    f"train.{name}",
                    f'it applies only with train.{choice} = {wanted}, not "{value}"',
                )
    for name in ("exploit_lr", "exploit_lr_min") if not train.exploit_epochs else ():
        yield f"train.{name}", "it applies only with train.exploit_epochs, which is 0"
    if train.patience == "off":
        yield "train.exploit_epochs", 'they begin when patience runs out, and it is "off"'
    if train.init_from is None:
        for name in ("freeze_epochs", "encoder_lr", "layer_decay"):
            yield f"train.{name}", "it applies only with train.init_from, which is not set"


def _find_in_data(config: Config) -> Iterator[tuple[str, str]]:
    data = config.data
    if data.time_column is None:
        for name in ("time_format", "gap_tolerance", "unsorted"):
            yield f"data.{name}", "it is about data.time, which is not set"
    if not data.horizon and not config.masked:
        yield "data.period", "it is for the seasonal baseline, which forecasts"
