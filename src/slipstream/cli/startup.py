"""Keeps imports that no command needs out of the way to the first step."""

import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _PandasRefusal(MetaPathFinder):
    """A finder of modules that says there is no pandas."""

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("no command needs pandas", name=fullname)


def avoid_pandas() -> None:
    """Make Arrow work without pandas, which its first conversion would import (0.5 s).

    Arrow looks for pandas once and remembers the answer. Afterwards others can still import it.
    """
    import pyarrow as pa

    refusal = _PandasRefusal()
    sys.meta_path.insert(0, refusal)
    try:
        pa.chunked_array([pa.array([1.0])]).to_numpy()
    finally:
        sys.meta_path.remove(refusal)
