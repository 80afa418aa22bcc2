"""Generated data files are read as exactly what they hold, or rejected; so are complete runs."""

import gzip
import io
import itertools
import json
import os
import pathlib
import struct
import subprocess
import sys
import traceback
import zlib

from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import distribution
from tests import child, experiments, generated
from tests.generated import damaged, explore, folder, is_accepted, rejects

pytestmark = pytest.mark.slow
IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def encode_idx(array, kind=8):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return header + array.astype(IDX_TYPES[kind]).tobytes()


def decode_idx(raw):
    """The array in an IDX file, read according to the format; None if the file is not valid."""
    try:
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.GzipFile(fileobj=io.BytesIO(raw)).read()
        zeros, kind, axes = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{axes}I", raw, 4)
        values = np.frombuffer(raw[4 + 4 * axes :], IDX_TYPES[kind])
        return values.reshape(shape) if values.size and not zeros and 1 <= axes <= 32 else None
    except (OSError, EOFError, zlib.error, struct.error, KeyError, ValueError):
        return None


def decode_pair(pair):
    """The images and the labels, or None if they are not valid or do not match."""
    images, labels = (decode_idx(raw) for raw in pair.values())
    if images is None or labels is None or labels.ndim != 1 or len(images) != len(labels):
        return None
    return images, labels


@st.composite
def idx_pairs(draw, sides=(1, 2, 3, 4)):
    """File name -> content of images and labels, one of them changed, both zipped or neither."""
    count, side = draw(st.integers(1, 9)), st.sampled_from(sides)
    rows, columns = draw(side), draw(side)
    pixels = np.arange(count * rows * columns).reshape(count, rows, columns) % 100
    kind = draw(st.sampled_from(list(IDX_TYPES)))
    pair = {
        "images-idx3-ubyte": encode_idx(pixels, kind),
        "labels-idx1-ubyte": encode_idx(np.arange(count) % 2),
    }
    name = draw(st.sampled_from(list(pair)))
    raw, zipped = pair[name], draw(st.booleans())
    changes = ["size", "type", "cut", "empty", "none", *["damage", "zip"] * 2]
    change = draw(st.sampled_from(changes))
    if change == "size":
        position = 4 + 4 * draw(st.integers(0, raw[3] - 1))
        size = draw(st.sampled_from([0, 1, 2, count + 1, count - 1, 2**31, 2**32 - 1]))
        raw = raw[:position] + struct.pack(">I", size) + raw[position + 4 :]
    elif change == "type":  # or the number of axes
        kind, axes = draw(st.sampled_from([8, 9, 10, 13, 14, 0])), draw(st.integers(0, 255))
        raw = raw[:2] + bytes([kind, axes]) + raw[4:]
    elif change == "cut":
        odd = [b"", raw[:4], raw[:16], raw + b"\0", raw * 2, b"404", raw[:-1], raw[::-1]]
        raw = draw(st.sampled_from(odd))
    elif change == "empty":
        raw = encode_idx(np.zeros((0, rows, columns) if "images" in name else (0,)))
    elif change == "damage":
        raw = draw(damaged(raw))
    pair[name] = raw
    if zipped:
        pair = {key: gzip.compress(content, mtime=0) for key, content in pair.items()}
        if change == "zip":
            raw = pair[name]
            twice_or_padded = st.sampled_from([raw[:-4], raw * 2, raw + b"\0" * 5])
            pair[name] = draw(st.one_of(damaged(raw), twice_or_padded))
    ending = draw(st.sampled_from(["", ".gz"]))
    return {f"{key}{ending}": content for key, content in pair.items()}


def accepts_idx(pair):
    with folder({f"data/train-{name}": raw for name, raw in pair.items()}):
        rejected, source = rejects(lambda: ctl.data.idx("data", "train"), "data/train-")
        expected = decode_pair(pair)
        assert rejected == (expected is None)
        if rejected:
            return False
        batch = source.gather(tf.range(len(source), dtype=tf.int64))
    for name, values in zip(("image", "label"), expected, strict=True):
        np.testing.assert_array_equal(batch[name].numpy(), values)
    return True


def test_idx_files_are_read_as_they_are_or_rejected():
    explore(idx_pairs(), accepts_idx, count=0.3)


