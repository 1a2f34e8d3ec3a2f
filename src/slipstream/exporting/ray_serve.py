"""The format "ray": an application for Ray Serve, which runs as many copies as the load needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slipstream.exporting.formats import ExportSource, WrittenExport
from slipstream.exporting.onnx import files as onnx_files

APPLICATION = '''\
"""Ray Serve application: run `serve run serve.yaml` in this folder.

It answers /predict, /health, /metrics and /schema as `slipstream serve` does, without torch. Each
replica loads this folder. There are no streams: a stream's state is in one process, and Ray sends
every request to any replica.
"""

import os
from pathlib import Path

from ray import serve


def build():
    from slipstream.server.api import build_app

    token = os.environ.get("SLIPSTREAM_TOKEN")
    return build_app(Path(__file__).parent, token=token, has_streams=False)


@serve.deployment
@serve.ingress(build)
class Predictor:
    pass


application = Predictor.bind()
'''
CONFIG = """\
# serve run serve.yaml; https://docs.ray.io/en/latest/serve/production-guide/config.html
http_options:
  host: 127.0.0.1 # 0.0.0.0 for clients on other machines; then set SLIPSTREAM_TOKEN below
  port: 8000
applications:
  - name: "{name}"
    route_prefix: /
    import_path: application:application
    # runtime_env:
    #   working_dir: . # a ZIP archive at a URL, where Ray runs on several machines
    #   env_vars: {{ SLIPSTREAM_TOKEN: "..." }}
    deployments:
      - name: Predictor
        num_replicas: 1 # or autoscaling_config: {{ min_replicas: 1, max_replicas: 8 }}
        max_ongoing_requests: 256
        ray_actor_options:
          num_cpus: 1
"""


def write(source: ExportSource, folder: Path) -> WrittenExport:
    """Write the graphs, the application and its settings."""
    written = onnx_files.write(source, folder)
    (folder / "application.py").write_text(APPLICATION, encoding="utf-8")
    text = CONFIG.format(name=source.run.first.config.name)
    (folder / "serve.yaml").write_text(text, encoding="utf-8")
    note = 'it needs pip install "ray[serve]" and Slipstream on every machine'
    return replace(written, notes=(*written.notes, note))
