"""Tests of the trainer. They need no GPU: conftest.py splits the CPU into four devices."""

import config
import trainer

import ctl


def test_the_update_does_not_depend_on_the_split():
    ctl.testing.assert_replica_equivalent(
        trainer.Trainer,
        trainer.make_examples(8, seed=0),
        options=ctl.TrainerOptions(model=config.get_config().model.to_dict()),
    )


def test_it_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # relative paths of the config start at its own folder
    with ctl.Run(config.__file__, print_lines=False) as run:
        before = run.evaluate()
        run.train(steps=200)
        after = run.evaluate()
        (metric,) = run.trainer.metrics
    assert after["loss"] < 0.5 * before["loss"]
    assert after[metric] > 0.8
