"""--mode=check passes on the experiments of the gallery, with small models.

Not among them are resnet50.py, whose comparison on four replicas holds more than 10 GiB, distill.py,
which requires another run, and ppo.py, for which the check of the inputs prints a warning.
"""

import pytest

from ctl import main
from tests import child

KEYS = {
    "char_lm": {
        "data.dir": "docs", "model.layers": 1, "model.heads": 2, "model.width": 32,
        "optimizer.warmup_steps": 10,
    },
    "dcgan": {"model.width": 8},
    # Any IDX dataset of 28 x 28 images.
    "fashion_resnet": {
        "data.dir": "experiments/data/mnist", "model.stem": 8, "model.widths": "(16, 32)",
        "optimizer.warmup_steps": 10,
    },
    "mnist": {},
    "simclr": {},
    "two_tower": {"model.user_count": 100, "model.interactions": 20_000},
    "vae": {"model.hidden": 100},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", KEYS)
def test_every_check_passes(name, capsys, monkeypatch):
    monkeypatch.chdir(child.ROOT)
    flags = [f"--config.{key}={value}" for key, value in KEYS[name].items()]
    code = main.run(["ctl", f"--config=experiments/{name}.py", "--mode=check", *flags])
    output = capsys.readouterr().out
    assert code == 0 and output.endswith("8 checks: 8 passed, 0 warnings, 0 failed.\n"), output
    row = output.splitlines()[-2]
    assert row.startswith("pass     replica equivalence ") and " give one update" in row
