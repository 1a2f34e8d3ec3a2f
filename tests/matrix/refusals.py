"""The commands that refuse a kind of run, what they say, and why that is right.

A cell of the matrix has to refuse exactly if a line of `REFUSALS` covers it; the first one counts.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatch
from typing import NamedTuple

from tests.matrix.kinds import KINDS

ENCODERS = ("pre-trained", "stopped encoder")
EXPORTS = ("hub export", "ray export")


def having(*words: str, without: Collection[str] = ()) -> tuple[str, ...]:
    """The kinds whose names have one of these words."""
    return tuple(
        kind
        for kind in KINDS
        if any(word in kind for word in words) and not any(word in kind for word in without)
    )


SEARCHES, ENSEMBLES, TABLES = having("search"), having("ensemble"), having("table")
STREAMED, CARRIED = having("streamed", without=["ensemble"]), having("carried")
REPEATED = having("repeats", "shares")
STOPPED = having("stopped")
TRAINED = tuple(kind for kind in KINDS if kind not in (*SEARCHES, *ENSEMBLES, *ENCODERS, "probe"))
"""What `train` made, or an export of that"""

OWN_TEST = (
    *("evaluate", "evaluate (text)", "evaluate --on val", "evaluate --single"),
    *("evaluate --predictions", "evaluate --stream*"),
    *("slipstream.evaluate", "slipstream.evaluate, a stream"),
)
"""They read the data that a run was trained on"""
USES = (
    *("evaluate*", "predict*", "export*", "serve*", "slipstream.evaluate*", "slipstream.predict"),
    *("slipstream.export", "slipstream.load", "slipstream.Stream"),
)
"""They need a model"""
JOIN = ("ensemble", "slipstream.ensemble")
FINISHED = ("report", "slipstream.report", "slipstream.Result")
BEST = ("runs best", "slipstream.best_run")
RESULTS = ("slipstream.tune", "slipstream.Result")
LONGER = ("train --resume, longer", "slipstream.train")


class Refused(NamedTuple):
    """Some commands on some kinds, with a pattern of what they say."""

    kinds: Collection[str]
    commands: Collection[str]
    says: str
    why: str

    def covers(self, kind: str, command: str) -> bool:
        return kind in self.kinds and any(fnmatch(command, one) for one in self.commands)


REFUSALS = [
    # what has no model of its own
    Refused(
        ["probe"],
        (*USES, *JOIN, *LONGER, "*--resume", "slipstream.pretrain", *RESULTS),
        "is a probe; name one of its runs",
        "a probe holds the runs of several ways to train",
    ),
    Refused(
        ["probe"],
        ["train", "train from it", "pretrain", "tune"],
        "there is no such config file",
        "it has two configs, of the encoder and of the labels",
    ),
    Refused(
        ["probe", *EXPORTS],
        ["follow --to tensorboard"],
        "has no events.jsonl to follow",
        "nothing was logged there",
    ),
    Refused(
        ENCODERS,
        [*USES, "slipstream.Forecaster"],
        "holds a pre-trained encoder, which predicts nothing yet",
        "its head fills in masked rows",
    ),
    Refused(
        ["pre-trained"],
        JOIN,
        "holds a pre-trained encoder, which predicts nothing yet",
        "its head fills in masked rows",
    ),
    Refused(["stopped search"], USES, "is missing; was the run finished", "no trial has ended"),
    # what is not finished, or was never tested
    Refused(
        (*STOPPED, *EXPORTS), FINISHED, "is missing; was the run finished", "there are no scores"
    ),
    Refused(
        (*STOPPED, *EXPORTS, "pre-trained", "search, nothing retrained"),
        BEST,
        "holds no finished run with a test error that fits",
        "nothing was tested",
    ),
    Refused(
        (*STOPPED, *EXPORTS),
        JOIN,
        "is not finished, so it cannot be a member",
        "no scores to weigh",
    ),
    Refused(
        [kind for kind in SEARCHES if kind not in STOPPED and "auto" not in kind],
        ["slipstream.Result"],
        "is a search of many models; (open the run that it chose|none is tested)",
        "a study has trials, not one result",
    ),
    Refused(
        ["refit"],
        (*OWN_TEST, *FINISHED, *JOIN),
        "is untested: trained on all rows, its expected error is that of .*/retrained/best",
        "it has seen the rows of all sets",
    ),
    Refused(
        ["refit"],
        BEST,
        "holds no finished run with a test error that fits",
        "nothing was tested",
    ),
    Refused(
        ["refit"],
        ["follow --to tensorboard"],
        "has no events.jsonl to follow",
        "its training is in the log of the search",
    ),
    Refused(
        ["refit"],
        ["train --resume", *LONGER],
        "has no checkpoint to resume from",
        "the search is what is resumed",
    ),
    # what cannot go on, or not this way
    Refused(
        ENSEMBLES,
        ["train --resume", *LONGER, "pretrain --resume", "slipstream.pretrain"],
        "is an ensemble; there is nothing to train further",
        "its members are runs of their own",
    ),
    Refused(
        ENSEMBLES,
        ["tune --resume", "slipstream.tune"],
        "is an ensemble, not a search; there is nothing to resume",
        "its members are runs of their own",
    ),
    Refused(ENSEMBLES, JOIN, "is an ensemble itself; name its members", "weights are not nested"),
    Refused(
        SEARCHES,
        ["train --resume", *LONGER, "pretrain --resume", "slipstream.pretrain"],
        r"is a search; resume with: slipstream.tune",
        "a search is resumed as one",
    ),
    Refused(
        TRAINED,
        ["pretrain --resume", "slipstream.pretrain"],
        r"is not a pre-training run; resume with: slipstream.train",
        "a training is resumed as one",
    ),
    Refused(
        (*TRAINED, *ENCODERS),
        ["tune --resume", "slipstream.tune"],
        r"is a training run, not a search; resume with: slipstream.(pre)?train",
        "a training is resumed as one",
    ),
    Refused(
        [kind for kind in (*TRAINED, *ENCODERS) if kind not in (*STOPPED, *EXPORTS)],
        ["train --resume"],
        "is finished, (after . epoch|with all lanes done)",
        "there is nothing left to do",
    ),
    Refused(
        ["pre-trained"],
        ["pretrain --resume", "slipstream.pretrain"],
        "is finished, after 1 epoch",
        "there is nothing left to do",
    ),
    Refused(
        [kind for kind in KINDS if kind not in (*ENCODERS, *having("own"))],
        ["train from it"],
        r"init_from = .*(is a run of slipstream train|is an ensemble|is a search); name a run of",
        "only an encoder can be started from",
    ),
    Refused(
        having("own"), ["train from it"], "is not an encoder; train.init_from takes", "its class is"
    ),
    Refused(
        ENCODERS,
        ["train from it", "slipstream.probe"],
        "data.split leaves no test window",
        "pre-training needs no test rows, and its config sets none",
    ),
    Refused(
        REPEATED,
        ["tune"],
        "train.repeats is not supported in a search; set tune.retrain_seeds",
        "a search has seeds of its own",
    ),
    Refused(
        [kind for kind in REPEATED if "own" not in kind and "quantiles" not in kind],
        ["pretrain"],
        "train.repeats does not apply to pre-training",
        "one encoder is trained",
    ),
    # data that are not there any more
    Refused(
        TABLES,
        OWN_TEST,
        "was trained on a table that was passed from Python.*pass the rows to score",
        "a table is not saved",
    ),
    Refused(
        TABLES,
        ["export --to *"],
        "was trained on a table that was passed from Python.*an export is verified on windows",
        "a table is not saved",
    ),
    Refused(
        TABLES,
        ["train --resume*", "tune --resume", "ensemble"],
        "was trained on a table that was passed from Python.*pass the same rows again",
        "a table is not saved",
    ),
    Refused(
        TABLES,
        ["train", "pretrain", "pretrain --probe", "tune", "auto"],
        "data.path is not set; name a file or a folder",
        "a config names no table",
    ),
    Refused(
        EXPORTS,
        [
            *OWN_TEST,
            "export --to *",
            "train",
            "train --resume*",
            *LONGER,
            "pretrain",
            "tune",
            "auto",
        ],
        r"there is no such file or folder \(data.path\)",
        "an export tells nobody where the data were",
    ),
    # data that stay on disk
    Refused(
        STREAMED,
        ["evaluate --stream*", "slipstream.evaluate, a stream"],
        "a stream is scored over whole series, but these stay on disk; pass",
        "the state of a series is carried over all of its rows",
    ),
    Refused(
        ["streamed, ensemble"],
        [*OWN_TEST, "export --to *"],
        "its data are streamed, but an ensemble needs them in memory; pass",
        "members are compared window by window",
    ),
    Refused(
        STREAMED,
        JOIN,
        "its data are streamed, but an ensemble needs them in memory; pass",
        "members are compared window by window",
    ),
    Refused(
        [kind for kind in STREAMED if "repeats" not in kind],
        ["tune"],
        "a search keeps one copy of the series per fold on the device",
        "trials draw from it together",
    ),
    Refused(STREAMED, ["auto"], "a search keeps one copy of the series per fold", "as for tune"),
    Refused(
        [kind for kind in KINDS if "auto" not in kind],
        ["auto --resume", "slipstream.auto"],
        "",
        "it is not a run of auto",
    ),
    Refused(["streamed"], ["bench *"], "larger than memory and would be streamed", "peers cannot"),
    Refused(
        having("streamed"),
        ["slipstream.Forecaster"],
        "reads Parquet and Arrow files, which data is not",
        "a table is in memory already",
    ),
    # settings that exclude each other
    Refused(
        ["pre-trained"],
        ["pretrain --probe"],
        "train.repeats does not apply to pre-training",
        "the probe's labels are those of an encoder",
    ),
    Refused(
        having("quantiles"),
        ["pretrain"],
        "train.(loss|repeats|state)",
        "masked rows have a value, no quantiles",
    ),
    Refused(
        CARRIED,
        ["tune", "slipstream.tune", "tune --resume"],
        'train.state = "carried" is not supported in a search',
        "lanes begin each window from zero",
    ),
    Refused(
        CARRIED,
        ["pretrain"],
        'train.state = "carried" does not work with pre-training',
        "masked rows are filled in within windows",
    ),
    Refused(["fine-tuned"], ["pretrain"], "train.init_from does not apply", "it starts anew"),
    Refused(
        having("nhits", "mlp", "linear", "baselines"),
        ["pretrain"],
        "has no sequence encoder to pre-train",
        "it reads a window as one vector",
    ),
    Refused(having("own"), ["pretrain"], "is your own class, which has no encoder", "its class is"),
    Refused(
        ENCODERS,
        ["tune", "auto"],
        "train.objective is not supported in a search; pre-train first",
        "trials are scored by what they predict",
    ),
    Refused(
        having("baselines"),
        ["slipstream.Forecaster"],
        "is a baseline, which every run fits beside its network",
        "a baseline is fitted, not trained; the first member is one",
    ),
    Refused(
        ["classes, ensemble of baselines"],
        ["train", "tune"],
        "is a baseline, which every run fits beside its network",
        "a baseline is fitted, not trained; no member is a network",
    ),
    Refused(
        ["gru", "table"],
        ["train --share", "slipstream.train_share"],
        "this run trains one model",
        "one model cannot be divided",
    ),
    # exports and streams
    Refused(
        having("own"),
        ["serve*", "slipstream.Stream"],
        "is a class of yours, which runs in PyTorch only",
        "serving needs no torch",
    ),
    Refused(
        having("own"),
        ["export --to hub", "export --to c", "export --to ray", "export --data"],
        "does not know model.kind = a class of your own; use --to onnx or torch or triton",
        "these formats hold networks that numpy computes",
    ),
    Refused(
        ["carried, ensemble"],
        ["export --to torch"],
        'train.state = "carried"',
        "members of the same kind need different rows",
    ),
    Refused(
        ["carried, ensemble"],
        [one for one in USES if "export" in one or "serve" in one],
        "needs more rows than the other members; export the members by themselves",
        "members of the same kind need different rows",
    ),
    Refused(
        CARRIED,
        ["export --to torch"],
        "a program takes windows of data.context rows and starts each from zero; use --to",
        "torch.export holds no state",
    ),
    Refused(
        ["calendar", "joined"],
        ["export --to c"],
        r"C code cannot do this row by row; pass --after-prepare",
        "it knows neither times nor tables",
    ),
    Refused(
        ["calendar"],
        ["serve, a stream", "slipstream.Stream"],
        'the row has no value in the column "a"; a stream takes such rows only of a run with',
        "the last rows of the table are those ahead",
    ),
    Refused(
        ["joined"],
        ["serve, a stream", "slipstream.Stream"],
        'the row has no column "outside"',
        "a stream has what the join brings in its rows",
    ),
    Refused(
        having("future"),
        ["serve, a stream"],
        r"there are no streams here: the model reads p \(data.future\)",
        "a row over HTTP has no rows ahead",
    ),
]


def find_refusal(kind: str, command: str) -> Refused | None:
    """Return the line that a cell has to refuse by; None where it has to give a result."""
    return next((one for one in REFUSALS if one.covers(kind, command)), None)
