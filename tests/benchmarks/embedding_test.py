"""The benchmark of a large embedding on parameter servers, at a small size."""

import pytest
import tensorflow as tf

from benchmarks import embedding, lookups
from tests.support.experiments import read_result, read_weights


def test_every_row_is_looked_up_once_per_epoch():
    source = lookups.Lookups(rows=256, lookups=8)
    ids = source.gather(tf.range(len(source), dtype=tf.int64))["x"].numpy()
    assert ids.shape == (32, 8) and sorted(ids.ravel()) == list(range(256))


@pytest.mark.slow
@pytest.mark.long
def test_an_epoch_updates_every_row_and_each_process_is_measured(tmp_path):
    # A single worker, because several read their own batches in their own time.
    peaks = embedding.measure(1, str(tmp_path), workers=1, batch=64)
    assert sorted(peaks) == ["chief 0", "ps 0", "ps 1", "worker 0"]
    assert all(100 < peak < 4000 for peak in peaks.values())
    assert read_result(tmp_path)["step"] == 4
    (accumulators,) = (v for name, v in read_weights(tmp_path).items() if "_variables/1/" in name)
    # Adagrad's accumulators start at 0.1, and those of a row grow when it is looked up.
    assert accumulators.shape == (2048, embedding.WIDTH)
    assert (accumulators > 0.1).any(axis=1).all()
