"""The run folder: its files, its lock and its event log. No torch here."""

from slipstream.runs.files import (
    flush_folder,
    read_json,
    recover_leftovers,
    remove,
    replacing,
    to_json,
    write_json,
    write_text,
)
from slipstream.runs.folder import (
    Run,
    cache_folder,
    create,
    creating,
    find,
    last,
    locked,
    with_model,
)
from slipstream.runs.lock import NO_ROOM
from slipstream.runs.log import Event, cut_log, events, log_size, read_log
from slipstream.runs.manifest import read_metrics, unseal, verify, write_metrics
from slipstream.runs.settings import MAY_CHANGE, config_text, load_config

__all__ = [
    "MAY_CHANGE",
    "NO_ROOM",
    "Event",
    "Run",
    "cache_folder",
    "config_text",
    "create",
    "creating",
    "cut_log",
    "events",
    "find",
    "flush_folder",
    "last",
    "load_config",
    "locked",
    "log_size",
    "read_json",
    "read_log",
    "read_metrics",
    "recover_leftovers",
    "remove",
    "replacing",
    "to_json",
    "unseal",
    "verify",
    "with_model",
    "write_json",
    "write_metrics",
    "write_text",
]
