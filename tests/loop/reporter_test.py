"""What a run prints, summarizes and records."""

import itertools
import sys
import types

import pytest
import tensorflow as tf

import ctl
from ctl.hardware.collectives import ProcessGroup
from ctl.loop import reporter
from ctl.loop.loop_numbers import LoopNumbers
from ctl.loop.metric_log import MetricLog
from tests.loop.shared import control, make_reference, read_summaries, share
from tests.support.fake_nvml import FakeGpu, FakeNvml


@share
def make_trainer():
    return make_reference(batch=7)


def run(folder, trainer, *, steps=5, **options):
    """Trains in loops of 5 steps; evaluates at the end if there is an evaluator."""
    reporter = {"total": steps, "metrics": MetricLog(summary_folder=folder)}
    options = {"steps_per_loop": 5, "actions": [LoopNumbers()], **options}
    controller = control(trainer, reporter=reporter, **options)
    (controller.train_and_evaluate if options.get("evaluator") else controller.train)(steps)
    return controller


def test_summaries_and_lines_are_written(tmp_path):
    trainer = make_trainer()
    evaluator = ctl.StandardEvaluator(trainer)
    controller = run(tmp_path, trainer, steps=10, evaluator=evaluator)
    starts = [line.split("|")[0].split() for line in controller.reporter.lines]
    assert starts == [["train", "5/10"], ["train", "10/10"], ["eval", "10/10"]]
    train, evaluation = (read_summaries(tmp_path / split).keys() for split in ("train", "eval"))
    assert {"loss", "accuracy", "speed/examples_per_second", "speed/input_wait"} <= train
    assert {"loss", "accuracy", "sources/examples"} <= evaluation
    # Only the learning rate stands between the metrics, the loss and the other charts.
    bare = {tag for tag in {*train, *evaluation} if "/" not in tag}
    assert bare == {"accuracy", "learning_rate", "loss"}
    descriptions = read_summaries(tmp_path / "train", lambda v: v.metadata.summary_description)
    words = "The share of the time in which steps waited"
    assert descriptions["speed/input_wait"][5].startswith(words)
    assert descriptions["accuracy"][5] == ""
    assert controller.reporter.events == [("eval", 10, controller.evaluation)]


def set_clocks(patch, wait):
    """Each step waits for its batch for exactly `wait` seconds, and each loop takes 4 seconds."""
    now = tf.Variable(0.0, dtype=tf.float64)
    patch.setattr(tf, "timestamp", lambda: tf.identity(now.assign_add(wait)))
    patch.setattr("time.perf_counter", itertools.count(0.0, 4.0).__next__)


class OtherWaits(ProcessGroup):
    """Another process waits for 3 of the 4 seconds of a loop."""

    def gather(self, values):
        assert values == [4.0, pytest.approx(0.5), 0.0]
        return [values, [4.0, 3.0, 0.0]]


def test_input_of_the_slowest_process_is_in_the_line_the_summaries_and_the_events(
    tmp_path, monkeypatch
):
    set_clocks(monkeypatch, wait=0.1)
    make_trainer.cache_clear()  # its graph reads another clock
    controller = run(tmp_path, make_trainer(), steps=10, processes=OtherWaits())
    reporter = controller.reporter
    assert reporter.lines[1].endswith(" | waited 75% for input")
    assert "speed/input_wait" in read_summaries(tmp_path / "train")
    assert reporter.seconds()["input"] == pytest.approx(6.0)
    assert "input_wait" not in controller.outputs  # which are in result.json


def test_gpu_usage_is_printed_and_summarized_next_to_the_outputs(tmp_path, monkeypatch):
    gpu = FakeGpu(used=5 * 2**30, percent=90)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([gpu]))
    monkeypatch.setattr(reporter, "_on_gpu", lambda strategy: True)
    controller = run(tmp_path, make_trainer())
    assert "| gpu_memory_gib 5.0000 | gpu_utilization 0.9000" in controller.reporter.lines[0]
    tags = read_summaries(tmp_path / "train").keys()
    assert {"loss", "speed/gpu_memory_gib", "speed/gpu_utilization"} <= tags
    assert set(controller.outputs) == {"loss", "accuracy"}


def test_usage_is_printed_only_if_a_replica_is_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu()]))
    (line,) = run(tmp_path, make_trainer()).reporter.lines
    assert ("gpu" in line) == bool(tf.config.list_physical_devices("GPU"))


@pytest.mark.parametrize(("device", "on_gpu"), [("GPU", True), ("TPU", False)])
def test_replicas_on_gpus_are_detected_by_their_devices(device, on_gpu):
    devices = (f"/job:localhost/replica:0/task:0/device:{device}:0",)
    extended = types.SimpleNamespace(worker_devices=devices)
    assert reporter._on_gpu(types.SimpleNamespace(extended=extended)) == on_gpu


def test_numbers_of_nested_outputs_stay_nested():
    outputs = {"loss": tf.constant(0.5), "by_class": {"a": tf.constant([1, 2])}, "note": "text"}
    expected = {"loss": 0.5, "by_class": {"a": [1, 2]}, "note": "text"}
    assert reporter.as_numbers(outputs) == expected
