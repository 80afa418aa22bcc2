"""The folder of a run that is started without --workdir."""

import pathlib

import pytest

import ctl
from ctl.loop.workdir import choose_folder, name_values

FOLDER = pathlib.Path("runs/exp")
RATE = ("optimizer.learning_rate", "0.5")


def make_config(**changes):
    return ctl.config(trainer="a.py:A", data=dict(global_batch_size=4), **changes)


def choose(*changes, starts_run=True, **values):
    return str(choose_folder(FOLDER, make_config(**values), changes, starts_run=starts_run))


@pytest.fixture
def start_run(tmp_path, monkeypatch):
    """Creates a folder with the config of a run."""
    monkeypatch.chdir(tmp_path)

    def start(folder="runs/exp", **changes):
        pathlib.Path(folder).mkdir(parents=True)
        config = make_config(**changes).to_json()
        pathlib.Path(folder, "config.json").write_text(config)

    return start


def test_first_run_has_the_folder_of_the_experiment(start_run):
    assert choose(RATE, optimizer=dict(learning_rate=0.5)) == "runs/exp"


def test_run_with_another_value_has_a_folder_of_its_own(start_run):
    start_run(optimizer=dict(learning_rate=0.1))
    assert choose() == "runs/exp"
    changed = "runs/exp.learning_rate=0.5"
    assert choose(RATE, optimizer=dict(learning_rate=0.5)) == changed
    # It resumes there, also when the first run has been deleted.
    start_run(changed, optimizer=dict(learning_rate=0.5))
    assert choose(RATE, optimizer=dict(learning_rate=0.5)) == changed
    pathlib.Path("runs/exp/config.json").unlink()
    assert choose(RATE, optimizer=dict(learning_rate=0.5)) == changed


def test_run_with_the_same_value_is_resumed(start_run):
    start_run(optimizer=dict(learning_rate=0.5))
    assert choose(RATE, optimizer=dict(learning_rate=0.5)) == "runs/exp"


@pytest.mark.parametrize(
    ("key", "value", "values"),
    [
        ("train.steps", "2000", dict(train=dict(steps=2000))),
        ("runtime.xla", "off", dict(runtime=dict(xla="off"))),
    ],
)
def test_change_that_keeps_the_updates_resumes_the_run(start_run, key, value, values):
    start_run()
    assert choose((key, value), **values) == "runs/exp"


def test_change_of_the_file_is_not_one_of_the_command_line(start_run):
    start_run()
    values = dict(optimizer=dict(learning_rate=0.5), seed=3)
    assert choose(RATE, **values) == "runs/exp"  # where the change of the seed is reported


def test_evaluation_reads_the_run_with_the_same_values(start_run):
    values = dict(optimizer=dict(learning_rate=0.5))
    assert choose(RATE, starts_run=False, **values) == "runs/exp"
    start_run()
    assert choose(RATE, starts_run=False, **values) == "runs/exp.learning_rate=0.5"
    # It may be of other data.
    assert choose(("data.overfit_batches", "2"), starts_run=False) == "runs/exp"


def test_spelling_and_order_of_the_changes_do_not_matter(start_run):
    start_run()
    values = dict(optimizer=dict(learning_rate=0.5), seed=3)
    seed = ("seed", "3")
    expected = "runs/exp.learning_rate=0.5,seed=3"
    assert choose(RATE, seed, **values) == expected
    assert choose(seed, ("optimizer.learning_rate", "5e-1"), **values) == expected


def test_allowed_change_continues_the_run_of_the_experiment(start_run):
    start_run()
    values = dict(optimizer=dict(learning_rate=0.5))
    config = make_config(**values)
    assert choose_folder(FOLDER, config, [RATE], starts_run=True, allow_change=True) == FOLDER
    start_run("runs/exp.learning_rate=0.5", **values)
    chosen = choose_folder(FOLDER, config, [RATE], starts_run=True, allow_change=True)
    assert str(chosen) == "runs/exp.learning_rate=0.5"  # which the same command resumes without it


def test_damaged_folder_is_left_to_the_check_of_the_folder(start_run):
    start_run()
    pathlib.Path("runs/exp/config.json").write_text("{")
    assert choose(RATE, optimizer=dict(learning_rate=0.5)) == "runs/exp"


def test_name_is_safe_for_file_systems_and_unique():
    assert name_values({"a.b": "0.1", "c": "x"}) == "b=0.1,c=x"
    assert name_values({"a.b": "1", "c.b": "2"}) == "a.b=1,c.b=2"
    assert (
        name_values({"a": "x/y"}).startswith("a=x_y-") and len(name_values({"a": "9" * 500})) < 120
    )
    assert name_values({"a": "x/y"}) != name_values({"a": "x:y"})
