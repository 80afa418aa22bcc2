"""A run that is killed again and again ends with the bits of one that is not."""

import pytest

from benchmarks import chaos
from tests import child

TINY = """
import sys
sys.path.insert(0, "ROOT")
import ctl
from tests import tiny


class Slow(tiny.TinyTrainer):
    dropout = 0.3


def get_config():
    return ctl.config(trainer="slow.py:Slow", data=dict(global_batch_size=7))
""".replace("ROOT", str(child.ROOT))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options",
    [
        ["--kills=2", "--steps=12000"],
        ["--kills=1", "--workers=2", "--steps=2000"],
        ["--kills=2", "--signal=SIGTERM", "--strategy=mirrored", "--steps=4000"],
    ],
)
def test_kills_change_no_bit(tmp_path, monkeypatch, options, capsys):
    (tmp_path / "slow.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    chaos.main([f"--config={tmp_path / 'slow.py'}", *options])
    out = capsys.readouterr().out
    assert "| largest difference of all weights, slots and counters | 0 |" in out
