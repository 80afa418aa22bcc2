"""TFRecord files: read in parallel, in an order that the seed alone decides."""

import itertools
import json

import pytest
import tensorflow as tf

import ctl
from ctl.data import distribution
from ctl.data.tfrecords import TFRecordTuning
from tests import child

FEATURES = {
    "id": tf.io.FixedLenFeature([], tf.int64),
    "x": tf.io.FixedLenFeature([2], tf.float32),
}
FILES, IN_EACH = 4, 6
COUNT = FILES * IN_EACH


@pytest.fixture
def folder(tmp_path):
    """Four files of six examples; file f holds the ids 10 f to 10 f + 5."""
    for number in range(FILES):
        write(tmp_path / f"train-{number}.tfrecord", [10 * number + i for i in range(IN_EACH)])
    return tmp_path


@pytest.fixture(autouse=True)
def global_seed():
    """The orders of TensorFlow's shuffles depend on its global seed too."""
    tf.random.set_seed(0)


def write(path, ids):
    """Writes examples to a file."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for i in ids:
            x = tf.train.Feature(float_list=tf.train.FloatList(value=[i, -i]))
            one = tf.train.Feature(int64_list=tf.train.Int64List(value=[i]))
            features = tf.train.Features(feature={"id": one, "x": x})
            writer.write(tf.train.Example(features=features).SerializeToString())


def make(folder, split="train", seed=0, features=FEATURES, pattern="train-*", **tuning):
    return ctl.data.tfrecords(
        str(folder / pattern), features, split=split, seed=seed, tuning=tuning
    )


def ids(dataset, epochs=1):
    """The ids of each epoch."""
    elements = list(distribution.disable_autotune(dataset.repeat(epochs)).as_numpy_iterator())
    assert all(element["x"].tolist() == [element["id"], -element["id"]] for element in elements)
    order = [int(element["id"]) for element in elements]
    return [order[e * COUNT : (e + 1) * COUNT] for e in range(epochs)]


ALL = sorted(10 * f + i for f in range(FILES) for i in range(IN_EACH))


# Order.


@pytest.mark.parametrize("interleave", [1, 2, 4, 100])
def test_evaluation_alternates_between_files_in_their_sorted_order(folder, interleave):
    names = list(range(FILES))
    want = []
    while names:
        together, names = names[:interleave], names[interleave:]
        want += [10 * f + i for i in range(IN_EACH) for f in together]
    dataset = make(folder, "eval", interleave=interleave)
    assert ids(dataset, epochs=2) == [want, want]


@pytest.mark.parametrize("shuffle_buffer", [0, 1, 5, 10_000])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("interleave", [1, 3])
def test_every_epoch_of_training_has_every_example_once(folder, interleave, cache, shuffle_buffer):
    dataset = make(folder, interleave=interleave, cache=cache, shuffle_buffer=shuffle_buffer)
    assert [sorted(epoch) for epoch in ids(dataset, epochs=3)] == [ALL] * 3


@pytest.mark.parametrize("cache", [False, True])
def test_each_epoch_of_training_is_shuffled_anew(folder, cache):
    epochs = ids(make(folder, cache=cache), epochs=4)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert ALL not in epochs


def test_files_are_shuffled_anew_each_epoch_without_a_buffer(folder):
    epochs = ids(make(folder, interleave=1, shuffle_buffer=0), epochs=6)
    files = [[i // 10 for i in epoch[::IN_EACH]] for epoch in epochs]
    assert all(sorted(order) == list(range(FILES)) for order in files)
    assert len({tuple(order) for order in files}) > 3


@pytest.mark.parametrize("cache", [False, True])
def test_the_seed_decides_the_order(folder, cache):
    orders = [ids(make(folder, seed=seed, cache=cache), epochs=2) for seed in (0, 0, 1, 7, 7)]
    assert orders[0] == orders[1]
    assert orders[3] == orders[4]
    assert len({str(order) for order in orders}) == 3


def test_the_number_of_parallel_calls_changes_nothing(folder):
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


def test_a_fresh_process_reads_in_the_same_order(folder):
    script = (
        "import json, pathlib, sys, tensorflow as tf; from tests.data import tfrecords_test as t; "
        "tf.random.set_seed(0); "
        "print(json.dumps(t.ids(t.make(pathlib.Path(sys.argv[1]), seed=5), epochs=3)))"
    )
    done = child.run(["-c", script, str(folder)])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ids(make(folder, seed=5), epochs=3)


def test_a_resumed_stream_skips_to_the_same_examples(folder):
    def stream(start):
        dataset = distribution.disable_autotune(make(folder, seed=2).repeat().skip(start))
        return [int(e["id"]) for e in itertools.islice(dataset.as_numpy_iterator(), 70 - start)]

    whole = stream(0)
    assert stream(5) == whole[5:]
    assert stream(COUNT) == whole[COUNT:]
    assert stream(2 * COUNT + 3) == whole[2 * COUNT + 3 :]


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


def test_a_pattern_may_name_one_file_or_several(folder):
    write(folder / "other.tfrecord", [99])
    assert ids(make(folder, "eval", pattern="train-2.tfrecord"))[0] == [20, 21, 22, 23, 24, 25]
    assert ids(make(folder, "eval", pattern="train-[01]*", interleave=1))[0] == ALL[:12]
    assert ids(make(folder, "eval", pattern="other*"))[0] == [99]


@pytest.mark.parametrize("cache", [False, True])
def test_a_cache_parses_each_record_once(folder, cache):
    parsed = tf.Variable(0)

    def parse(record):
        parsed.assign_add(1)
        return tf.io.parse_single_example(record, FEATURES)

    ids(make(folder, features=parse, cache=cache, parallel_calls=1), epochs=3)
    assert int(parsed) == (COUNT if cache else 3 * COUNT)


def test_the_tuning_may_be_the_section_of_a_config(folder):
    section = ctl.TrainerOptions(data={"tfrecord": {"interleave": 1}}).data
    dataset = ctl.data.tfrecords(
        str(folder / "train-*"), FEATURES, split="eval", tuning=section.tfrecord
    )
    assert ids(dataset)[0] == ALL
    assert section.unread() == []


def test_the_tuning_has_the_keys_of_the_config_and_their_defaults():
    assert TFRecordTuning.of(ctl.config().data.tfrecord.to_dict()) == TFRecordTuning()


# Mistakes.


def refused(function, *arguments, **keywords):
    """The one line of the refusal."""
    with pytest.raises(ctl.UsageError) as caught:
        function(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        ({"interleav": 2}, "no key data.tfrecord.interleav: did you mean interleave?"),
        ({"prefetch": 2}, "no key data.tfrecord.prefetch"),
        ({"interleave": 0}, "data.tfrecord.interleave is 0, want 1 or more"),
        ({"interleave": "4"}, "data.tfrecord.interleave is '4', a str: want a int"),
        ({"interleave": True}, "data.tfrecord.interleave is True, a bool: want a int"),
        ({"parallel_calls": 0}, "data.tfrecord.parallel_calls is 0, want 1 or more, or -1"),
        ({"parallel_calls": -2}, "data.tfrecord.parallel_calls is -2"),
        ({"cache": "yes"}, "data.tfrecord.cache is 'yes', a str: want a bool"),
        ({"shuffle_buffer": -1}, "data.tfrecord.shuffle_buffer is -1, want 0 or more"),
        ({"shuffle_buffer": None}, "data.tfrecord.shuffle_buffer is None"),
    ],
)
def test_wrong_tuning_is_refused(folder, tuning, words):
    assert words in refused(make, folder, **tuning)


@pytest.mark.parametrize("pattern", ["nothing-*", "nowhere/train-*", "missing.tfrecord"])
def test_files_that_are_not_there_are_refused(folder, pattern):
    line = refused(make, folder, pattern=pattern)
    assert f"No TFRecord file matches '{folder / pattern}'" in line
    assert "set data.dir" in line


def test_an_empty_file_is_named(folder):
    (folder / "train-2.tfrecord").write_bytes(b"")
    assert f"{folder / 'train-2.tfrecord'} is empty" in refused(make, folder)


def test_a_folder_is_no_file(folder):
    assert f"{folder} is a folder" in refused(make, folder, pattern="")


def test_an_unknown_split_is_refused(folder):
    line = refused(make, folder, split="training")
    assert "no split 'training': choose train or eval" in line


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[:99] + b"?" + content[100:], "corrupted record at"),
        (lambda content: content[:50] + content[51:], "corrupted record at"),
    ],
    ids=["a byte changed", "a byte lost"],
)
def test_a_damaged_record_is_an_error_when_it_is_read(folder, damage, words):
    path = folder / "train-2.tfrecord"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(tf.errors.DataLossError, match=words):
        ids(make(folder, "eval"))


@pytest.mark.parametrize("lost", [*range(1, 50), 99])
def test_a_file_that_breaks_off_in_a_record_is_refused(folder, lost):
    path = folder / "train-2.tfrecord"
    path.write_bytes(path.read_bytes()[:-lost])
    line = f"{path} is truncated or corrupt, it does not end with a whole record: write it again."
    assert refused(make, folder, "eval") == line


@pytest.mark.parametrize(
    "content", [b"404 Not Found", b"\0" * 16, b"\0" * 200_000, b"text" * 50_000]
)
def test_what_is_no_tfrecord_file_is_refused(folder, content):
    (folder / "train-2.tfrecord").write_bytes(content)
    assert "does not end with a whole record" in refused(make, folder, "eval")


@pytest.mark.parametrize("length", [0, 1, 2**16 - 16, 2**16 - 15, 2**16, 2**19, 2**20 + 5])
def test_a_last_record_of_any_length_is_found(tmp_path, length):
    path = tmp_path / "one.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(b"first")
        writer.write(b"\0" * length)
    parse = dict(features=lambda record: {"x": tf.strings.length(record)}, split="eval")
    found = ctl.data.tfrecords(str(path), **parse)
    assert [int(each["x"]) for each in found.as_numpy_iterator()] == [5, length]
    path.write_bytes(path.read_bytes()[:-1])
    assert "does not end with a whole record" in refused(ctl.data.tfrecords, str(path), **parse)


def test_a_record_without_a_feature_is_an_error_that_names_it(folder):
    features = {**FEATURES, "label": tf.io.FixedLenFeature([], tf.int64)}
    with pytest.raises(tf.errors.InvalidArgumentError, match="label"):
        ids(make(folder, "eval", features=features))
