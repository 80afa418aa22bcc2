"""The data's checks pass on a correct experiment, and each detects its planted mistake."""

import pytest

from ctl.modes.check import data_checks
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


@pytest.mark.parametrize(
    "check", [data_checks.check_inputs, data_checks.check_order, data_checks.check_evaluation]
)
def test_a_correct_experiment_passes(assert_passes, check):
    assert_passes(check)


def test_a_nan_in_the_data_fails(assert_detects):
    observation = "label/other has 1 values that are not finite"
    assert_detects(NAN_IN_TARGET, data_checks.check_inputs, FAIL, observation)


def test_inputs_that_are_not_normalized_are_a_warning(assert_detects):
    assert_detects(NOT_NORMALIZED, data_checks.check_inputs, WARNING, "x: mean 1")


def test_draws_and_mixtures_of_rows_are_made_as_in_a_step(make_factory):
    outcome = data_checks.check_inputs(make_factory(MIXUP, **TWO_REPLICAS))
    assert outcome.verdict == PASS and "x: mean 0.0853" in outcome.observation


def test_an_order_that_depends_on_the_clock_fails(assert_detects):
    observation = "read twice, x of batch 0 differs"
    assert_detects(ORDER_FROM_THE_CLOCK, data_checks.check_order, FAIL, observation)


def test_a_python_function_of_the_data_is_named_if_the_order_fails(make_factory):
    outcome = data_checks.check_order(make_factory(NUMBERS_OF_THE_HOST))
    assert outcome.verdict == FAIL and "x of batch 0 differs" in outcome.observation, outcome
    assert outcome.fix.startswith("the data calls Python functions (PyFunc: tf.numpy_function")


def test_evaluation_data_that_changes_fails(assert_detects):
    observation = "counted 18 of 19 examples"
    assert_detects(CHANGING_EVALUATION_DATA, data_checks.check_evaluation, FAIL, observation)
