"""--mode=find_batch finds the largest batch that fits into memory, and keeps nothing."""

import multiprocessing
import os
import re

import pytest
import tensorflow as tf

from ctl import main
from ctl.built import memory_estimate
from ctl.configs import flags
from ctl.errors import Failure
from ctl.hardware import device_memory, devices, host
from ctl.loop.workdir import Workdir
from ctl.modes import Arguments, experiment, find_batch, train
from tests.support import child
from tests.support.experiments import CONFIG, TRAINER

GIB = 2**30
TRY = find_batch._train  # which the fixture replaces
CLUSTER = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'


@pytest.mark.parametrize(
    ("guess", "unit", "most", "tried"),
    [
        (100, 1, 9_999, [100, 125, 111, 105]),
        (200, 1, 9_999, [200, 160, 102, 41, 64, 80, 90, 95, 98]),
        (50, 8, 9_999, [48, 56, 80, 192, 120, 96, 104]),
        (50, 1, 90, [50, 62, 90]),  # 90 examples
        (0, 60, 9_999, [60, 120]),
        (400, 101, 9_999, [303, 202, 101]),
    ],
)
def test_search_tries_larger_or_smaller_batches_and_then_halves_the_interval(
    capsys, guess, unit, most, tried
):
    largest = find_batch.find_largest(
        lambda batch: batch * GIB if batch <= 100 else None, guess, unit=unit, most=most
    )
    fits = {batch: f"fits ({batch}.00 GiB)" if batch <= 100 else "does not fit" for batch in tried}
    lines = [f"a batch of {batch} {result}" for batch, result in fits.items()]
    assert capsys.readouterr().out.splitlines() == lines
    assert largest == max((batch for batch in tried if batch <= 100), default=0)


@pytest.mark.parametrize("guess", [1, 64, 500, 4096])
@pytest.mark.parametrize("exact", [1, 7, 700, 1000])
def test_result_is_within_a_sixteenth_after_few_tries(guess, exact):
    tried = []
    largest = find_batch.find_largest(
        lambda batch: tried.append(batch) if batch > exact else 1, guess, unit=1, most=2**20
    )
    assert exact <= max(largest * 17 / 16, largest + 1) and largest <= exact
    assert len(set(tried)) == len(tried) <= 14


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the program in this process; `measure` replaces the dry run."""
    (tmp_path / "exp.py").write_text(CONFIG)
    (tmp_path / "tiny.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(find_batch, "_run", lambda folder, function, *args: function(*args))
    monkeypatch.setattr(find_batch, "_limit", lambda ram: None)
    monkeypatch.setattr(host, "peak_memory", lambda: 0)

    def program(*arguments, measure=lambda batch: None, memory=GIB):
        def try_(arguments, batch, ram):
            program.config = arguments.config
            return measure(batch)

        monkeypatch.setattr(find_batch, "_train", try_)
        monkeypatch.setattr(host, "memory_limit", lambda: memory)
        code = main.run(["ctl", "find_batch", "exp.py", *arguments])
        assert sorted(p.name for p in tmp_path.iterdir() if p.suffix) == ["exp.py", "tiny.py"]
        return code, capsys.readouterr()

    return program


def test_result_is_a_multiple_of_replicas_and_micro_batches_in_the_key_of_the_config(run):
    code, printed = run(
        "--config.runtime.strategy=mirrored",
        "--config.data.global_batch_size=0",
        "--config.data.per_replica_batch_size=2",
        "--config.optimizer.micro_batches=2",
        measure=lambda batch: GIB if batch < 8 else None,
    )
    first, *tries, last = printed.out.splitlines()
    assert (code, printed.err) == (0, "")
    assert first.startswith("CPU:0 may use 1.00 GiB: by the traced step, a batch of ")
    assert tries == ["a batch of 8 does not fit", "a batch of 4 fits (1.00 GiB)"]
    assert last.startswith("The largest global batch that fits is 4, to within 1/16.")
    assert last.endswith(" Set --config.data.per_replica_batch_size=2.")


def test_size_of_the_data_is_not_recommended(run):
    _, printed = run(measure=lambda batch: GIB)
    first, _, last = printed.out.splitlines()
    estimated = re.search("a batch of ([0-9,]+) fits", first)[1]
    assert last == f"All 8 examples fit in one batch; memory would allow about {estimated}."


@pytest.mark.parametrize("device", ["CPU:0", "GPU:0"])
def test_first_try_needs_nine_tenths_of_the_memory_by_the_estimate(run, monkeypatch, device):
    monkeypatch.setattr(devices, "replica_devices", lambda strategy: [device])
    monkeypatch.setattr(device_memory, "gpu_memory_limit", lambda name: 10**6)
    _, printed = run(memory=10**6)
    guess = int(re.search("a batch of ([0-9,]+) fits", printed.out)[1].replace(",", ""))
    config = find_batch.with_batch(flags.load_config("exp.py", []), guess)
    memory = memory_estimate.estimate(experiment.build(config, "exp.py", evaluates=False).trainer)
    # The input pipeline is in the memory of the host.
    needed = memory.peak + (memory.prefetched if device == "CPU:0" else 0)
    assert needed == pytest.approx(0.9 * 10**6, rel=1e-3)


def test_tries_train_the_layers_that_are_frozen_at_first(run, tmp_path):
    groups = 'optimizer=dict(groups=[dict(variables="*", frozen_until=1)])'
    (tmp_path / "exp.py").write_text(CONFIG.replace("data=", f"{groups}, data="))
    run()
    assert run.config.optimizer.groups == [dict(variables="*", learning_rate_scale=1.0)]


def test_the_kernel_refuses_more_memory_to_a_try():
    code = "from ctl.modes import find_batch; find_batch._limit(2**28); bytearray(2**SIZE)"
    codes = [child.run(["-c", code.replace("SIZE", size)]).returncode for size in ("26", "29")]
    assert codes == [0, 1]


def test_search_starts_at_the_config_without_an_estimate(run, tmp_path):
    text = TRAINER.replace("Function", "nothing")
    own = "    def train_step(self, iterator):\n        pass\n\n    def per_example_loss"
    (tmp_path / "tiny.py").write_text(text.replace("    def per_example_loss", own))
    code, printed = run(measure=lambda batch: GIB)
    first, second, *_ = printed.out.splitlines()
    assert code == 0 and "not estimated: the trainer overrides train_step" in first
    assert second == "a batch of 4 fits (1.00 GiB)"


def test_a_try_on_gpus_is_a_dry_run_and_reports_the_fullest(run, monkeypatch, tmp_path):
    del run  # its files
    arguments = Arguments(flags.load_config("exp.py", []), "exp.py", Workdir(tmp_path / "w"))
    runs, peaks = [], {"GPU:0": {"peak": GIB}, "GPU:1": {"peak": 2 * GIB}}
    monkeypatch.setattr(train, "train_and_eval", runs.append)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: list(peaks))
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", peaks.get)
    assert TRY(arguments, 24, None) == 2 * GIB
    assert [(each.dry_run, each.config.data.global_batch_size) for each in runs] == [(True, 24)]


SIXTEEN = "--config.data.global_batch_size=16 --config.optimizer.micro_batches=16"


@pytest.mark.parametrize(
    ("arguments", "memory", "tf_config", "message"),
    [
        ("", GIB, "", "Not even a batch of 1 fits into memory"),
        (SIXTEEN, GIB, "", "data has 8 examples, fewer than the replicas times the micro-batches"),
        ("--workdir=w", GIB, "", "--workdir has no effect"),
        ("", None, "", "memory of CPU:0 is not known"),
        ("", GIB, CLUSTER, "one process: unset TF_CONFIG"),
    ],
)
def test_a_mistake_is_one_line(run, monkeypatch, arguments, memory, tf_config, message):
    monkeypatch.setenv("TF_CONFIG", tf_config)
    code, printed = run(*arguments.split(), memory=memory)
    assert code == 2 and message in printed.err and len(printed.err.splitlines()) == 1


WIDE = """
import ctl
import numpy as np
import tensorflow as tf
import tf_keras


