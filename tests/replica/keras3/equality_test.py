"""A model of Keras 3 is trained like its twin in tf_keras, however the batch is split."""

import functools

import pytest
import tf_keras

from ctl import testing
from tests.replica.keras3 import twins
from tests.replica.keras3.models import KINDS, of_shape
from tests.replica.keras3.twins import difference, keras, make_trainer, train

SYNC = {"sync_batch_norm": True}


def test_uneven_replicas_train_the_same_weights_as_one_device_and_tf_keras():
    results = [
        train(make_trainer(package, replicas=replicas, model=SYNC, seed=3))
        for package, replicas in ((keras, 2), (tf_keras, 1))
    ]
    (one, weights), (two, other) = results
    assert difference(weights, other) < 1e-10
    assert one.keys() == two.keys() and abs(one["loss"] - two["loss"]) < 1e-10


class Sequences(of_shape(5, 6)):
    """One label for each of the five parts of an example."""

    def per_example_loss(self, batch, outputs):
        labels = twins.tf.repeat(batch["label"][:, None], 5, axis=1)
        losses = super().per_example_loss({"label": labels}, outputs)
        return twins.tf.reduce_mean(losses, axis=1)

    def build_metrics(self):
        return {}


@pytest.mark.slow
def test_one_row_in_a_replica_is_no_axis_to_broadcast():
    """Its mask would be that of all rows, and its state in a recurrent layer a bias."""

    def make(k):
        recurrent = k.layers.SimpleRNN(2, return_sequences=True)
        dropped = [k.layers.SpatialDropout1D(0.3), k.layers.GaussianNoise(0.3)]
        return k.Sequential([k.Input((5, 6)), *dropped, recurrent, k.layers.Dense(4)])

    runs = [
        train(make_trainer(cls=Sequences, make=make, replicas=replicas, batch=2), 3)[1]
        for replicas in (1, 2)
    ]
    assert difference(*runs) < 1e-12


@pytest.mark.slow
def test_plain_batch_normalization_uses_the_rows_of_each_replica_as_in_tf_keras(caplog):
    runs = [make_trainer(package, replicas=2, batch=8, seed=3) for package in (keras, tf_keras)]
    assert caplog.text.count("Batch normalization of a part of the batch") == 2
    for trainer in runs:
        train(trainer)
    # The moving variance of tf_keras has Bessel's correction.
    assert difference(*[[v.numpy() for v in t.model.trainable_weights] for t in runs]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_update_is_a_function_of_the_global_batch(name):
    """5 rows on four replicas are 2 + 2 + 1 + 0."""
    train_kind = functools.partial(KINDS[name].train, batch=5)
    expected = train_kind()
    assert len(expected) > 1
    assert difference(train_kind(replicas=4), expected) < 1e-10
    if KINDS[name].equal:
        assert difference(train_kind(tf_keras), expected) < 1e-10
    if not KINDS[name].normalized:
        assert difference(train_kind(replicas=2, micro_batches=2), expected) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_update_is_that_of_a_loop_by_hand(name):
    kind = KINDS[name]
    assert difference(kind.train(rate=0.0, replicas=2), kind.train_by_hand()) < 1e-10


def train_worker(names):
    strategy = twins.tf.distribute.MultiWorkerMirroredStrategy()
    return [KINDS[name].train(strategy=strategy) for name in names]


@pytest.mark.slow
def test_two_processes_compute_the_update_of_one_device():
    """7 rows on two processes are 4 + 3."""
    names = ["convolutional", "transformer"]
    expected = [KINDS[name].train() for name in names]
    for worker in testing.run_workers(train_worker, names):
        for weights, correct in zip(worker, expected, strict=True):
            assert difference(weights, correct) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"micro_batches": 3}, {"shard_state": True}, {"xla": "gradients"},
     {"ema_decay": 0.9}, {"clip": twins.ctl.Clip(global_norm=0.1)}, {"logical_shards": 2}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_compute_the_update_of_one_device(options):
    run = functools.partial(KINDS["transformer"].train, batch=8)
    assert difference(run(replicas=2, **options), run(**options)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_precisions_compute_the_same_as_in_tf_keras(precision):
    both = [
        train(make_trainer(k, replicas=2, batch=8, model=SYNC, seed=3, precision=precision))[1]
        for k in (keras, tf_keras)
    ]
    assert difference(*both) == 0


@pytest.mark.slow
@pytest.mark.parametrize("xla", ["step", "loop"])
def test_compiled_steps_compute_the_same(xla):
    runs = [train(make_trainer(batch=8, model=SYNC, seed=3, xla=mode))[1] for mode in (xla, "off")]
    assert difference(*runs) < 1e-10
