"""--mode=find_lr suggests a rate with which the model learns, and keeps nothing but the plot."""

import numpy as np
import pytest
import tf_keras

import ctl
from ctl import main, testing
from ctl.modes import find_lr
from tests.modes.check import planted
from tests.support import reference_model


@pytest.mark.slow
def test_suggestion_learns_and_only_the_plot_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = planted.write_user_experiment(tmp_path, "Regression")
    keys = ("name=sgd", "schedule=cosine", "warmup_steps=5")
    flags = [f"--config.optimizer.{key}" for key in keys]
    assert main.run(["ctl", f"--config={path}", "--mode=find_lr", "--workdir=w", *flags]) == 0
    *_, suggestion, page = capsys.readouterr().out.splitlines()
    rate = float(suggestion.rpartition("=")[2].rstrip("."))
    assert 1e-3 < rate < 1 and "learning_rate" in suggestion and page.startswith("w/find_lr.html")
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["find_lr.html"]
    # With it the loss falls by more than half within 12 steps; with a much smaller one it does not.
    ratios = []
    for value in (rate, 1e-6):
        changed = ctl.configs.flags.load_config(path, [])
        changed.optimizer.name, changed.optimizer.learning_rate = "sgd", value
        with ctl.Run(changed, print_lines=False) as run:
            losses = [run.train(steps=1)["loss"] for _ in range(12)]
        ratios.append(np.mean(losses[-3:]) / np.mean(losses[:3]))
    assert ratios[0] < 0.5 < ratios[1]


@pytest.mark.slow
def test_the_curve_ends_where_the_loss_diverges_and_is_the_same_on_two_replicas():
    one, two = (
        find_lr.measure(
            reference_model.make_trainer(testing.make_strategy(replicas), 8, on_non_finite="ignore")
        )
        for replicas in (1, 2)
    )
    assert len(one.rates) < len(find_lr.RATES) and np.isfinite(one.losses).all()
    np.testing.assert_allclose(one.losses, two.losses, rtol=1e-9)


def test_suggestion_is_a_tenth_of_the_rate_of_the_smallest_loss():
    rates = np.geomspace(1e-4, 1, 9)
    curve = find_lr.RangeTest(rates, np.array([3, 3, 2.9, 2.8, 2, 1.2, 1.1, 2, 9]))
    assert curve.suggestion == pytest.approx(rates[6] / 10)
    # optimizer.learning_rate_batch_size multiplies the rate of the config by the inverse.
    half = find_lr.describe(curve, 0.5)[-1].partition("learning_rate=")[2]
    assert half == f"{curve.suggestion / 2:.1e} (for learning_rate_batch_size)."
    assert find_lr.RangeTest(rates, np.arange(9.0)).suggestion is None
    assert "never falls" in find_lr.describe(find_lr.RangeTest(rates, np.arange(9.0)))[-1]


def test_a_schedule_of_the_trainer_is_rejected():
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    trainer = reference_model.make_trainer(
        testing.make_strategy(1), 8, optimizer=lambda: tf_keras.optimizers.SGD(schedule)
    )
    with pytest.raises(ctl.UsageError, match="let it call its argument"):
        find_lr.measure(trainer)
