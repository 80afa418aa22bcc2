"""on_non_finite=rollback: back to the last checkpoint, skipping the batch that was not finite."""

import functools
import json

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.errors import Failure
from ctl.loop import rollback
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.controller import Controller
from ctl.loop.rollback import RollbackPolicy
from ctl.replica.measure.non_finite import WINDOW
from ctl.replica.step.engine import engine_of
from tests import reference_model
from tests.faulty_trainers import BAD, CASES, jumping, poisoned, same, state
from tests.loop.shared import Recording, make_reference, same_copies

STEPS = 8


def run(folder, trainer, steps=STEPS, **options):
    reporter, checkpoints = Recording(trainer), Checkpointer(folder, trainer)
    controller = Controller(
        trainer=trainer, checkpoints=checkpoints, steps_per_loop=3, reporter=reporter, **options
    )
    controller.restore_checkpoint()
    controller.train(steps)
    return reporter.events, [line for line in reporter.lines if not line.startswith("train ")]


@functools.cache
def without(*steps):
    """The state of a clean run that skips the batches of some steps."""
    clean = poisoned(1, -1)
    for step in range(STEPS):
        if step in steps:
            clean.global_step.assign_add(1)
        else:
            clean.train(tf.constant(1))
    return state(clean)


@pytest.mark.parametrize(("replicas", "row", "options"), CASES)
def test_run_skips_the_batch_after_a_rollback(tmp_path, replicas, row, options):
    trainer = poisoned(replicas, row, on_non_finite="rollback", **options)
    events, lines = run(tmp_path, trainer)
    same(state(trainer), without(BAD), 1e-10)
    assert trainer.global_step.numpy() == STEPS
    assert trainer.optimizer.iterations.numpy() == STEPS - 1
    names = [(name, step) for name, step, _ in events]
    assert names == [("checkpoint", 0), ("non_finite", BAD), ("rollback", 0), ("checkpoint", STEPS)]
    assert events[2][2]["left_out"] == BAD
    assert lines[0].startswith(f"Step {BAD} is not finite: the loss is first, on the examples ")
    assert lines[0].endswith("Back to step 0; that batch is skipped from now on (rollback 1).")
    assert all(same_copies(v, v.numpy(), replicas) for v in trainer.model.variables)


class TwiceBad(reference_model.ReferenceTrainer):
    """The batches of two steps are NaN."""

    weighted = False

    def preprocess(self, batch):
        batch = super().preprocess(batch)
        rows = ctl.replica.current()
        bad = [] if rows is None else [tf.equal(rows.step, step) for step in (3, 6)]
        x = batch["x"]
        return {**batch, "x": tf.where(tf.reduce_any(bad), x * np.nan, x) if bad else x}


def twice_bad():
    return make_reference(cls=TwiceBad, on_non_finite="rollback")


def test_each_of_several_batches_has_its_own_rollback(tmp_path):
    trainer = twice_bad()
    events, _ = run(tmp_path, trainer, checkpoint_interval=5)
    back = [(step, fields["left_out"]) for name, step, fields in events if name == "rollback"]
    assert back == [(0, 3), (5, 6)]
    assert trainer.global_step.numpy() == STEPS
    assert trainer.optimizer.iterations.numpy() == STEPS - 2
    assert all(np.isfinite(value).all() for value in state(trainer))


def test_limit_of_rollbacks_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(rollback, "LIMIT", 1)
    with pytest.raises(
        Failure, match=r"Step 6 is not finite: .* rolled back 1 times, which is its limit"
    ):
        run(tmp_path, twice_bad(), rollback=RollbackPolicy())


def test_decision_outlives_the_process(tmp_path):
    """Killed after the rollback and before the next checkpoint: the batch is skipped again."""
    record = tmp_path / "record.json"

    def make_policy():
        earlier = json.loads(record.read_text()) if record.exists() else []
        return RollbackPolicy(
            record=lambda made: record.write_text(json.dumps(made)), earlier=earlier
        )

    class Killed(Exception):
        pass

    def kill(outputs):
        raise Killed

    trainer = poisoned(1, 0, on_non_finite="rollback")
    with pytest.raises(Killed):  # the first loop that ends well is that after the rollback
        run(tmp_path / "checkpoints", trainer, rollback=make_policy(), train_actions=[kill])
    assert json.loads(record.read_text()) == [{"step": BAD, "tensor": "the loss"}]
    again = poisoned(1, 0, on_non_finite="rollback")
    events, _ = run(tmp_path / "checkpoints", again, rollback=make_policy())
    assert [name for name, *_ in events] == ["checkpoint"]
    same(state(again), without(BAD), 1e-10)


def test_rollback_without_checkpoints_is_rejected():
    trainer = poisoned(1, 0, on_non_finite="rollback")
    with pytest.raises(ctl.UsageError, match="requires `checkpoints` to go back to"):
        Controller(trainer=trainer)


def test_rollback_with_the_users_own_dataset_is_rejected():
    trainer = poisoned(1, 0, on_non_finite="rollback")
    with pytest.raises(ctl.UsageError, match="reads batches again"):
        trainer.train_dataset = tf.data.Dataset.range(3)


def test_loss_spike_is_rolled_back_and_its_window_is_restored(tmp_path):
    at = WINDOW + 5
    options = {"on_non_finite": "rollback", "loss_spike": 5.0}
    trainer = jumping(1, at, **options)
    events, lines = run(tmp_path, trainer, steps=at + 4, checkpoint_interval=50)
    assert [(n, s) for n, s, _ in events if n != "checkpoint"] == [
        ("non_finite", at),
        ("rollback", 100),
    ]
    assert f"Step {at} has a spike of the loss" in lines[0]
    assert (
        int(engine_of(trainer).step.update.loss_spikes._count) == at + 3
    )  # every loss but that one, once
