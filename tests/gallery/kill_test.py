"""Every experiment passes `ctl check`, and resumes with the bits of an undisturbed run after a kill."""

import random

import pytest

from benchmarks import chaos
from ctl import main
from tests.support import child

# Small settings. Runs that are killed evaluate after 150 and save after 50 steps (benchmarks/chaos.py).
KEYS = {
    "char_lm": {
        "data.dir": "docs", "model.layers": 1, "model.heads": 2, "model.width": 16,
        "optimizer.warmup_steps": 10,
    },
    "dcgan": {"data.global_batch_size": 16, "model.width": 4},
    "distill": {"data.global_batch_size": 16},
    "fashion_resnet": {
        "data.dir": "experiments/data/mnist", "data.global_batch_size": 16, "model.stem": 8,
        "model.widths": "(8, 16)", "optimizer.warmup_steps": 10,
    },
    "mnist": {"data.global_batch_size": 16},
    "ppo": {"data.global_batch_size": 4, "model.limit": 20, "model.updates": 2},
    "simclr": {"data.global_batch_size": 16, "model.width": 8, "eval.before_training": False},
    "two_tower": {"model.user_count": 100, "model.interactions": 20_000},
    "vae": {"model.hidden": 20, "data.global_batch_size": 16},
}  # fmt: skip


# distill.py requires another run, and the check of the inputs prints a warning about ppo.py.
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", sorted(KEYS.keys() - {"distill", "ppo"}))
def test_every_check_passes(name, capsys, monkeypatch):
    monkeypatch.chdir(child.ROOT)
    flags = [f"--config.{key}={value}" for key, value in KEYS[name].items()]
    code = main.run(["ctl", f"--config=experiments/{name}.py", "--mode=check", *flags])
    output = capsys.readouterr().out
    assert code == 0 and output.endswith("8 checks: 8 passed, 0 warnings, 0 failed.\n"), output
    row = output.splitlines()[-2]
    assert row.startswith("pass     replica equivalence ") and " give one update" in row


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", KEYS)
def test_killed_experiment_has_the_bits_of_the_undisturbed_run(name, capsys, monkeypatch, tmp_path):
    # After the first save, so that there is work to resume.
    monkeypatch.setattr(chaos, "EARLY", 0.0)
    options = [f"{key}={value}" for key, value in KEYS[name].items()]
    if name == "distill":
        teacher = tmp_path / "teacher"
        run = ["--config=experiments/mnist.py", "--mode=train", "--config.train.steps=2"]
        monkeypatch.chdir(child.ROOT)
        assert main.run(["ctl", *run, f"--workdir={teacher}"]) == 0
        options += [f"init.{key}={teacher}" for key in ("checkpoint", "models.teacher")]
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    # With a window of three seconds, the cheapest experiment has ended before it was killed.
    flags = ["--kills=1", "--steps=600", "--window=1", f"--config=experiments/{name}.py"]
    chaos.main([*flags, f"--seed={seed}", "--options", *options])
    output = capsys.readouterr().out
    print(output)
    assert "| kills | 1 |" in output
    assert "| largest difference of all weights, slots and counters | 0 |" in output