def example(number):
    features = {
        "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=[number, -number])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def encode_records(records):
    """A TFRecord file: for each record its length, a CRC of that, the record and a CRC of that."""
    frames = []
    for record in records:
        length = struct.pack("<Q", len(record))
        frames.append(length + masked_crc(length) + record + masked_crc(record))
    return b"".join(frames)


def masked_crc(raw):
    """CRC-32C, masked as in TFRecord files (tensorflow/core/lib/hash/crc32c.h)."""
    crc = 0xFFFFFFFF
    for byte in raw:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def decode_records(raw):
    """The ids in a TFRecord file, read according to the format; None if it is damaged or empty."""
    ids = []
    while raw:
        size = int.from_bytes(raw[:8], "little")
        record = raw[12 : 12 + size]
        if raw[: 16 + size] != encode_records([record]):
            return None
        ids.append(tf.train.Example.FromString(record).features.feature["id"].int64_list.value[0])
        raw = raw[16 + size :]
    return ids or None


FEATURES = {
    "id": tf.io.FixedLenFeature([], tf.int64),
    "x": tf.io.FixedLenFeature([2], tf.float32),
}
WRONG_FEATURES = [
    {"x": tf.io.FixedLenFeature([3], tf.float32)},
    {"id": tf.io.FixedLenFeature([], tf.string)},
    {"y": tf.io.FixedLenFeature([], tf.int64)},
]
ODD_PATTERNS = ["data/no*", "no/*", "", "data", "data/", "\0", "x" * 300, "[", "é*", "data/["]


@st.composite
def record_files(draw):
    """(files, what was changed, the pattern, the features, the arguments of ctl.data.tfrecords)"""
    records = {n: [example(10 * n + i) for i in range(4)] for n in range(2)}
    files = {f"data/{n}.tfrecord": encode_records(each) for n, each in records.items()}
    number = draw(st.integers(0, 1))
    name = f"data/{number}.tfrecord"
    raw, pattern, features = files[name], "data/*.tfrecord", FEATURES
    change = draw(st.sampled_from(["features", "bytes", "pattern", "fewer", *["damage"] * 6]))
    if change == "features":
        features = {**FEATURES, **draw(st.sampled_from(WRONG_FEATURES))}
    elif change == "bytes":
        files[name] = draw(st.sampled_from([b"", raw[:16], b"text", raw[:-1], raw * 2]))
    elif change == "pattern":
        pattern = draw(st.sampled_from(ODD_PATTERNS))
    elif change == "fewer":
        files[name] = encode_records(records[number][: draw(st.integers(0, 4))])
    else:
        files[name] = draw(damaged(raw))
    tuning = {"interleave": draw(st.integers(1, 3)), "cache": draw(st.booleans())}
    options = {"split": draw(st.sampled_from(["train", "eval"])), "tuning": tuning}
    return files, change, pattern, features, options


def accepts_records(case):
    files, change, pattern, features, options = case
    ids = [decode_records(raw) for raw in files.values()]
    valid = change != "features" and None not in ids
    expected = sorted(itertools.chain(*ids)) if valid else None
    with folder(files):
        rejected, dataset = rejects(
            lambda: ctl.data.tfrecords(pattern, features, **options), "TFRecord", "data"
        )
        if rejected:
            assert expected is None or change == "pattern"
            return False
        assert change != "pattern"
        try:
            elements = list(distribution.disable_autotune(dataset).as_numpy_iterator())
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError):
            assert expected is None
            return False
    assert sorted(int(element["id"]) for element in elements) == expected
    assert all(list(e["x"]) == [e["id"], -e["id"]] for e in elements)
    return True


def test_tfrecord_files_are_read_as_they_are_or_rejected():
    explore(record_files(), accepts_records, count=0.25)


RUN_FILES = {
    "exp.py": """\
import ctl

def get_config():
    return ctl.config(
        trainer="net.py:Net", data=dict(dir="data", global_batch_size=4), train=dict(steps=3))
""",
    "net.py": """\
import tensorflow as tf
import tf_keras
import ctl

class Net(ctl.StandardTrainer):
    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Flatten(), tf_keras.layers.Dense(2)])

    def build_dataset(self, split, input_context):
        return ctl.data.idx(self.options.data.dir, split)

    def preprocess(self, batch):
        return {**batch, "image": tf.cast(batch["image"], self.compute_dtype)}

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.mean_squared_error(
            tf.one_hot(tf.cast(batch["label"], tf.int32), 2), outputs)

    def build_metrics(self):
        return {"count": tf_keras.metrics.Sum()}

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["count"].update_state(tf.ones([tf.shape(outputs)[0]]), sample_weight=weights)
""",
    "records.py": """\
import tensorflow as tf
import tf_keras
import ctl
from net import Net

class Records(Net):
    def build_dataset(self, split, input_context):
        features = {"id": tf.io.FixedLenFeature([], tf.int64),
                    "x": tf.io.FixedLenFeature([2], tf.float32)}
        return ctl.data.tfrecords(
            f"{self.options.data.dir}/*", features, split=split, seed=self.options.seed)

    def preprocess(self, batch):
        return {"image": tf.cast(batch["x"], self.compute_dtype), "label": batch["id"] % 2}
""",
}
SETTINGS = """
data.global_batch_size=1 3 5 100 0
data.per_replica_batch_size=2 4
data.placement=device
data.prefetch=0 1 100
eval.global_batch_size=1 2 7 100
eval.interval=1 2 100
init.checkpoint=nowhere .
init.variables=('*',)
optimizer.clip.norm=0.5
optimizer.clip.global_norm=1e-30 1e30
optimizer.gradient_accumulation_steps=2 3 5 100
optimizer.learning_rate=1e-30 1e30 1e39
optimizer.momentum=0.9 1e-9
optimizer.name=adamw sgd rmsprop adagrad lion
optimizer.schedule=cosine
optimizer.weight_decay=0.1 1e30
runtime.all_reduce.algorithm=ring nccl one_device
runtime.all_reduce.dtype=bfloat16
runtime.devices=('CPU:0',) ('CPU:7',) ('GPU:0',)
runtime.logical_devices=1 2
runtime.logical_shards=1 2 3
runtime.loss_scale=2 1e30
runtime.precision=float64 bfloat16 float16
runtime.strategy=default one_device mirrored central_storage
runtime.xla=off step loop gradients
seed=4294967295
train.checkpoint_interval=0 1 2
train.checkpoints_to_keep=1 2147483647
train.loss_spike=1.0 2.0
train.norms=global layers
train.on_non_finite=skip rollback ignore
train.steps=1 2 5
train.steps_per_loop=1 2
"""
CHOICES = {
    key: values.split() for key, values in (x.split("=") for x in SETTINGS.split("\n")[1:-1])
}
DATA = {
    f"data/{split}-{name}": raw
    for split, count in (("train", 6), ("t10k", 7))
    for name, raw in {
        "images-idx3-ubyte": encode_idx(np.arange(4 * count).reshape(count, 2, 2)),
        "labels-idx1-ubyte": encode_idx(np.arange(count) % 2),
    }.items()
}


