"""Each check of the data detects its planted mistake, and so does that of a checkpoint."""

import pytest

from ctl.modes.check import checkpoint_check, data_checks
from ctl.modes.check.outcome import FAIL, PASS, WARNING
from tests.modes.check.planted import TWO_REPLICAS

NAN_IN_TARGET = """
    def build_dataset(self, split, input_context):
        other = np.where(np.arange(50) == 13, np.nan, X[:, 0])
        return ctl.data.arrays({"x": X, "label": {"one": LABEL, "other": other}})

    def per_example_loss(self, batch, outputs):
        return super().per_example_loss({"label": batch["label"]["one"]}, outputs)
    """
NOT_NORMALIZED = """
    def preprocess(self, batch):
        return {**batch, "x": 128 + 64 * batch["x"]}
    """
MIXUP = """
    def preprocess(self, batch):
        ratio = ctl.random.uniform([None, 1], 0.5, 1.0)
        partners = ctl.random.permutation_of_batch()
        others = tf.gather(ctl.replica.all_gather(batch["x"]), partners)
        return {**batch, "x": ratio * batch["x"] + (1 - ratio) * others}
    """
ORDER_FROM_THE_CLOCK = """
    def build_dataset(self, split, input_context):
        order = np.random.default_rng().permutation(50)
        return ctl.data.arrays({"x": X[order], "label": LABEL[order]})
    """
NUMBERS_OF_THE_HOST = """
    def build_dataset(self, split, input_context):
        def noisy(example, seed):
            noise = tf.numpy_function(lambda: np.random.normal(size=4).astype("f"), [], tf.float32)
            return {**example, "x": example["x"] + tf.ensure_shape(noise, [4])}
        data = super().build_dataset(split, input_context)
        return ctl.data.augmented(data, noisy) if split == "train" else data
    """
CHANGING_EVALUATION_DATA = """
    reads = 0

    def build_dataset(self, split, input_context):
        if split == "train":
            return super().build_dataset(split, input_context)
        def examples():
            Planted.reads += 1
            for i in range(20 - Planted.reads):
                yield {"x": X[i], "label": LABEL[i]}
        spec = {"x": tf.TensorSpec([4]), "label": tf.TensorSpec([], tf.int32)}
        return tf.data.Dataset.from_generator(examples, output_signature=spec)
    """


STATE_IN_NO_CHECKPOINT = """
    def build_model(self):
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.box = lambda: None  # an object that TensorFlow does not track
        self.box.calls = tf.Variable(0.0, trainable=False, aggregation=first)
        return super().build_model()

    def per_example_loss(self, batch, outputs):
        self.box.calls.assign_add(1.0)
        return super().per_example_loss(batch, outputs) * self.box.calls
    """


@pytest.mark.parametrize(
    ("body", "check", "verdict", "observation"),
    [
        (NAN_IN_TARGET, data_checks.check_inputs, FAIL, "other has 1 values that are not finite"),
        (NOT_NORMALIZED, data_checks.check_inputs, WARNING, "x: mean 1"),
        (ORDER_FROM_THE_CLOCK, data_checks.check_order, FAIL, "read twice, x of batch 0 differs"),
        (CHANGING_EVALUATION_DATA, data_checks.check_evaluation, FAIL, "counted 18 of 19 examples"),
        (STATE_IN_NO_CHECKPOINT, checkpoint_check.check_round_trip, FAIL, "differ, by up to"),
    ],
)
def test_a_mistake_is_detected(assert_detects, body, check, verdict, observation):
    assert_detects(body, check, verdict, observation)


def test_draws_and_mixtures_of_rows_are_made_as_in_a_step(make_factory):
    outcome = data_checks.check_inputs(make_factory(MIXUP, **TWO_REPLICAS))
    assert outcome.verdict == PASS and "x: mean 0.0853" in outcome.observation


def test_a_python_function_of_the_data_is_named_if_the_order_fails(make_factory):
    outcome = data_checks.check_order(make_factory(NUMBERS_OF_THE_HOST))
    assert outcome.verdict == FAIL and "x of batch 0 differs" in outcome.observation, outcome
    assert outcome.fix.startswith("the data calls Python functions (PyFunc: tf.numpy_function")
