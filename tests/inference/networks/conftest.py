"""What the tests of numpy networks share."""

import pytest

from slipstream.config import Signature


@pytest.fixture
def signature():
    """Two inputs, of which one is the target of the next row."""
    return Signature(
        inputs=("a", "t0"),
        targets=("t0",),
        static=(),
        shared=1,
        context=8,
        horizon=1,
        channels="together",
        quantiles=(),
        step=None,
    )
