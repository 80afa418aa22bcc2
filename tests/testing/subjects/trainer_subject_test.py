"""The trainer of a split reads the examples of the comparison, not its own data."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.built.inner_loop import loop_of
from ctl.configs.options import TrainerOptions
from ctl.testing import make_strategy, tiny_trainer
from ctl.testing.splits import Split
from ctl.testing.subjects import trainer_subject
from ctl.testing.subjects.trainer_subject import TrainerSubject
from tests.testing import gallery


class WithoutData(gallery.Right):
    """Its own data does not exist."""

    def build_dataset(self, split, input_context):
        raise FileNotFoundError("no data here")


def make_subject(factory, **options):
    return TrainerSubject(factory, gallery.examples(), 2, options=TrainerOptions(**options))


def test_trainer_reads_the_examples_in_order():
    split = Split(5, replicas=2)
    trainer = make_subject(WithoutData).build(split)
    evaluated = ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))
    assert int(evaluated["examples"]) == 2 * split.batch - 1
    batch = next(iter(loop_of(trainer).pipeline.training_dataset(split.batch, start=0)))[0]
    labels = np.concatenate(trainer.strategy.experimental_local_results(batch["label"]))
    np.testing.assert_array_equal(labels[:5], gallery.examples()["label"][:5])


def test_options_that_the_split_determines_are_replaced():
    subject = make_subject(gallery.Right, seed=7, norms="global", micro_batches=4)
    options = subject.build(Split(4, micro_batches=2)).options
    assert (options.micro_batches, options.norms) == (2, "")
    assert (options.precision, options.seed, options.xla) == ("float64", 7, "off")
    assert options.on_non_finite == "ignore"


SPLIT = Split(5, replicas=2)


def test_rows_are_in_the_order_of_the_global_batch():
    subject = make_subject(gallery.Weighted)
    reference, rows = subject.rows(SPLIT.reference), subject.rows(SPLIT)
    np.testing.assert_allclose(rows.outputs[0], reference.outputs[0], rtol=1e-12)
    np.testing.assert_allclose(rows.losses, reference.losses, rtol=1e-12)
    np.testing.assert_array_equal(rows.weights, 1.0 + gallery.examples()["label"][:5])


def test_rows_of_a_trainer_that_raises_are_unknown():
    class NoLoss(gallery.Right):
        def per_example_loss(self, batch, outputs):
            raise NotImplementedError

    assert make_subject(NoLoss).rows(SPLIT) is None


def test_metrics_of_selected_rows():
    subject = make_subject(gallery.Right)
    assert subject.metrics([0], 1)[0] in (0, 1)
    assert round(float(subject.metrics(range(5), 1)[0]) * 5, 4) in range(6)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_dtype_of_the_computation_is_recognized(precision):
    trainer = tiny_trainer(make_strategy(1), precision=precision)
    narrow = {"float64": "", "float32": "forward returns float32"}
    assert trainer_subject.find_narrow(trainer) == narrow[precision]
