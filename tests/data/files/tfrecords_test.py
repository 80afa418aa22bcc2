"""TFRecord files: read in parallel, in an order that depends on the seed alone."""

import pytest
import tensorflow as tf

import ctl
from ctl.data import distribution
from tests.data.reading import one_line
from tests.data.record_files import FEATURES, write

FILES, PER_FILE = 4, 6
COUNT = FILES * PER_FILE


@pytest.fixture
def folder(tmp_path):
    """Four files of six examples; file f holds the ids 10 f to 10 f + 5."""
    for number in range(FILES):
        write(tmp_path / f"train-{number}.tfrecord", [10 * number + i for i in range(PER_FILE)])
    return tmp_path


@pytest.fixture(autouse=True)
def global_seed():
    """The order of TensorFlow's shuffle also depends on its global seed."""
    tf.random.set_seed(0)


def make(folder, split="train", seed=0, features=FEATURES, pattern="train-*", **tuning):
    return ctl.data.tfrecords(str(folder / pattern), features, split=split, seed=seed, **tuning)


def ids(dataset, epochs=1):
    """The ids of each epoch."""
    elements = list(distribution.disable_autotune(dataset.repeat(epochs)).as_numpy_iterator())
    assert all(e["x"].tolist() == [2 * e["id"] + 0.5, 2 * e["id"] + 1.5] for e in elements)
    order = [int(element["id"]) for element in elements]
    return [order[e * COUNT : (e + 1) * COUNT] for e in range(epochs)]


ALL = sorted(10 * f + i for f in range(FILES) for i in range(PER_FILE))


# Order.


@pytest.mark.parametrize("interleave", [1, 2, 4, 100])
def test_evaluation_alternates_between_files_in_their_sorted_order(folder, interleave):
    names = list(range(FILES))
    expected = []
    while names:
        interleaved, names = names[:interleave], names[interleave:]
        expected += [10 * f + i for i in range(PER_FILE) for f in interleaved]
    dataset = make(folder, "eval", interleave=interleave)
    assert ids(dataset, epochs=2) == [expected, expected]


@pytest.mark.parametrize(
    ("interleave", "cache", "shuffle_buffer"),
    [(1, False, 0), (3, True, 1), (3, False, 5), (1, True, 10_000)],
)
def test_every_training_epoch_has_every_example_once(folder, interleave, cache, shuffle_buffer):
    dataset = make(folder, interleave=interleave, cache=cache, shuffle_buffer=shuffle_buffer)
    assert [sorted(epoch) for epoch in ids(dataset, epochs=3)] == [ALL] * 3


@pytest.mark.parametrize("cache", [False, True])
def test_each_training_epoch_has_another_order(folder, cache):
    epochs = ids(make(folder, cache=cache), epochs=4)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert ALL not in epochs


