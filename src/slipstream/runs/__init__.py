"""The run folder: its files, its lock and its event log. No torch."""

from slipstream.run_names import find_kind, find_last, find_run
from slipstream.runs.config import CHANGEABLE_ON_RESUME, format_config, is_intact, load_config
from slipstream.runs.files import (
    flush_folder,
    read_json,
    recover_leftovers,
    remove,
    replace_atomically,
    to_json,
    write_json,
    write_text,
)
from slipstream.runs.folder import (
    Run,
    create_locked,
    create_run,
    find_model_run,
    get_cache_folder,
    lock_run,
    open_run,
    read_metrics,
    remove_manifest,
    update_metrics,
    verify_files,
    write_metrics,
)
from slipstream.runs.lock import DISK_FULL, find_holder
from slipstream.runs.log import (
    Event,
    add_event,
    get_log_size,
    read_events,
    read_log,
    sum_parts,
    truncate_log,
)
from slipstream.runs.origin import describe_origin

__all__ = [
    "CHANGEABLE_ON_RESUME",
    "DISK_FULL",
    "Event",
    "Run",
    "add_event",
    "create_locked",
    "create_run",
    "describe_origin",
    "find_holder",
    "find_kind",
    "find_last",
    "find_model_run",
    "find_run",
    "flush_folder",
    "format_config",
    "get_cache_folder",
    "get_log_size",
    "is_intact",
    "load_config",
    "lock_run",
    "open_run",
    "read_events",
    "read_json",
    "read_log",
    "read_metrics",
    "recover_leftovers",
    "remove",
    "remove_manifest",
    "replace_atomically",
    "sum_parts",
    "to_json",
    "truncate_log",
    "update_metrics",
    "verify_files",
    "write_json",
    "write_metrics",
    "write_text",
]
