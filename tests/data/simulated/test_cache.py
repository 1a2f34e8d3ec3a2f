from __future__ import annotations

from slipstream.data.simulated import bars
from slipstream.data.simulated.cache import load_table


def test_a_saved_table_is_the_simulated_one_and_a_damaged_one_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    wanted = bars.simulate()
    assert load_table(bars).equals(wanted)
    (saved,) = (tmp_path / "slipstream").iterdir()
    assert load_table(bars).equals(wanted)
    content = bytearray(saved.read_bytes())
    content[len(content) // 2] ^= 1
    saved.write_bytes(content)
    assert load_table(bars).equals(wanted)
    assert saved.read_bytes() != content  # written again


def test_a_cache_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file"))
    assert load_table(bars).equals(bars.simulate())
