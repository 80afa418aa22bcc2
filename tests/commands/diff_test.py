"""ctl diff: what differs between two runs or two checkpoints."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

from ctl import main
from ctl.commands import checkpoint_comparison, diff
from ctl.configs import overrides
from ctl.errors import UsageError
from ctl.loop.checkpoints.files import find_files
from tests.support import experiments

BFLOAT16 = tf.bfloat16.as_numpy_dtype
FIRST = ", the first step of which both have records"


def write_run(
    folder, *, rate=1e-3, losses=(1.0, 0.5, 0.25), first=10, skipped=(), extra=None, **result
):
    """A run without checkpoints, in batches of four; the steps `skipped` are rolled back."""
    folder.mkdir()
    optimizer, data = dict(learning_rate=rate), dict(global_batch_size=4)
    config = overrides.config(trainer="a.py:B", data=data, optimizer=optimizer)
    (folder / "config.json").write_text(config.to_json())
    if skipped:
        (folder / "rollbacks.json").write_text(json.dumps({"rollbacks": skipped}))
    records = [
        {"time": 5.0 + id(folder) % 7, "split": "train", "step": 10 * k + first, "loss": loss,
         "accuracy": 0.5, "zero": 0.0, "undefined": float("nan"), "epoch": k + 1,
         "examples_per_second": id(folder) % 100, "input_wait": id(folder) % 3, **(extra or {})}
        for k, loss in enumerate(losses)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    content = {"versions": {"tensorflow": "2.20.0"}, "strategy": "one_device", "replicas": 1}
    (folder / "result.json").write_text(json.dumps(content | result))
    return str(folder)


def compare(tmp_path, capsys, **changes):
    """Compares a run with a changed one; returns the exit code and the lines of each subject."""
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", **changes)]
    code = main.run(["ctl", "diff", *runs])
    return code, sections(capsys.readouterr().out)


def sections(text):
    parts = re.split(r"^(?=\S)", text, flags=re.MULTILINE)[1:]
    lines = [[line.strip() for line in part.splitlines()] for part in parts]
    names = ("config", "versions", "hardware", "metrics", "weights")
    for (head, *_), name in zip(lines[-5:], names[-len(lines) :], strict=True):
        assert head.startswith(name)
    return {name: [head[12:], *rest] for name, (head, *rest) in zip(names, lines, strict=True)}


def test_equal_runs_have_exit_code_0(tmp_path, capsys):
    code, parts = compare(tmp_path, capsys)
    assert code == 0
    assert parts["config"] == parts["versions"] == parts["hardware"] == ["the same"]
    assert parts["metrics"] == ["the same in 3 records of both runs, up to step 30"]
    assert parts["weights"][0].startswith("not compared, since no step has two checkpoints")


@pytest.mark.parametrize(
    ("changes", "part", "lines"),
    [
        (dict(rate=0.5), "config", ["1 key differs", "optimizer.learning_rate: 0.001 -> 0.5"]),
        (dict(versions={"numpy": "2"}), "versions",
         ["2 values differ", "tensorflow: '2.20.0' -> not set", "numpy: not set -> '2'"]),
        (dict(replicas=2), "hardware", ["1 value differs", "replicas: 1 -> 2"]),
        (dict(skipped=[{"step": 3}]), "config",
         ["1 key differs", "rollbacks: not set -> [{'step': 3}]"]),
        (dict(losses=(1.0, 0.5, 0.2)), "metrics",
         ["first difference at step 30 (train); the same up to step 20",
          "loss: 0.25 -> 0.2 (by 0.2 of its value)"]),
        (dict(losses=(1.0, 0.5)), "metrics",
         ["the same in 2 records of both runs, up to step 20", "only in a: 1 record of step 30"]),
        (dict(extra={"zero": -0.0}), "metrics",
         [f"first difference at step 10 (train){FIRST}", "zero: 0.0 -> -0.0"]),
        (dict(extra={"gradient_norm": 2.0}), "metrics",
         [f"first difference at step 10 (train){FIRST}", "gradient_norm: not set -> 2.0"]),
    ],
)  # fmt: skip
def test_each_difference_is_listed_and_the_exit_code_is_1(tmp_path, capsys, changes, part, lines):
    code, parts = compare(tmp_path, capsys, **changes)
    assert code == 1 and parts[part] == lines


@pytest.mark.parametrize("changes", [dict(first=15), dict(losses=())])
def test_runs_without_a_common_step_have_exit_code_2(tmp_path, capsys, changes):
    runs = [write_run(tmp_path / "a", losses=(1.0,)), write_run(tmp_path / "b", **changes)]
    assert main.run(["ctl", "diff", *runs]) == 2
    printed = capsys.readouterr()
    metrics = sections(printed.out)["metrics"]
    assert metrics[0] == "not compared: no step has records of both runs"
    assert metrics[1] == "only in a: 1 record of step 10"
    assert "neither records of metrics nor checkpoints of the same step" in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ([0.0, 1], [-0.0, 1], "the same values, but other bits, such as the sign of 0; 1 of 2"),
        ([float("nan"), 1], [float("nan"), 2], "difference 1 (0.5 times the largest value of this"),
        ([float("nan"), 1], [0.0, 3], "2 (0.67 times the largest value of this variable); 2 of 2"),
        ([float("nan"), 1], [0.0, 3], "elements differ, 1 of them by a value that is not finite"),
        (np.int64([2**60, 0]), np.int64([2**60 + 1, 0]), "difference 1 (8.7e-19 times"),
        (np.int64([-(2**63)]), np.int64([2**63 - 1]), f"{-(2**63)} -> {2**63 - 1}"),
        (np.array([1, 2], BFLOAT16), np.array([1, 4], BFLOAT16), "difference 2 (0.5 times"),
        ([True, True], [True, False], "difference 1 (1 times"),
        (np.uint8([3, 0]), np.uint8([0, 0]), "difference 3 (1 times"),
        ([1 + 1j, 0], [1 - 1j, 0], "difference 2 (1.4 times"),
        (b"a", b"b", "v: another value"),
        (np.array([b"a"], object), np.array([b"b"], object), "v: another value"),
        (0.0, -0.0, "v: 0.0 -> -0.0"),
    ],
)
def test_elements_are_compared_by_bits_and_their_distance_is_exact(old, new, line):
    _, text = checkpoint_comparison._compare("v", old, new)
    assert line in text


def test_one_line_names_all_variables_of_other_shapes_and_the_reason_of_the_step(tmp_path, capsys):
    for name, width, steps in (("a", 3, (64, 96)), ("b", 4, (64,))):
        values = {"kernel": tf.Variable(tf.zeros([2, width])), "bias": tf.Variable(tf.zeros(width))}
        for step in steps:
            files = find_files(str(tmp_path / name / "checkpoints"))
            tf.train.Checkpoint(**values).write(files.path(step))
            files.commit(step)
    assert diff.main([str(tmp_path / name) for name in ("a", "b")]) == 1
    head, *lines = capsys.readouterr().out.splitlines()
    only = "at step 64, the only step of which both have a checkpoint"
    assert head == f"weights     2 of 2 variables differ {only}"
    assert len(lines) == 1
    assert lines[0].startswith("  2 variables have another shape or dtype, such as ")
    assert lines[0].endswith("[3] float32 -> [4] float32")


def test_variables_of_the_same_bits_have_no_difference():
    one, other = (np.array(["".join(parts)], object) for parts in (("a", "bc"), ("ab", "c")))
    assert one[0] is not other[0] and checkpoint_comparison._compare("v", one, other) is None
    assert checkpoint_comparison._compare("v", [float("nan")], [float("nan")]) is None
    order, text = checkpoint_comparison._compare("v", [0.0, 1], [float("inf"), 1])
    assert order == float("inf") and "1 of 2 elements differ, 1 of them" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "ctl diff needs two runs or checkpoints: ctl diff A B."),
        (["a", "nothing"], "nothing does not exist: name a run's --workdir"),
        (["a", "folder"], "folder is neither the workdir of a run nor a checkpoint"),
        (["a", "damaged"], "cannot be read"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    write_run(tmp_path / "damaged")
    (tmp_path / "folder").mkdir()
    (tmp_path / "damaged/result.json").write_text("{")
    with pytest.raises(UsageError, match=re.escape(message)):
        diff.main(arguments)


@pytest.mark.slow
def test_runs_with_checkpoints_are_compared_by_variable(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    for name, seed in (("a", 0), ("b", 1)):
        flags = [f"--workdir={name}", f"--config.seed={seed}"]
        assert main.run(["ctl", "--config=experiment.py", *flags]) == 0
    shutil.copytree("a", "copy")
    capsys.readouterr()
    assert main.run(["ctl", "diff", "a", "copy"]) == 0
    parts = sections(capsys.readouterr().out)
    assert parts["weights"] == ["the same bits at step 10, at step 20, at step 30"]

    # Records of metrics alone do not show that the weights are the same.
    shutil.copytree("a", "bare", ignore=shutil.ignore_patterns("checkpoints"))
    assert main.run(["ctl", "diff", "a", "bare"]) == 1
    weights = sections(capsys.readouterr().out)["weights"][0]
    assert weights.startswith("not compared") and weights.endswith("(a: 10, 20, 30, bare: none)")

    assert main.run(["ctl", "diff", "a", "b"]) == 1
    parts = sections(capsys.readouterr().out)
    assert parts["config"] == ["1 key differs", "seed: 0 -> 1"]
    assert parts["metrics"][0] == f"first difference at step 5 (train){FIRST}"
    why = r", the first difference \(both have checkpoints of the steps 10, 20, 30\)"
    assert re.fullmatch(rf"\d+ of \d+ variables differ at step 10{why}", parts["weights"][0])
    line = r"dense(_\d+)?/\w+: largest difference \S+ \(\S+ times the largest value .* differ"
    assert re.fullmatch(line, parts["weights"][1])

    # Checkpoints by themselves: other steps of one run, and a copy.
    checkpoints = [f"{run}/checkpoints/ckpt-{step}" for run, step in (("a", 30), ("a", 20))]
    assert diff.main(checkpoints) == 1
    text = capsys.readouterr().out
    assert text.startswith("weights") and "global_step: 30 -> 20" in text
    assert diff.main(["a/checkpoints/ckpt-30", "copy"]) == 0
    os.truncate("copy/checkpoints/ckpt-30.data-00000-of-00001", 100)
    with pytest.raises(UsageError, match=r"copy/checkpoints/ckpt-30 cannot be read \("):
        diff.main(["a/checkpoints/ckpt-30", "copy/checkpoints/ckpt-30"])
