"""The function of a trainer for inference."""

import numpy as np
import tensorflow as tf

from ctl.loop import inference
from tests import evaluator_test
from tests.support import one_batch


def test_prediction_leaves_the_variables_that_its_code_assigns():
    trainer = one_batch.make(evaluator_test.Assigning, 5, tf.distribute.get_strategy())
    predict = inference.make_function(trainer, trainer.serve)
    before = trainer.model.get_weights()
    rows = {"x": tf.constant(trainer.EXAMPLES["x"])}
    first, second = predict(rows).numpy(), predict(rows).numpy()
    for one, other in zip(before, trainer.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, trainer.model(rows["x"]).numpy())
