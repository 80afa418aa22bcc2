"""ctl diff: what differs between two runs or two checkpoints."""

import json
import re
import shutil

import pytest

from ctl import main
from ctl.commands import diff
from ctl.configs import overrides
from ctl.errors import UsageError
from tests import child, experiments


def write_run(folder, *, rate=1e-3, seed=0, losses=(1.0, 0.5, 0.25), count=40, **result):
    """A run without checkpoints, of `count` examples in batches of four."""
    folder.mkdir()
    config = overrides.config(
        trainer="a.py:B",
        seed=seed,
        data=dict(global_batch_size=4),
        optimizer=dict(learning_rate=rate),
    )
    (folder / "config.json").write_text(config.to_json())
    records = [
        {"time": 5.0 + id(folder) % 7, "split": "train", "step": 10 * k + 10, "loss": loss,
         "accuracy": 0.5, "epoch": (k + 1) * 40 / count, "examples_per_second": id(folder) % 100,
         "input_wait": id(folder) % 3}
        for k, loss in enumerate(losses)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    content = {
        "versions": {"tensorflow": "2.20.0"},
        "strategy": "one_device",
        "replicas": 1,
        **result,
    }
    (folder / "result.json").write_text(json.dumps(content))
    return str(folder)


def compare(tmp_path, capsys, **changes):
    """Compares a run with a changed one; returns the exit code and the lines of each subject."""
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", **changes)]
    code = main.run(["ctl", "diff", *runs])
    return code, sections(capsys.readouterr().out)


def sections(text):
    parts = re.split(r"^(?=\S)", text, flags=re.MULTILINE)[1:]
    lines = [[line.strip() for line in part.splitlines()] for part in parts]
    names = ("config", "versions", "hardware", "data order", "metrics", "weights")
    for (head, *_), name in zip(lines[-6:], names[-len(lines) :], strict=True):
        assert head.startswith(name)
    return {name: [head[12:], *rest] for name, (head, *rest) in zip(names, lines, strict=True)}


def test_equal_runs_have_exit_code_0(tmp_path, capsys):
    code, parts = compare(tmp_path, capsys)
    assert code == 0
    assert parts["config"] == parts["versions"] == parts["hardware"] == ["the same"]
    assert parts["data order"][0].startswith("the same")
    assert parts["metrics"] == ["the same in 3 records of both runs, up to step 30"]
    assert parts["weights"][0].startswith("not compared, since no step has two checkpoints")


@pytest.mark.parametrize(
    ("changes", "part", "lines"),
    [
        (
            dict(rate=0.5),
            "config",
            ["1 key differs", "optimizer.learning_rate: 0.001 -> 0.5"],
        ),
        (
            dict(versions={"tensorflow": "2.21.0"}),
            "versions",
            ["1 value differs", "tensorflow: '2.20.0' -> '2.21.0'"],
        ),
        (
            dict(strategy="mirrored", replicas=2),
            "hardware",
            ["2 values differ", "strategy: 'one_device' -> 'mirrored'", "replicas: 1 -> 2"],
        ),
        (dict(seed=3), "data order", ["differs", "seed: 0 -> 3"]),
        (
            dict(count=80),
            "data order",
            ["differs", "the data has another length: step 10 is at epoch 1 -> 0.5"],
        ),
        (
            dict(losses=(1.0, 0.5, 0.2)),
            "metrics",
            [
                "first difference at step 30 (train); the same up to step 20",
                "loss: 0.25 -> 0.2 (by 0.2 of its value)",
            ],
        ),
        (
            dict(losses=(1.0, 0.5)),
            "metrics",
            [
                "the same in 2 records of both runs, up to step 20",
                "only in a: 1 record of step 30",
            ],
        ),
    ],
)
def test_each_difference_is_listed_and_the_exit_code_is_1(tmp_path, capsys, changes, part, lines):
    code, parts = compare(tmp_path, capsys, **changes)
    assert code == 1 and parts[part] == lines


def test_rolled_back_batches_change_the_data_order(tmp_path, capsys):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    (tmp_path / "b/rollbacks.json").write_text('{"rollbacks": [{"step": 3}]}')
    assert diff.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    line = "rollbacks: not set -> [{'step': 3}]"
    assert line in sections(capsys.readouterr().out)["data order"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "the following arguments are required: B: write ctl diff A B"),
        (["a", "nothing"], "nothing is neither the workdir of a run nor a checkpoint"),
        (["a", "damaged"], "cannot be read"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    write_run(tmp_path / "damaged")
    (tmp_path / "damaged/result.json").write_text("{")
    with pytest.raises(UsageError, match=re.escape(message)):
        diff.main(arguments)


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

    assert main.run(["ctl", "diff", "a", "b"]) == 1
    parts = sections(capsys.readouterr().out)
    assert parts["config"] == ["1 key differs", "seed: 0 -> 1"]
    assert parts["metrics"][0] == "first difference at step 5 (train)"
    assert re.fullmatch(r"\d+ of \d+ variables differ at step 10", parts["weights"][0])
    line = (
        r"dense(_\d+)?/\w+: largest difference \S+, \S+ of the largest element; .* elements differ"
    )
    assert re.fullmatch(line, parts["weights"][1])

    # Checkpoints by themselves: other steps of one run, and a copy.
    checkpoints = [f"{run}/checkpoints/ckpt-{step}" for run, step in (("a", 30), ("a", 20))]
    assert diff.main(checkpoints) == 1
    text = capsys.readouterr().out
    assert text.startswith("weights") and "global_step: 30 -> 20" in text
    assert diff.main(["a/checkpoints/ckpt-30", "copy"]) == 0


def test_runs_without_checkpoints_do_not_import_tensorflow(tmp_path):
    write_run(tmp_path / "a")
    code = (
        "import sys; from ctl import main\n"
        "print(main.run(['ctl', 'diff', 'a', 'a']), 'tensorflow' in sys.modules)\n"
    )
    done = child.run(["-c", code], cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
