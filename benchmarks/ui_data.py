"""How long plots of the app's data screen take, over HTTP, for a file of ten million rows.

    python benchmarks/ui_data.py [--rows 10000000] [--columns 3] [--csv] [--zooms 50]

Writes a Parquet file (with `--csv`, a CSV file) into a temporary folder, starts `slipstream ui`
there, opens the list of files as a browser does, and then measures: the first plot of a column over
the time of the file, which reads both; the first plot of another column; plots of parts of it at
random places and sizes; a page of rows. Each includes the round trip and the whole answer. The
memory is that of the server process. The output is one JSON object.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

BEGIN = 1_577_836_800
"""The first time, 2020-01-01, in seconds; rows are a second apart"""


def write_table(folder: Path, *, rows: int, columns: int, as_csv: bool) -> str:
    """Write random walks over the time; return the file's name."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    generator = np.random.default_rng(0)
    times = (BEGIN + np.arange(rows)).astype("datetime64[s]").astype("datetime64[us]")
    values = {f"c{at}": generator.standard_normal(rows).cumsum() for at in range(columns)}
    table = pa.table({"time": times, **values})
    if as_csv:
        pa.csv.write_csv(table, folder / "table.csv")
        return "table.csv"
    pa.parquet.write_table(table, folder / "table.parquet")
    return "table.parquet"


class Client:
    """Asks a server, as a page of the app does."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.address = parts.hostname, parts.port
        self.token = parts.query.removeprefix("token=")
        self.connection = http.client.HTTPConnection(*self.address, timeout=600)

    def ask(self, path: str, **query: Any) -> tuple[float, Any]:
        """Return how long an answer took, and the answer, asking again while a task goes on."""
        begin = time.perf_counter()
        while True:
            headers = {"Authorization": f"Bearer {self.token}"}
            self.connection.request("GET", f"{path}?{urlencode(query)}", headers=headers)
            response = self.connection.getresponse()
            body = response.read()
            if response.status != 202:
                break
            time.sleep(0.05)
        if response.status != 200:
            raise RuntimeError(body.decode())
        seconds = time.perf_counter() - begin
        is_json = response.getheader("content-type", "").startswith("application/json")
        return seconds, json.loads(body) if is_json else None


def read_megabytes(pid: int) -> float:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def measure(client: Client, pid: int, file: str, *, rows: int, zooms: int) -> dict[str, Any]:
    """Measure what a user sees, in order."""
    start_mb = read_megabytes(pid)
    client.ask("/data")
    time.sleep(5)  # the user looks for the file, the readers start
    table_s, _ = client.ask("/api/data/table", file=file)
    plot = {"file": file, "axis": "time", "width": 1300}
    first_s, _ = client.ask("/api/data/plot", column=1, **plot)
    second_s, _ = client.ask("/api/data/plot", column=2, **plot)
    generator = random.Random(0)
    times = []
    for _ in range(zooms):
        size = rows * 10 ** generator.uniform(-5, 0)
        begin = BEGIN + generator.uniform(0, rows - size)
        seconds, _ = client.ask("/api/data/plot", column=1, begin=begin, end=begin + size, **plot)
        times.append(1000 * seconds)
    rows_s, _ = client.ask("/api/data/rows", file=file, begin=rows // 2)
    findings_s, _ = client.ask("/api/data/findings", file=file)
    return {
        "read_s": round(table_s, 3),
        "first_plot_s": round(first_s, 3),
        "second_column_s": round(second_s, 3),
        "zoom_median_ms": round(statistics.median(times), 1),
        "zoom_worst_ms": round(max(times), 1),
        "page_of_rows_s": round(rows_s, 3),
        "findings_s": round(findings_s, 3),
        "server_start_mb": round(start_mb, 1),
        "server_end_mb": round(read_megabytes(pid), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--columns", type=int, default=3)
    parser.add_argument("--zooms", type=int, default=50)
    parser.add_argument("--csv", action="store_true", help="Write CSV in place of Parquet.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slipstream-") as name:
        folder = Path(name)
        file = write_table(
            folder, rows=options.rows, columns=max(options.columns, 2), as_csv=options.csv
        )
        command = [sys.executable, "-m", "slipstream", "ui", str(folder)]
        command += ["--no-browser", "--no-warm-worker"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                client = Client(server.stdout.readline().strip())
                result = measure(client, server.pid, file, rows=options.rows, zooms=options.zooms)
            finally:
                server.terminate()
        size_mb = round((folder / file).stat().st_size / 1e6)
        print(json.dumps({"file": file, "rows": options.rows, "size_mb": size_mb, **result}))


if __name__ == "__main__":
    main()
