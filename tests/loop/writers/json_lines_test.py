"""metrics.jsonl: one record per step and split, however often a run is killed."""

import json
import math

from ctl.loop.writers.json_lines import JsonLinesWriter
from ctl.loop.writers.writer import Record


def read_json(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def keys(lines):
    return [(line["split"], line["step"]) for line in lines]


def test_a_json_line_has_all_numbers_under_flat_names(tmp_path):
    writer = JsonLinesWriter(tmp_path)
    values = {
        "loss": 0.5, "examples": 50, "by_class": {"a": 1.0}, "recall": [0.25, 0.75],
        "note": "text", "step": 7, "worst": math.nan, "best": -math.inf,
    }  # fmt: skip
    writer.write(Record("eval", 100, values, time=12.5))
    assert read_json(writer.path) == [
        {
            "time": 12.5, "split": "eval", "step": 100, "loss": 0.5, "examples": 50,
            "by_class/a": 1.0, "recall/0": 0.25, "recall/1": 0.75, "metric/step": 7,
            "worst": "NaN", "best": "-Infinity",
        }
    ]  # fmt: skip
    assert "NaN," not in writer.path.read_text().replace('"NaN",', "")


def test_lines_after_the_restored_step_and_half_lines_are_dropped(tmp_path):
    writer = JsonLinesWriter(tmp_path)
    writer.restore(0)
    assert not writer.path.exists() and not writer.has_evaluation(0)
    for step in (5, 10, 15):
        writer.write(Record("train", step, {"loss": 1.0}))
        writer.write(Record("eval", step, {"loss": 1.0}))
    with open(writer.path, "a") as file:
        file.write(read_first_half(writer.path))
    resumed = JsonLinesWriter(tmp_path)
    resumed.restore(10)
    assert keys(read_json(writer.path)) == [("train", 5), ("eval", 5), ("train", 10), ("eval", 10)]
    assert resumed.has_evaluation(10) and not resumed.has_evaluation(15)
    resumed.write(Record("train", 15, {"loss": 1.0}))
    assert keys(read_json(writer.path))[-1] == ("train", 15)


def read_first_half(path):
    line = path.read_text().splitlines()[-1]
    return line[: len(line) // 2]


def test_repeated_evaluation_replaces_the_earlier_one(tmp_path):
    JsonLinesWriter(tmp_path).write(Record("eval", 5, {"value": 1.0}))
    writer = JsonLinesWriter(tmp_path)
    writer.write(Record("train", 6, {"value": 2.0}))
    writer.write(Record("eval", 5, {"value": 3.0}))
    lines = read_json(writer.path)
    assert keys(lines) == [("train", 6), ("eval", 5)]
    assert lines[-1]["value"] == 3.0
