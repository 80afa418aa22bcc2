"""The trainer of a split reads the examples of the comparison, not its own data."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.configs.options import TrainerOptions
from ctl.replica.step.engine import engine_of
from ctl.testing.splits import Split
from ctl.testing.subjects.trainer_subject import TrainerSubject
from tests.testing import gallery


class WithoutData(gallery.Right):
    """Its own data does not exist."""

    def build_dataset(self, split, input_context):
        raise FileNotFoundError("no data here")


def make_subject(factory, **options):
    return TrainerSubject(factory, gallery.examples(), 2, options=TrainerOptions(**options))


@pytest.mark.parametrize("factory", [WithoutData, lambda **a: gallery.Right(**a)])
def test_trainer_reads_the_examples_in_order(factory):
    split = Split(5, replicas=2)
    trainer = make_subject(factory).build(split)
    evaluated = ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))
    assert int(evaluated["examples"]) == 2 * split.batch - 1
    batch = next(iter(engine_of(trainer).pipeline.training_dataset(split.batch, start=0)))[0]
    labels = np.concatenate(trainer.strategy.experimental_local_results(batch["label"]))
    np.testing.assert_array_equal(labels[:5], gallery.examples()["label"][:5])


def test_options_that_the_split_determines_are_replaced():
    subject = make_subject(gallery.Right, seed=7, norms="global", gradient_accumulation_steps=4)
    options = subject.build(Split(4, micro_batches=2)).options
    assert (options.gradient_accumulation_steps, options.norms) == (2, "")
    assert (options.precision, options.seed, options.xla) == ("float64", 7, "off")
    assert options.on_non_finite == "ignore"


def test_name_of_the_trainer():
    assert make_subject(gallery.Right).name == "Right"
    assert make_subject(lambda **a: gallery.Right(**a)).name == "<lambda>"
