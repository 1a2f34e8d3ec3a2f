"""Networks of the user's own become graphs by PyTorch's exporter."""

from __future__ import annotations

import json

import onnxruntime
import pytest

import slipstream
from slipstream.base.errors import UserError
from tests.models.nets import Remembering
from tests.models.test_custom import job


@pytest.mark.slow
def test_an_own_network_with_an_lstm_is_exported_with_a_fixed_length(tmp_path):
    run = slipstream.train(job(tmp_path), model=Remembering, quiet=True).run
    result = slipstream.export(run, out=tmp_path / "out", allow_code=True)
    assert result["parity"]["max_rel"] <= 1e-5
    assert result["parity"]["batches"] == [1, 7, 32]
    assert [file["name"] for file in result["files"]] == ["model.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    (rows,) = session.get_inputs()
    assert rows.shape[1:] == [8, 4]
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["inputs"])["rows"]["columns"] == ["time", "a", "b", "c"]
    served = slipstream.export(run, to="triton", out=tmp_path / "served", allow_code=True)
    assert served["parity"]["max_rel"] <= 1e-5
    with pytest.raises(UserError, match='a class of your own; use to="onnx" or torch or triton'):
        slipstream.export(run, to="hub", out=tmp_path / "other", allow_code=True)
