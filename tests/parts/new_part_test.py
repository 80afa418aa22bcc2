"""A new part of the update is two files of ctl that are edited by hand: its own, and a row for its key.

The file is named after what it tests, not after a module.
"""

import os
import shutil

import pytest

from tests.support import child

PART = """
from ctl.update.gradients import map_values
from ctl.update.part import Part


class Scaling(Part):
    def __init__(self, options):
        self._factor = options.gradient_scale

    def before(self, update):
        update.gradients = [map_values(g, lambda v: self._factor * v) for g in update.gradients]
"""
ROW = """\
    Key("train.gradient_scale", 0.0, least=0, option="gradient_scale", part="scaling:Scaling",
        text="Multiplies the gradients. With 0, this is off."),
"""
USE = """
import inspect, numpy as np, tensorflow as tf, ctl
from ctl import testing
from tests.support.reference_model import make_trainer

assert "gradient_scale: float = 0.0" in str(inspect.signature(ctl.TrainerOptions))
config = ctl.config(train=dict(gradient_scale=3.0))
assert ctl.TrainerOptions.from_config(config).gradient_scale == 3.0
steps = []
for factor in (0.0, 3.0):
    trainer = make_trainer(testing.make_strategy(1), 7, gradient_scale=factor)
    before = trainer.model.get_weights()
    trainer.train(tf.constant(1))
    steps.append([a - b for a, b in zip(trainer.model.get_weights(), before)])
for plain, scaled in zip(*steps):
    np.testing.assert_allclose(scaled, 3 * plain, rtol=1e-12)
try:
    ctl.TrainerOptions(gradient_scale=-1.0)
except ctl.UsageError as error:
    assert str(error).startswith("gradient_scale is -1.0, but must be"), error
"""


@pytest.mark.slow
def test_new_part_is_its_own_file_and_the_row_of_its_key(tmp_path):
    for name in ("ctl", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "_vendored")
        shutil.copytree(child.ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("benchmarks", "tests"):
        os.symlink(child.ROOT / name, tmp_path / name)
    (tmp_path / "ctl/parts/scaling.py").write_text(PART)
    config = tmp_path / "ctl/parts/config.py"
    config.write_text(config.read_text().replace("KEYS = (\n", f"KEYS = (\n{ROW}"))
    for arguments in (["docs/reference/generate.py"], ["-c", USE]):
        done = child.run(arguments, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stderr
    assert "train.gradient_scale" in (tmp_path / "docs/reference/config.md").read_text()
