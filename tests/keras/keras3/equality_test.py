"""A model of Keras 3 is trained like its twin in tf_keras, however the batch is split."""

import functools

import pytest
import tf_keras

from ctl import testing
from tests.keras.keras3 import twins
from tests.keras.keras3.models import KINDS
from tests.keras.keras3.twins import difference, keras, make_trainer, train

SYNC = {"sync_batch_norm": True}


def test_uneven_replicas_train_the_same_weights_as_one_device_and_tf_keras():
    results = [
        train(make_trainer(package, replicas=replicas, model=SYNC, seed=3))
        for package, replicas in ((keras, 2), (tf_keras, 1))
    ]
    (one, weights), (two, other) = results
    assert difference(weights, other) < 1e-10
    assert one.keys() == two.keys() and abs(one["loss"] - two["loss"]) < 1e-10


@pytest.mark.slow
def test_plain_batch_normalization_uses_the_rows_of_each_replica_as_in_tf_keras(caplog):
    runs = [make_trainer(package, replicas=2, batch=8, seed=3) for package in (keras, tf_keras)]
    for trainer in runs:
        train(trainer)
    assert caplog.text.count("Batch normalization of a part of the batch") == 2
    # The moving variance of tf_keras has Bessel's correction.
    assert difference(*[[v.numpy() for v in t.model.trainable_weights] for t in runs]) < 1e-10


# 5 rows on 4 replicas are 2 + 2 + 1 + 0. The others have one row, which is no axis to broadcast: its
# mask would be that of all rows, and its state in a recurrent layer a bias.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "replicas"),
    [("convolutional", 5, 4), ("transformer", 5, 4), ("subclassed", 5, 4),
     ("recurrent", 2, 2), ("embedding", 2, 3)],
)  # fmt: skip
def test_update_is_a_function_of_the_global_batch(name, batch, replicas):
    kind = KINDS[name]
    expected = kind.train(batch=batch)
    assert len(expected) > 1
    assert difference(kind.train(batch=batch, replicas=replicas), expected) < 1e-10
    assert difference(kind.train(rate=0.0), kind.train_by_hand()) < 1e-10


def train_worker():
    strategy = twins.tf.distribute.MultiWorkerMirroredStrategy()
    return KINDS["convolutional"].train(strategy=strategy)


@pytest.mark.slow
def test_two_processes_compute_the_update_of_one_device():
    """7 rows on two processes are 4 + 3."""
    expected = KINDS["convolutional"].train()
    for weights in testing.run_workers(train_worker):
        assert difference(weights, expected) < 1e-10


CLIP = {"clip": twins.ctl.Clip(global_norm=0.1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "of_one"),
    [
        ({"micro_batches": 3, "shard_state": True, "ema_decay": 0.9, **CLIP}, CLIP),
        ({"xla": "gradients"}, {}),
    ],
)
def test_options_compute_the_update_of_one_device(options, of_one):
    run = functools.partial(KINDS["transformer"].train, batch=8)
    assert difference(run(replicas=2, **options), run(**of_one)) < 1e-10


@pytest.mark.slow
def test_float16_computes_the_same_as_in_tf_keras():
    both = [
        train(make_trainer(k, replicas=2, batch=8, model=SYNC, seed=3, precision="float16"))[1]
        for k in (keras, tf_keras)
    ]
    assert difference(*both) == 0


@pytest.mark.slow
def test_compiled_steps_compute_the_same():
    expected, *compiled = (
        train(make_trainer(batch=8, model=SYNC, seed=3, xla=mode))[1]
        for mode in ("off", "step", "loop")
    )
    for weights in compiled:
        assert difference(weights, expected) < 1e-10
