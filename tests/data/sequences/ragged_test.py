"""Sources of examples of variable length."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data.elements import check_data
from ctl.data.sequences import ragged


class Own(ctl.data.Source):
    """A user's source."""

    def __init__(self, batch):
        self._batch = batch

    def __len__(self):
        return 3

    def gather(self, indexes):
        return {name: tf.gather(value, indexes) for name, value in self._batch.items()}


class Images(ctl.data.RowSource):
    """Images whose width differs, too."""

    def __len__(self):
        return 3

    def read(self, indexes):
        return indexes

    def parse(self, row):
        return {"image": tf.zeros([row, row + 1, 3])}


def pack(batch):
    return ctl.data.packed(Own(batch), 4)


def test_features_of_variable_length_are_ragged():
    frames = [np.full([n, 2], n, np.float32) for n in (2, 0, 1)]
    source = ctl.data.sequences(
        {
            "x": [[1, 2], [], [3]],
            "frames": frames,
            "label": [7, 8, 9],
            "y": tf.ragged.constant([[4, 5], [], [6]]),
        }
    )
    assert len(source) == 3
    assert source.lengths.tolist() == [2, 0, 1]
    batch = source.gather(tf.constant([2, 0], tf.int64))
    assert batch["x"].to_list() == [[3], [1, 2]]
    assert batch["y"].to_list() == [[6], [4, 5]]
    assert batch["frames"].to_list() == [[[1, 1]], [[2, 2], [2, 2]]]
    assert batch["label"].numpy().tolist() == [9, 7]


def test_source_of_ragged_tensors_has_inner_axes_that_are_dense():
    rows = tf.ragged.constant([[[1, 2]], [[3, 4], [5, 6]], []], ragged_rank=1)
    batch = ctl.data.packed(Own({"x": rows}), 3).gather(tf.constant([0], tf.int64))
    assert batch["x"].shape == (1, 3, 2)
    assert sorted(batch["x"].numpy()[0].tolist()) == [[1, 2], [3, 4], [5, 6]]


def test_lengths_that_change_end_the_run_in_one_line():
    from ctl.data.data_errors import report_data_errors

    class Changing(Own):
        lengths = np.array([1, 1, 1])

    source = ctl.data.packed(Changing({"x": tf.ragged.constant([[1], [2], [3, 4]])}), 3)
    rows = tf.data.Dataset.range(len(source)).batch(1).map(source.gather)
    with pytest.raises(ctl.UsageError) as error, report_data_errors("training", dict):
        list(rows)
    assert "other lengths than when they were grouped" in str(error.value)
    assert "\n" not in str(error.value)


def test_ragged_batches_are_rejected_with_what_to_return():
    with pytest.raises(ctl.UsageError, match=r"return ctl\.data\.packed\(source, length\)"):
        check_data(ctl.data.sequences({"x": [[1], [2, 3]]}), "train")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ctl.data.sequences([[1]]), "requires a dict of lists"),
        (lambda: ctl.data.sequences({"x": [[1]], "y": [[1], [2]]}), "the same number"),
        (lambda: ctl.data.sequences({"x": [1, 2]}), "got no list of sequences"),
        (lambda: ctl.data.sequences({"x": [[1], ["a"]]}), "cannot convert 'x'"),
        (lambda: ctl.data.sequences({"x": [[1], [[2]]]}), "cannot convert 'x'"),
        (lambda: ctl.data.sequences({"x": 3}), "cannot convert 'x'"),
        (
            lambda: ctl.data.sequences({"x": [[1], [2]], "y": [[1], [2, 3]]}),
            "Example 1 has 1 values of 'x', but 2 of 'y'",
        ),
        (
            lambda: pack({"x": tf.ragged.constant([[[1, 2]], [[3]], []])}),
            "'x' of an example has the shape (None, None), but only the first axis may differ",
        ),
        (
            lambda: ctl.data.bucketed(Images(), [4]),
            "'image' of an example has the shape (None, None, 3), but only the first axis may differ",
        ),
        (lambda: ctl.data.packed({"x": [[1]]}, 4), "got a dict, but requires a ctl.data.Source"),
        (lambda: pack({"x": tf.zeros([3, 2])}), "all have equal shapes: x (2,)"),
        (lambda: pack({"x": tf.ragged.constant([[1]] * 3), "positions": tf.zeros([3])}), "rename"),
    ],
)
def test_wrong_sequences_are_rejected_in_one_line(make, message):
    with pytest.raises(ctl.UsageError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda s: ctl.data.augmented(s, lambda e, seed: e), "augment its result"),
        (lambda s: ctl.data.bucketed(s, [4]), "apply ctl.data.packed to each source"),
    ],
)
def test_sources_with_their_own_order_are_rejected_in_one_line(data, message):
    with pytest.raises(ctl.UsageError, match=message):
        ctl.data.packed(data(ctl.data.sequences({"x": [[1], [2, 3]]})), 4)


def test_feature_that_the_source_pads_is_rejected():
    class Padded(Own):
        def gather(self, indexes):
            return {"x": super().gather(indexes)["x"].to_tensor()}

    with pytest.raises(ctl.UsageError, match="which the source pads"):
        ctl.data.bucketed(Padded({"x": tf.ragged.constant([[1], [2, 3], [4]])}), [4])


def test_read_slices_copies_from_memory_what_it_reads_from_examples():
    values = {"x": tf.ragged.constant([[1, 2, 3], [4], [5, 6]]), "weight": tf.constant([1.0, 2, 3])}
    arguments = [tf.constant(v, tf.int64) for v in ([2, 0, 0], [1, 0, 2], [1, 2, 1], [2, 3, 3])]
    for source in (ctl.data.sequences(values), Own(values)):
        slices = ragged.read_slices(source, *arguments)
        assert slices["x"].numpy().tolist() == [6, 1, 2, 3]
        assert slices["weight"].numpy().tolist() == [3, 1, 1]
