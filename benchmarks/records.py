"""Compares `ctl.data.records` with the same data read by tf.data, by hand.

    python -m benchmarks.records --rounds=7            # 1,000,000 small records, 16 files
    python -m benchmarks.records --images --rounds=7   # JPEG: decode, random crop, flip

Each round measures all variants one after the other, each in an iterator of its own, so that a change
of the machine's speed affects all. Prints the median of each, and the median of the ratios by round; on
a busy machine, compare the CPU time. Then prints the time from a start at step 0 and at step 100,000 to
the first batch.
"""

import argparse
import os
import statistics
import sys
import time

import numpy as np
import tensorflow as tf

import ctl
from ctl.data import distribution
from ctl.data.kinds import kind_of
from ctl.data.layout import Layout

FILES = 16
BATCH = 128
FEATURES = {
    "id": tf.io.FixedLenFeature([], tf.int64),
    "x": tf.io.FixedLenFeature([8], tf.float32),
}
IMAGE = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


def write_small(folder, count):
    for file in range(FILES):
        with tf.io.TFRecordWriter(f"{folder}/train-{file:02}.tfrecord") as writer:
            for i in range(file * count // FILES, (file + 1) * count // FILES):
                example = tf.train.Example()
                example.features.feature["id"].int64_list.value.append(i)
                example.features.feature["x"].float_list.value.extend([i % 1000 * 0.5] * 8)
                writer.write(example.SerializeToString())


def write_images(folder, count):
    rng = np.random.default_rng(0)
    for file in range(FILES):
        with tf.io.TFRecordWriter(f"{folder}/train-{file:02}.tfrecord") as writer:
            for i in range(file * count // FILES, (file + 1) * count // FILES):
                small = rng.integers(0, 256, [12, 12, 3]).astype(np.float32)
                image = tf.cast(tf.image.resize(small, [160, 160]), tf.uint8)
                example = tf.train.Example()
                encoded = tf.io.encode_jpeg(image).numpy()
                example.features.feature["image"].bytes_list.value.append(encoded)
                example.features.feature["label"].int64_list.value.append(i)
                writer.write(example.SerializeToString())


def parse_small(record):
    return tf.io.parse_single_example(record, FEATURES)


def parse_image(record):
    example = tf.io.parse_single_example(record, IMAGE)
    image = tf.io.decode_jpeg(example["image"], channels=3)
    return {**example, "image": tf.cast(image, tf.float32) / 255}


def augment(example, seed):
    image = tf.image.stateless_random_crop(example["image"], [128, 128, 3], seed)
    return {**example, "image": tf.image.stateless_random_flip_left_right(image, seed)}


def by_hand(files, parse, *, augmented, parse_batches=False):
    """What users write: files interleaved, a shuffle buffer, records parsed in parallel."""
    auto = tf.data.AUTOTUNE
    dataset = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files), seed=0)
    dataset = dataset.interleave(
        tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=auto, deterministic=True
    )
    dataset = dataset.shuffle(10_000 if not augmented else 1_000, seed=0).repeat()
    if parse_batches:
        dataset = dataset.batch(BATCH, drop_remainder=True)
        return dataset.map(lambda r: tf.io.parse_example(r, FEATURES), auto).prefetch(2)

    def parse_and_augment(record):
        example = parse(record)
        if augmented:
            image = tf.image.random_crop(example["image"], [128, 128, 3])
            example["image"] = tf.image.random_flip_left_right(image)
        return example

    return dataset.map(parse_and_augment, auto).batch(BATCH, drop_remainder=True).prefetch(2)


def with_ctl(source, *, augmented, start=0):
    data = ctl.data.augmented(source, augment) if augmented else source
    return kind_of(data).training(Layout(BATCH, 1), seed=0, start=start, prefetch=2)


def variants(pattern, images):
    """name -> a function that makes a dataset."""
    files = sorted(tf.io.gfile.glob(pattern))
    parse = parse_image if images else parse_small
    source = ctl.data.records(pattern, parse)
    # tf.data's autotuning is off in all variants, as it is in ctl: see ctl.data.distribution.
    result = {
        "tf.data": lambda: by_hand(files, parse, augmented=images),
        "records": lambda: with_ctl(source, augmented=images),
    }
    if not images:
        described = ctl.data.records(pattern, FEATURES)
        result["tf.data, parse_example"] = lambda: by_hand(
            files, parse, augmented=False, parse_batches=True
        )
        result["records, parse_example"] = lambda: with_ctl(described, augmented=False)
    return result


def measure(make_dataset, steps):
    """Returns the examples per second, and the microseconds of CPU time per example."""
    iterator = iter(distribution.disable_autotune(make_dataset()))
    for _ in range(4):  # fill the buffers
        next(iterator)
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        next(iterator)
    examples = steps * BATCH
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return examples / seconds, 1e6 * cpu_seconds / examples


def seconds_to_first_batch(source, start):
    begin = time.perf_counter()
    next(iter(distribution.disable_autotune(with_ctl(source, augmented=False, start=start))))
    return time.perf_counter() - begin


def memory_mib():
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def report_memory(pattern, name, images, steps):
    """Prints the peak memory of this process after `steps` batches of one variant."""
    before = memory_mib()
    measure(variants(pattern, images)[name], steps)
    print(f"{name}: peak {memory_mib():.0f} MiB, {memory_mib() - before:.0f} more than before")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="/tmp/ctl_records_benchmark")
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--memory", default="", help="measure the memory of this variant only")
    flags = parser.parse_args()
    kind = "images" if flags.images else "small"
    count = flags.count or (4_000 if flags.images else 1_000_000)
    steps = flags.steps or (12 if flags.images else 800)
    folder = f"{flags.folder}/{kind}-{count}"
    pattern = f"{folder}/train-*.tfrecord"
    if not tf.io.gfile.glob(pattern):
        os.makedirs(folder, exist_ok=True)
        (write_images if flags.images else write_small)(folder, count)
    if flags.memory:
        report_memory(pattern, flags.memory, flags.images, steps)
        return 0
    makers = variants(pattern, flags.images)
    rates = {name: [] for name in makers}
    cpu = {name: [] for name in makers}
    for _ in range(flags.rounds):
        for name, make_dataset in makers.items():
            rate, cpu_time = measure(make_dataset, steps)
            rates[name].append(rate)
            cpu[name].append(cpu_time)
    for name, values in rates.items():
        print(
            f"{name}: {statistics.median(values):,.0f} examples/s, "
            f"{statistics.median(cpu[name]):.1f} us of CPU time per example"
        )
    for name in [name for name in rates if name.startswith("records")]:
        reference = rates[name.replace("records", "tf.data")]
        ratios = [a / b for a, b in zip(rates[name], reference, strict=True)]
        low, high = np.percentile(ratios, [25, 75])
        print(
            f"{name} / tf.data: {statistics.median(ratios):.2f} (quartiles {low:.2f} to {high:.2f})"
        )
    source = ctl.data.records(pattern, parse_image if flags.images else parse_small)
    for start in (0, 100_000):
        times = [seconds_to_first_batch(source, start) for _ in range(5)]
        print(f"first batch of step {start:,}: {statistics.median(times):.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
