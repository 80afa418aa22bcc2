"""Experiments that are killed at a random instant and resumed end with the bits of undisturbed runs."""

import random

import pytest

from benchmarks import chaos
from ctl import main
from tests import child

# Small settings, with evaluations after 150 and saves after 50 steps (benchmarks/chaos.py).
KEYS = {
    "char_lm": {
        "data.dir": "docs", "model.layers": 1, "model.heads": 2, "model.width": 16,
        "optimizer.warmup_steps": 10,
    },
    "dcgan": {"data.global_batch_size": 16, "model.width": 4},
    "distill": {"data.global_batch_size": 16},
    "fashion_resnet": {
        "data.dir": "experiments/data/mnist", "data.global_batch_size": 16, "model.stem": 4,
        "model.widths": "(4, 8)", "optimizer.warmup_steps": 10,
    },
    "mnist": {"data.global_batch_size": 16},
    "ppo": {"data.global_batch_size": 4, "model.limit": 20, "model.updates": 2},
    "simclr": {"data.global_batch_size": 16, "model.width": 8, "eval.before_training": False},
    "two_tower": {"model.user_count": 100, "model.interactions": 20_000},
    "vae": {"model.hidden": 20, "data.global_batch_size": 16},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", KEYS)
def test_killed_experiment_has_the_bits_of_the_undisturbed_run(name, capsys, monkeypatch, tmp_path):
    # After the first save, so that there is work to resume.
    monkeypatch.setattr(chaos, "EARLY", 0.0)
    options = [f"--config.{key}={value}" for key, value in KEYS[name].items()]
    if name == "distill":
        teacher = tmp_path / "teacher"
        run = ["--config=experiments/mnist.py", "--mode=train", "--config.train.steps=2"]
        monkeypatch.chdir(child.ROOT)
        assert main.run(["ctl", *run, f"--workdir={teacher}"]) == 0
        options += [f"--config.init.{key}={teacher}" for key in ("checkpoint", "models.teacher")]
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    # With a window of three seconds, the cheapest experiment has ended before it was killed.
    flags = ["--kills=1", "--steps=600", "--window=1", f"--config=experiments/{name}.py"]
    chaos.main([*flags, f"--seed={seed}", "--", *options])
    output = capsys.readouterr().out
    print(output)
    assert "| kills | 1 |" in output
    assert "| largest difference of all weights, slots and counters | 0 |" in output
