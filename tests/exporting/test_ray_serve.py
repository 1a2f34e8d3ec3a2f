"""The application for Ray Serve; tests/services runs it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import yaml

import slipstream
from slipstream.server.api import build_app
from tests.exporting.small_runs import train_run


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    slipstream.export(train_run(folder, "lstm"), to="ray", out=folder / "out")
    return folder / "out"


def test_the_settings_name_the_application_of_the_file(exported):
    content = yaml.safe_load((exported / "serve.yaml").read_text())
    (application,) = content["applications"]
    module, name = application["import_path"].split(":")
    code = (exported / f"{module}.py").read_text()
    compile(code, module, "exec")
    assert f"\n{name} = Predictor.bind()" in code
    assert [one["name"] for one in application["deployments"]] == ["Predictor"]
    assert content["http_options"]["host"] == "127.0.0.1"


def test_replicas_have_no_streams_whose_state_another_one_would_lack(exported):
    async def ask() -> tuple[int, dict, int]:
        transport = httpx.ASGITransport(app=build_app(exported, has_streams=False))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            schema = await client.get("/schema")
            push = await client.post("/streams/cell", json=[])
            return (await client.get("/health")).status_code, schema.json(), push.status_code

    health, schema, push = asyncio.run(ask())
    assert (health, push) == (200, 404)
    assert set(schema["paths"]) == {"/predict", "/health", "/metrics", "/schema"}
