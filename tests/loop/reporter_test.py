"""What a run prints, summarizes and records."""

import itertools
import os
import sys
import types

import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.hardware import cluster, selection
from ctl.hardware.collectives import ProcessGroup
from ctl.hardware.strategies import StrategyOptions
from ctl.loop import progress, reporter
from ctl.loop.controller import Controller
from ctl.loop.progress import Progress
from ctl.loop.reporter import Reporter
from tests import reference_model
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.loop.shared import share


@share
def make_trainer():
    return reference_model.make_trainer(testing.make_strategy(1), 7)


def summary_tags(folder):
    return {
        value.tag
        for path in folder.glob("events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }


def test_summaries_and_lines_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    trainer, lines, events = make_trainer(), [], []
    controller = Controller(
        trainer=trainer,
        evaluator=ctl.StandardEvaluator(trainer),
        steps_per_loop=5,
        summary_dir=str(tmp_path / "train"),
        eval_summary_dir=str(tmp_path / "eval"),
        reporter=Reporter(
            trainer,
            progress=Progress(total=10, write=lines.append),
            on_event=lambda name, step, **fields: events.append((name, step, fields)),
        ),
    )
    controller.train_and_evaluate(10)
    assert [line.split("|")[0].strip() for line in lines] == [
        "train       5/10",
        "train      10/10",
        "eval       10/10",
    ]
    assert {"loss", "accuracy", "examples_per_second", "input_wait"} <= summary_tags(
        tmp_path / "train"
    )
    assert {"loss", "accuracy", "examples"} <= summary_tags(tmp_path / "eval")
    assert events == [("eval", 10, controller.evaluation)]


def set_clocks(patch, wait):
    """Each step waits for its batch for exactly `wait` seconds, and each loop takes 4 seconds."""
    now = tf.Variable(0.0, dtype=tf.float64)
    patch.setattr(tf, "timestamp", lambda: tf.identity(now.assign_add(wait)))
    clock = types.SimpleNamespace(perf_counter=itertools.count(0.0, 4.0).__next__)
    patch.setattr("ctl.loop.loop_monitor.time", clock)


def test_slow_input_is_in_the_line_the_summaries_and_the_events(tmp_path, monkeypatch):
    set_clocks(monkeypatch, wait=0.6)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    make_trainer.cache_clear()  # its graph reads another clock
    trainer, lines, events = make_trainer(), [], []
    controller = Controller(
        trainer=trainer,
        steps_per_loop=5,
        summary_dir=str(tmp_path),
        reporter=Reporter(
            trainer,
            progress=Progress(total=10, write=lines.append),
            on_event=lambda name, step, **fields: events.append(fields),
        ),
    )
    controller.train(10)
    assert lines[1].endswith(" | waited 75% for input")
    assert "input_wait" in summary_tags(tmp_path)
    controller.reporter.record("checkpoint", 10)
    assert events[-1]["seconds"]["input"] == pytest.approx(6.0)
    assert "input_wait" not in controller.outputs  # which are in result.json


def wait_of_worker(waits):
    """The share of waiting, in a process whose steps wait for its own number of seconds."""
    hardware = selection.build(
        "multi_worker_mirrored", StrategyOptions(cluster=cluster.from_environment(os.environ))
    )
    with pytest.MonkeyPatch.context() as patch:
        set_clocks(patch, waits[hardware.cluster.index])
        trainer = reference_model.make_trainer(hardware.strategy, 8)
        controller = Controller(trainer=trainer, processes=ProcessGroup(hardware))
        controller.train(5)
    return controller.reporter.throughput.input_wait


@pytest.mark.slow
def test_processes_report_the_wait_of_the_slowest_input():
    shares = testing.run_workers(wait_of_worker, (0.1, 0.6))
    assert shares == pytest.approx([0.75, 0.75])


def test_gpu_usage_is_printed_and_summarized_next_to_the_outputs(tmp_path, monkeypatch):
    usage = {"gpu_memory_gib": 5.0, "gpu_utilization": 0.9}
    monkeypatch.setattr("ctl.hardware.gpu.read_usage", lambda: usage)
    monkeypatch.setattr(reporter, "_on_gpu", lambda strategy: True)
    trainer, lines = make_trainer(), []
    controller = Controller(
        trainer=trainer,
        steps_per_loop=5,
        summary_dir=str(tmp_path),
        reporter=Reporter(trainer, progress=Progress(total=5, write=lines.append)),
    )
    controller.train(5)
    assert "| gpu_memory_gib 5.0000 | gpu_utilization 0.9000" in lines[0]
    assert {"loss", "gpu_memory_gib", "gpu_utilization"} <= summary_tags(tmp_path)
    assert set(controller.outputs) == {"loss", "accuracy"}


def test_usage_is_printed_only_if_a_replica_is_on_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu()]))
    trainer, lines = make_trainer(), []
    reporter = Reporter(trainer, progress=Progress(total=5, write=lines.append))
    Controller(trainer=trainer, steps_per_loop=5, reporter=reporter).train(5)
    assert [("gpu" in line) for line in lines] == [bool(tf.config.list_physical_devices("GPU"))]


@pytest.mark.parametrize(
    ("devices", "on_gpu"),
    [
        (("/job:localhost/replica:0/task:0/device:GPU:0",), True),
        (("/job:localhost/replica:0/task:0/device:CPU:0",), False),
        (("/job:worker/replica:0/task:0/device:TPU:0",), False),
    ],
)
def test_replicas_on_gpus_are_detected_by_their_devices(devices, on_gpu):
    extended = types.SimpleNamespace(worker_devices=devices)
    assert reporter._on_gpu(types.SimpleNamespace(extended=extended)) == on_gpu


def test_numbers_of_nested_outputs_stay_nested():
    outputs = {"loss": tf.constant(0.5), "by_class": {"a": tf.constant([1, 2])}, "note": "text"}
    expected = {"loss": 0.5, "by_class": {"a": [1, 2]}, "note": "text"}
    assert reporter.as_numbers(outputs) == expected