@st.composite
def runs(draw):
    """(kind, files, arguments, the number of steps, the number of evaluated examples or 0)"""
    kind = draw(st.sampled_from(["images", "records", "config", "config", "config"]))
    if kind == "images":
        split, pair = draw(st.sampled_from(["train", "t10k"])), draw(idx_pairs(sides=(2,)))
        others = {name: raw for name, raw in DATA.items() if f"/{split}-" not in name}
        files = {**others, **{f"data/{split}-{name}": raw for name, raw in pair.items()}}
        arrays = decode_pair(pair)
        examples = 0 if arrays is None else len(arrays[1]) if split == "t10k" else 7
        return kind, files, [], 3, examples
    if kind == "records":
        raw = encode_records([example(i) for i in range(7)])
        raw = draw(st.one_of(st.just(raw), *[damaged(raw)] * 4))
        arguments = ["--config.trainer=records.py:Records"]
        return kind, {"data/one.tfrecord": raw}, arguments, 3, len(decode_records(raw) or [])
    keys = draw(st.lists(st.sampled_from(list(CHOICES)), min_size=1, max_size=3, unique=True))
    settings = {key: draw(st.sampled_from(CHOICES[key])) for key in keys}
    arguments = [f"--config.{key}={value}" for key, value in settings.items()]
    return kind, DATA, arguments, int(settings.get("train.steps", 3)), 7


def serve():
    """Runs the program in this process, in one folder after another; writes how each run ended."""
    for line in sys.stdin:
        path, arguments = json.loads(line)
        os.chdir(path)
        try:
            outcome = generated.run(arguments)
        except Exception:
            outcome = generated.Outcome(1, traceback.format_exc())
        print(json.dumps([outcome.code, outcome.error]), flush=True)


@pytest.fixture
def run():
    """Runs the program in a child process, since a run may change TensorFlow for its process."""
    variables = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    code = "from tests.end_to_end import generated_data_test as test; test.serve()"
    server = subprocess.Popen(
        [child.PYTHON, "-c", code], env=child.environment(**variables), cwd=child.ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def run_in_child(arguments):
        print(json.dumps([str(pathlib.Path.cwd()), arguments]), file=server.stdin, flush=True)
        return generated.Outcome(*json.loads(server.stdout.readline()))

    yield run_in_child
    server.kill()
    server.communicate()


def test_a_run_trains_and_evaluates_everything_or_is_rejected_with_nothing_written(run):
    def accepts_run(case):
        kind, files, arguments, steps, examples = case
        with folder({**RUN_FILES, **files}):
            arguments = ["--config=exp.py", "--workdir=run", "--mode=train_and_eval", *arguments]
            outcome = run(arguments)
            if outcome.code == 1 and kind == "config":  # such as a weight decay of 1e30
                generated.check_line(outcome.error, ["is not finite"])
                return True
            if not is_accepted(outcome):
                # What a record holds is known only when it is read, after the run has begun.
                assert not pathlib.Path("run/result.json").exists()
                assert kind == "records" or not pathlib.Path("run").exists()
                assert kind == "config" or not examples, outcome
                return False
            result = experiments.read_result("run")
        assert examples and (result["step"], result["eval"]["count"]) == (steps, examples)
        return True

    explore(runs(), accepts_run, count=0.06)
