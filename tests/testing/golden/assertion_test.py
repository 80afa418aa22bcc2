"""`assert_curve`: when it records, compares and rejects."""

import functools
import json
import os

import pytest

import ctl
from ctl import testing
from ctl.testing.golden import assertion, recording
from tests import child, experiments
from tests.testing.golden import trainers
from tests.testing.golden.trainers import STEPS, make, recorded


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    monkeypatch.setattr(assertion, "_recorded", {})


@pytest.fixture
def file(tmp_path):
    recording.write(tmp_path / "golden/tiny.json", recorded())
    return tmp_path / "golden/tiny.json"


def test_public_names_of_the_kit_exist():
    assert all(getattr(testing, name) for name in testing.__all__)


def test_file_is_read_as_it_was_written(file):
    assert recording.read(file) == recorded()
    lines = file.read_text().splitlines()
    assert sum(line.startswith('    {"loss"') for line in lines) == STEPS  # one line per step


def test_an_unchanged_trainer_passes_and_writes_nothing(file):
    before = file.stat().st_mtime_ns
    report = testing.assert_curve(file, make(), steps=STEPS)
    assert report.equal and report.compares_bits
    assert file.stat().st_mtime_ns == before and os.listdir(file.parent) == [file.name]


def test_a_changed_trainer_fails_and_writes_nothing(file):
    before = file.read_bytes()
    with pytest.raises(AssertionError) as error:
        testing.assert_curve(str(file), make(seed=1), steps=2)
    message = str(error.value)
    assert message.startswith(f"{file}: Step 1: the loss is ")
    assert "within the tolerance for rounding errors, since seed: 0 -> 1." in message
    assert message.endswith("record the curve again: pytest --update_golden.")
    assert file.read_bytes() == before


def test_a_missing_file_is_an_error_and_is_not_written(tmp_path):
    with pytest.raises(
        ctl.UsageError, match=r"no\.json does not exist: record it by pytest --update_g"
    ):
        testing.assert_curve(tmp_path / "no.json", make(), steps=2)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_update_records_a_curve_and_replaces_it_only_if_it_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(assertion.UPDATE, "1")
    file = tmp_path / "a/tiny.json"
    testing.assert_curve(file, make(), steps=2)
    line = capsys.readouterr().out
    assert line.startswith(f"{file}: recorded 2 steps of 4 tensors; last loss 0.") and "+-" in line
    before = file.stat()
    testing.assert_curve(file, make(), steps=2)
    assert capsys.readouterr().out == f"{file} is unchanged.\n"
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    before = file.read_bytes()
    for trainer, steps in ((make(seed=1), 2), (make(), 3)):
        with pytest.raises(ctl.UsageError, match=r"tiny\.json was recorded already"):
            testing.assert_curve(file, trainer, steps=steps)
    assert file.read_bytes() == before


@pytest.mark.slow
def test_update_replaces_a_curve_that_has_changed(file, monkeypatch):
    monkeypatch.setenv(assertion.UPDATE, "1")
    testing.assert_curve(file, make(seed=1), steps=2)
    assert json.loads(file.read_text())["environment"]["seed"] == "1"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 1}', '{"format": 2, "about": ""}'])
def test_a_damaged_file_is_one_line(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ctl.UsageError, match="cannot be read as a golden curve") as error:
        testing.assert_curve(tmp_path / "a.json", make(), steps=2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", '{"format": 1}'])
def test_update_replaces_a_damaged_file(tmp_path, monkeypatch, content):
    (tmp_path / "a.json").write_text(content)
    monkeypatch.setenv(assertion.UPDATE, "1")
    monkeypatch.setattr(assertion, "_record", lambda *_, **__: recorded())
    testing.assert_curve(tmp_path / "a.json", make(), steps=STEPS)
    assert len(recording.read(tmp_path / "a.json").steps) == STEPS


def test_a_trained_trainer_and_no_steps_are_rejected(file):
    trainer = make()
    trainer.train(trainers.tf.constant(2))
    with pytest.raises(ctl.UsageError, match="has made 2 steps, but a golden curve starts"):
        testing.assert_curve(file, trainer, steps=2)
    with pytest.raises(ctl.UsageError, match="steps is 0"):
        testing.assert_curve(file, make(), steps=0)


@functools.cache
def config():
    return ctl.config(
        trainer="tests.testing.golden.trainers:Tiny",
        data=dict(global_batch_size=8),
        runtime=dict(strategy="one_device", devices=["CPU:0"], xla="off"),
        optimizer=dict(name="adam", learning_rate=1e-2),
    )


@pytest.mark.slow
def test_a_config_has_the_curve_of_its_trainer(file, monkeypatch):
    monkeypatch.chdir(child.ROOT)
    assert testing.assert_curve(file, config(), steps=STEPS).equal


@pytest.mark.slow
def test_a_config_file_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    monkeypatch.setenv(assertion.UPDATE, "1")
    testing.assert_curve("golden.json", "experiment.py", steps=3)
    monkeypatch.delenv(assertion.UPDATE)
    report = testing.assert_curve("golden.json", "experiment.py", steps=3)
    assert report.equal and report.compares_bits
    assert {*os.listdir(tmp_path)} - {"__pycache__"} == {"experiment.py", "golden.json"}


@pytest.mark.slow
def test_option_of_pytest_records(tmp_path):
    experiments.write(
        tmp_path,
        {
            "golden_test.py": (
                "from ctl import testing\n\n"
                "def test_curve():\n"
                "    testing.assert_curve('tiny.json', testing.tiny_trainer(), steps=2)\n"
            )
        },
    )
    command = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "golden_test.py"]
    failed = child.run(command, cwd=tmp_path)
    assert "tiny.json does not exist" in failed.stdout
    assert "1 passed" in child.run([*command, "--update_golden"], cwd=tmp_path).stdout
    assert "1 passed" in child.run(command, cwd=tmp_path).stdout
