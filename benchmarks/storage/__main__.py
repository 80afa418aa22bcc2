"""Measures runs and data in an object store on this machine.

    python -m benchmarks.storage                  # all
    python -m benchmarks.storage --parts=records

upload: the time of a step (MNIST, batch 64) while 1 GiB is uploaded, in windows that alternate with
windows without an upload. The server drops the bytes, so it takes little of the processor; it limits
the speed as a network does. records: the records of 1 KB that `ctl.data.records` reads in a second from
S3 (moto) in shuffled order, with 50 ms added to each request. Everything runs on the same cores.
"""

import argparse
import os
import pathlib
import statistics
import tempfile
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks import models, variants
from benchmarks.storage import servers
import ctl
from ctl.data import distribution
from ctl.data.files.block_reader import BLOCK_BYTES, WINDOW_BLOCKS
from ctl.data.kinds import kind_of
from ctl.data.layout import Layout
from ctl.loop.bucket import fetch
from ctl.loop.bucket.store import Store
from ctl.loop.controller import Controller

BATCH = 128
DELAY = 0.05
SECONDS = 15.0  # of reading
PER_FILE = 15_625  # records; moto reads the complete object for each request of a part
FEATURES = {
    "id": tf.io.FixedLenFeature([], tf.int64),
    "x": tf.io.FixedLenFeature([240], tf.float32),
}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", default="upload,records")
    parser.add_argument("--mib", type=int, default=1024, help="of the upload; default 1024")
    parser.add_argument("--windows", type=int, default=5, help="pairs of windows; default 5")
    parser.add_argument("--records", type=int, default=300_000, help="default 300000")
    flags = parser.parse_args(arguments)
    tf.get_logger().setLevel("ERROR")
    for part in flags.parts.split(","):
        print({"upload": upload, "records": records}[part](flags), flush=True)


def upload(flags):
    model = models.MODELS["mnist64"]
    trainer = variants.Trainer(model, optimizer=lambda: model.optimizer(tf_keras))
    controller = Controller(trainer=trainer, steps_per_loop=100)
    with servers.start("sink") as server, tempfile.TemporaryDirectory() as folder:
        # Without HTTPS the client also hashes the bytes for its signature: 40 % of its processor time.
        settings = pathlib.Path(folder, "settings")
        settings.write_text("[default]\ns3 =\n  payload_signing_enabled = false\n")
        os.environ.update(server.environment(), AWS_CONFIG_FILE=str(settings))
        store, path = Store(f"{server.url}/run"), pathlib.Path(folder, "file")
        with path.open("wb") as file:
            for _ in range(flags.mib):
                file.write(os.urandom(2**20))
        train(controller, until=lambda: controller.step >= 300)
        ratios, cpu, seconds = [], [], []
        for window in range(flags.windows):
            times = {}
            for copies in (True, False) if window % 2 else (False, True):
                times[copies] = measure(controller, store, path if copies else None, seconds)
            ratios.append(times[True][0] / times[False][0])
            cpu.append(times[True][1] / times[False][1])
    return (
        f"| 1 upload of {flags.mib} MiB, {flags.windows} pairs of windows | |\n|---|---:|\n"
        f"| seconds of an upload | {statistics.median(seconds):.1f} |\n"
        f"| time of a step with / without an upload | {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}) |\n"
        f"| processor time of a step with / without | {statistics.median(cpu):.3f} |"
    )


def measure(controller, store, path, seconds):
    """Returns the wall and the processor seconds of a step, while a file is uploaded if it is named."""
    end = time.monotonic() + (statistics.median(seconds) if seconds else SECONDS)
    thread = threading.Thread(target=copy, args=(store, path)) if path else None
    begin, wall, cpu = controller.step, time.perf_counter(), time.process_time()
    if thread:
        thread.start()
    train(controller, lambda: not thread.is_alive() if thread else time.monotonic() >= end)
    steps, wall = controller.step - begin, time.perf_counter() - wall
    if thread:
        seconds.append(wall)
    return wall / steps, (time.process_time() - cpu) / steps


def copy(store, path):
    """What the uploader does with a checkpoint's file."""
    fetch.checksum(path)
    store.upload(path, "checkpoints/ckpt-1.data")


def train(controller, until):
    while True:  # at least once, for the time of a step
        controller.train(controller.step + 100, checkpoint_at_completion=False)
        if until():
            return


def records(flags):
    with servers.start("s3") as server, tempfile.TemporaryDirectory() as folder:
        os.environ.update(server.environment(), XDG_CACHE_HOME=folder)
        write(Store(f"{server.url}/data"), pathlib.Path(folder), flags.records)
        before = resident_mib()
        with servers.delayed(server, DELAY) as port:
            os.environ.update(server.environment(port))
            start = time.perf_counter()
            source = ctl.data.records(f"{server.url}/data/*", FEATURES)
            index_seconds, resident = time.perf_counter() - start, [resident_mib()]
            start = time.perf_counter()
            ctl.data.records(f"{server.url}/data/*", FEATURES)
            again_seconds = time.perf_counter() - start
            rates = []
            for step in (0, 10_000):
                stream = kind_of(source).training(Layout(BATCH, 1), seed=1, start=step)
                batches = iter(distribution.disable_autotune(stream))
                start = time.perf_counter()
                next(batches)
                first = time.perf_counter() - start
                window = time.perf_counter()
                count = 0
                while time.perf_counter() - window < SECONDS:
                    next(batches)
                    count += BATCH
                rates.append((first, count / (time.perf_counter() - window)))
            resident.append(resident_mib())
            source.reader._pool.shutdown(cancel_futures=True)
    (first, rate), (later, again) = rates
    memory = 3 * WINDOW_BLOCKS * BLOCK_BYTES / 2**20
    return (
        f"| {flags.records:,} records of 1 KB in S3, {1e3 * DELAY:.0f} ms added | |\n|---|---:|\n"
        f"| records per second, from step 0; from step 10,000 | {rate:,.0f}; {again:,.0f} |\n"
        f"| seconds to the first batch | {first:.2f}; {later:.2f} |\n"
        f"| seconds to build the index, once; to load it | {index_seconds:.1f}; {again_seconds:.2f} |\n"
        f"| MiB that the index adds to the process; that reading adds; of blocks, at most "
        f"| {resident[0] - before:.0f}; {resident[1] - resident[0]:.0f}; {memory:.0f} |"
    )


def resident_mib():
    fields = pathlib.Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def write(store, folder, count):
    """Writes examples of about 1 KB to files in the store, whose size does not depend on the count."""
    files = -(-count // PER_FILE)
    example = tf.train.Example()
    values = np.random.default_rng(0).normal(size=240).tolist()
    example.features.feature["x"].float_list.value.extend(values)
    for number in range(files):
        path = folder / f"train-{number:05}"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for i in range(number * count // files, (number + 1) * count // files):
                example.features.feature["id"].int64_list.value[:] = [i]
                writer.write(example.SerializeToString())
        store.upload(path, path.name)
        path.unlink()


if __name__ == "__main__":
    main()
