"""What a run prints, summarizes and records."""

import os
import sys
import types

import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep

import ctl
from ctl import testing
from ctl.hardware import cluster, selection
from ctl.hardware.collectives import ProcessGroup
from ctl.hardware.strategies import StrategyOptions
from ctl.loop import reporter
from ctl.loop.controller import Controller
from ctl.loop.progress import Progress
from ctl.loop.reporter import Reporter
from tests import reference_model
from tests.fake_nvml import FakeGpu, FakeNvml


def make_trainer():
    return reference_model.make_trainer(testing.make_strategy(1), 7)


def summary_tags(folder):
    return {
        value.tag
        for path in folder.glob("events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }


def test_summaries_and_lines_are_written(tmp_path):
    trainer, lines, events = make_trainer(), [], []
    controller = Controller(
        trainer=trainer,
        evaluator=ctl.StandardEvaluator(trainer),
        steps_per_loop=5,
        summary_dir=str(tmp_path / "train"),
        eval_summary_dir=str(tmp_path / "eval"),
        reporter=Reporter(
            trainer,
            progress=Progress(total=10, every=0.0, write=lines.append),
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


class SlowInput(reference_model.ReferenceTrainer):
    """The input pipeline needs 30 milliseconds per batch of 7 on each input pipeline."""

    @staticmethod
    def data_factory(split):
        dataset = tf.data.Dataset.from_tensor_slices(reference_model.examples(203))
        return dataset.apply(sleep(30_000 // 7))


@pytest.mark.parametrize("replicas", [1, 2])
def test_slow_input_is_in_the_line_the_summaries_and_the_events(tmp_path, replicas):
    strategy = testing.make_strategy(replicas)
    trainer, lines, events = reference_model.make_trainer(strategy, 7, cls=SlowInput), [], []
    controller = Controller(
        trainer=trainer,
        steps_per_loop=5,
        summary_dir=str(tmp_path),
        reporter=Reporter(
            trainer,
            progress=Progress(total=10, every=0.0, write=lines.append),
            on_event=lambda name, step, **fields: events.append(fields),
        ),
    )
    controller.train(10)
    share = controller.reporter.throughput.input_wait
    assert share > 0.8 and lines[1].endswith(f" | waited {share:.0%} for input")
    assert "input_wait" in summary_tags(tmp_path)
    controller.reporter.record("checkpoint", 10)
    assert 0.1 < events[-1]["seconds"]["input"] < events[-1]["seconds"]["steps"] + 10
    assert "input_wait" not in controller.outputs  # which are in result.json


def wait_of_worker(delays):
    """The share of waiting, in a process whose input pipeline sleeps for its own time per batch."""
    hardware = selection.build(
        "multi_worker_mirrored", StrategyOptions(cluster=cluster.from_environment(os.environ))
    )
    delay = int(1e6 * delays[hardware.cluster.index])

    class Slow(reference_model.ReferenceTrainer):
        @staticmethod
        def data_factory(split):
            dataset = tf.data.Dataset.from_tensor_slices(reference_model.examples(203))
            return dataset.batch(8).apply(sleep(delay)).unbatch()

    trainer = reference_model.make_trainer(hardware.strategy, 8, cls=Slow)
    controller = Controller(trainer=trainer, steps_per_loop=20, processes=ProcessGroup(hardware))
    controller.train(40)
    return controller.reporter.throughput.input_wait


@pytest.mark.slow
def test_processes_report_the_wait_of_the_slowest_input():
    # 0.2 s per batch are most of a step also on a busy machine; the chief's own input takes nothing.
    chief, other = testing.run_workers(wait_of_worker, (0.0, 0.2))
    assert chief == pytest.approx(other, abs=0.05) and chief > 0.7


def test_gpu_usage_is_printed_and_summarized_next_to_the_outputs(tmp_path):
    trainer, lines = make_trainer(), []
    controller = Controller(
        trainer=trainer,
        steps_per_loop=5,
        summary_dir=str(tmp_path),
        reporter=Reporter(
            trainer,
            progress=Progress(total=5, write=lines.append),
            gpu_usage=lambda: {"gpu_memory_gib": 5.0, "gpu_utilization": 0.9},
        ),
    )
    controller.train(5)
    assert "| gpu_memory_gib 5.0000 | gpu_utilization 0.9000" in lines[0]
    assert {"loss", "gpu_memory_gib", "gpu_utilization"} <= summary_tags(tmp_path)
    assert set(controller.outputs) == {"loss", "accuracy"}


def test_usage_is_printed_only_if_a_replica_is_on_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu()]))
    trainer, lines = make_trainer(), []
    progress = Progress(total=5, write=lines.append)
    Controller(
        trainer=trainer, steps_per_loop=5, reporter=Reporter(trainer, progress=progress)
    ).train(5)
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