class Wide(ctl.StandardTrainer):
    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(16)])

    def build_dataset(self, split, input_context):
        rows = np.ones([4000, 16], np.float32)
        return ctl.data.arrays({"x": rows, "label": rows[:, 0]})

    def forward(self, batch, training):
        x = tf.tile(self.model(batch["x"], training=training), [1, 4096])
        for _ in range(4):
            x = tf.nn.relu(x)  # 256 KiB per row
        return tf.reduce_mean(x, axis=1)

    def per_example_loss(self, batch, outputs):
        return tf.square(batch["label"] - outputs)


def get_config():
    return ctl.config(
        trainer="wide.py:Wide", data=dict(global_batch_size=16), eval=dict(splits=[]))
"""
# A process needs memory for the stack of each thread.
LIMITED = """
import os, resource, sys
from ctl import main

resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
sys.exit(main.run(["ctl", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_the_batch_trains_in_limited_memory_and_one_that_is_a_tenth_larger_does_not(
    tmp_path, monkeypatch
):
    (tmp_path / "wide.py").write_text(WIDE)

    def ctl_limited(*arguments):
        return child.run(["-c", LIMITED, *arguments, "wide.py"], cwd=tmp_path, fork=True)

    found = ctl_limited("find_batch")
    assert (found.returncode, found.stderr) == (0, "")
    first, *tries, last = found.stdout.splitlines()
    assert "may use 2.00 GiB" in first and len(tries) >= 3
    assert {*os.listdir(tmp_path)} - {"__pycache__"} == {"wide.py"}
    batch = int(re.search(r"--config\.data\.global_batch_size=(\d+)", last)[1])
    assert ctl_limited("--dry_run", f"--config.data.global_batch_size={batch}").returncode == 0
    # Each try is a dry run, too.
    failed = [int(line.split()[3].replace(",", "")) for line in tries if "does not fit" in line]
    assert batch < min(failed) < 1.1 * batch
    # Another error than a lack of memory ends the search.
    fork = multiprocessing.get_context("fork")  # no TensorFlow runs in it
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    with pytest.raises(Failure, match=r"^ValueError: .*thirteen"):
        find_batch._run(str(tmp_path), int, "thirteen")