def test_files_are_shuffled_in_each_epoch_without_a_buffer(folder):
    epochs = ids(make(folder, interleave=1, shuffle_buffer=0), epochs=6)
    files = [[i // 10 for i in epoch[::PER_FILE]] for epoch in epochs]
    assert all(sorted(order) == list(range(FILES)) for order in files)
    assert len({tuple(order) for order in files}) > 3


@pytest.mark.parametrize("cache", [False, True])
def test_seed_determines_the_order(folder, cache):
    orders = [ids(make(folder, seed=seed, cache=cache), epochs=2) for seed in (0, 0, 1, 7, 7)]
    assert orders[0] == orders[1]
    assert orders[3] == orders[4]
    assert len({str(order) for order in orders}) == 3


def test_number_of_parallel_calls_does_not_change_the_order(folder):
    def slow_then_fast(record):
        example = tf.io.parse_single_example(record, FEATURES)
        work = tf.where(example["id"] % 3 == 0, 200, 1)  # later records are ready first
        loop = tf.while_loop(
            lambda i, _: i < work,
            lambda i, m: (i + 1, m @ m / 32),
            [0, tf.ones([32, 32])],
        )
        return {**example, "x": example["x"] + 0 * loop[1][0, 0]}

    orders = [
        ids(make(folder, features=slow_then_fast, parallel_calls=calls), epochs=2)
        for calls in (1, 2, 4, -1)
    ]
    assert orders == [orders[0]] * 4


def test_order_is_the_one_that_existing_checkpoints_rely_on(folder):
    """The ids were recorded in another process, so the order does not depend on the process."""
    assert ids(make(folder, seed=5), epochs=2) == [
        [34, 30, 32, 13, 20, 31, 0, 5, 10, 2, 15, 35, 23, 14, 25, 12, 24, 3, 33, 1, 22, 4, 11, 21],
        [3, 15, 4, 11, 0, 30, 22, 23, 25, 20, 5, 1, 31, 10, 12, 24, 33, 34, 21, 35, 14, 32, 13, 2],
    ]


# What is read.


def test_features_may_be_a_function_or_a_description(folder):
    def parse(record):
        return tf.io.parse_single_example(record, FEATURES)

    described, parsed = make(folder, "eval"), make(folder, "eval", features=parse)
    assert described.element_spec == parsed.element_spec
    assert described.element_spec == {
        "id": tf.TensorSpec([], tf.int64),
        "x": tf.TensorSpec([2], tf.float32),
    }
    assert ids(described) == ids(parsed)


def test_pattern_may_match_one_or_several_files(folder):
    write(folder / "other.tfrecord", [99])
    assert ids(make(folder, "eval", pattern="train-2.tfrecord"))[0] == [20, 21, 22, 23, 24, 25]
    assert ids(make(folder, "eval", pattern="train-[01]*", interleave=1))[0] == ALL[:12]
    assert ids(make(folder, "eval", pattern="other*"))[0] == [99]


@pytest.mark.parametrize("cache", [False, True])
def test_cache_parses_each_record_once(folder, cache):
    parsed = tf.Variable(0)

    def parse(record):
        parsed.assign_add(1)
        return tf.io.parse_single_example(record, FEATURES)

    ids(make(folder, features=parse, cache=cache, parallel_calls=1), epochs=3)
    assert int(parsed) == (COUNT if cache else 3 * COUNT)


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"interleave": 0},
            "ctl.data.tfrecords: interleave is 0, but must be an integer, at least 1.",
        ),
        ({"interleave": "4"}, "interleave is '4', "),
        ({"interleave": True}, "interleave is True, "),
        ({"parallel_calls": 0}, "parallel_calls is 0, "),
        ({"parallel_calls": -2}, "parallel_calls is -2"),
        ({"shuffle_buffer": -1}, "shuffle_buffer is -1, "),
        ({"shuffle_buffer": None}, "shuffle_buffer is None"),
        ({"pattern": "nothing-*"}, "/nothing-*': set data.dir"),
        ({"pattern": "nowhere/train-*"}, "No TFRecord file matches"),
        ({"pattern": "empty"}, "empty is empty"),
        ({"pattern": ""}, "is a folder"),
        ({"split": "training"}, "no split 'training': choose train or eval"),
    ],
)
def test_wrong_arguments_and_files_are_rejected_in_one_line(folder, arguments, message):
    (folder / "empty").touch()
    assert message in one_line(make, folder, **arguments)


@pytest.mark.parametrize("is_lost", [False, True])
def test_damaged_record_raises_an_error_when_it_is_read(folder, is_lost):
    path = folder / "train-2.tfrecord"
    content = path.read_bytes()
    changed = b"" if is_lost else bytes([content[99] ^ 1])
    path.write_bytes(content[:99] + changed + content[100:])
    with pytest.raises(tf.errors.DataLossError, match="corrupted record at"):
        ids(make(folder, "eval"))


def test_file_that_does_not_end_with_a_complete_record_is_rejected(folder):
    path = folder / "train-2.tfrecord"
    content = path.read_bytes()
    last_byte_changed = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]  # of the record
    other_formats = [b"404 Not Found", b"\0" * 16, b"\0" * 200_000, b"text" * 50_000]
    for damaged in (
        *(content[:-lost] for lost in (*range(1, 50), 99)), last_byte_changed, *other_formats
    ):  # fmt: skip
        path.write_bytes(damaged)
        assert one_line(make, folder, "eval") == (
            f"{path} is truncated or corrupt, it does not end with a complete record: write the "
            "file again."
        )


@pytest.mark.parametrize("length", [0, 1, 2**16 - 16, 2**16 - 15, 2**16, 2**19, 2**20 + 5])
def test_last_record_of_any_length_is_found(tmp_path, length):
    path = tmp_path / "one.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(b"first")
        writer.write(b"\0" * length)
    lengths = dict(features=lambda record: {"x": tf.strings.length(record)}, split="eval")
    dataset = ctl.data.tfrecords(str(path), **lengths)
    assert [int(example["x"]) for example in dataset.as_numpy_iterator()] == [5, length]
    path.write_bytes(path.read_bytes()[:-1])
    assert "a complete record" in one_line(ctl.data.tfrecords, str(path), **lengths)
