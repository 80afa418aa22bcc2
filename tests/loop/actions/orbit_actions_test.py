"""Orbit's own actions work as they are."""

import numpy as np
import orbit
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.loop.controller import Controller
from tests.support import reference_model


class Falling(ctl.StandardEvaluator):
    """Adds a score that rises up to step 8 and falls then."""

    def eval_end(self):
        step = int(self.trainer.global_step.numpy())
        return {**super().eval_end(), "score": float(-abs(step - 8))}


@pytest.mark.slow
def test_new_best_metric_exports_a_saved_model_under_a_condition(tmp_path):
    trainer = reference_model.make_trainer(testing.make_strategy(1), 7)
    best = orbit.actions.NewBestMetric("score", filename=str(tmp_path / "best.json"))
    export = orbit.actions.ExportSavedModel(
        trainer.model,
        orbit.actions.ExportFileManager(
            str(tmp_path / "model"), next_id_fn=lambda: int(trainer.global_step.numpy())
        ),
        signatures=None,
    )
    controller = Controller(
        trainer=trainer,
        evaluator=Falling(trainer),
        steps_per_loop=4,
        actions=[orbit.actions.ConditionalAction(best.test, [export, best.commit])],
    )
    controller.train_and_evaluate(16, eval_interval=4)
    assert best.best_value == 0.0
    assert sorted(path.name for path in tmp_path.glob("model-*")) == ["model-4", "model-8"]
    rows = reference_model.examples(5)
    inputs = {"x": tf.constant(rows["x"]), "token": tf.constant(rows["token"])}
    loaded = tf.saved_model.load(str(tmp_path / "model-8"))
    assert np.shape(loaded(inputs)) == (5, reference_model.CLASSES)
