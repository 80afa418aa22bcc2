"""The runs of a sweep: values, names, and rejected ones."""

import pytest

from ctl.errors import UsageError
from ctl.modes.sweep import settings
from tests.support import experiments


@pytest.fixture(autouse=True)
def experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.CONFIG})


def make(*sweeps, changes=()):
    return settings.make_runs("experiment.py", list(changes), list(sweeps))


def test_runs_are_the_product_of_the_values_in_order():
    runs = make("optimizer.learning_rate=1e-3,3e-3", "data.global_batch_size=2,4")
    assert [run.name for run in runs] == [
        "learning_rate=1e-3,global_batch_size=2", "learning_rate=1e-3,global_batch_size=4",
        "learning_rate=3e-3,global_batch_size=2", "learning_rate=3e-3,global_batch_size=4",
    ]  # fmt: skip
    assert runs[3].values == {"optimizer.learning_rate": "3e-3", "data.global_batch_size": "4"}
    assert len({run.fingerprint for run in runs}) == 4


def test_values_may_contain_commas_in_brackets_and_quotes():
    (first, second) = make("optimizer.weight_decay_exclude=['a','b'],[]", changes=[
        ("optimizer.weight_decay", "0.1")])  # fmt: skip
    assert first.values == {"optimizer.weight_decay_exclude": "['a','b']"}
    assert second.values == {"optimizer.weight_decay_exclude": "[]"}
    # The folder's name has no character that a shell or a file system treats specially.
    assert first.name.startswith("weight_decay_exclude=__a_,_b__-")


def test_name_depends_on_the_values_only_and_fingerprint_on_the_complete_config():
    (one,), (other,) = make("seed=1"), make("seed=1", changes=[("train.steps", "7")])
    assert one.name == other.name == "seed=1"
    assert one.fingerprint != other.fingerprint


def test_keys_with_the_same_last_part_are_written_out():
    (run,) = make("train.best.metric=eval/loss", "train.best.mode=min")
    assert run.name.startswith("metric=eval_loss,mode=min-")
    (run,) = make("data.global_batch_size=4", "eval.global_batch_size=8")
    assert run.name == "data.global_batch_size=4,eval.global_batch_size=8"


def test_get_sweep_returns_lists_of_values_or_runs():
    product = 'def get_sweep():\n    return {"seed": [1, 2], "eval.before_training": [True]}\n'
    experiments.write(".", {"experiment.py": experiments.CONFIG + product})
    runs = make("get_sweep")
    assert [run.name for run in runs] == [
        "seed=1,before_training=true", "seed=2,before_training=true",
    ]  # fmt: skip
    listed = 'def get_sweep():\n    return [{"seed": 1}, {"seed": 5, "train.steps": 7}]\n'
    experiments.write(".", {"experiment.py": experiments.CONFIG + listed})
    assert [run.name for run in make("get_sweep")] == ["seed=1", "seed=5,steps=7"]


@pytest.mark.parametrize(
    ("sweeps", "message"),
    [
        (["seed"], "--sweep is 'seed', but must be KEY=VALUE,VALUE"),
        (["seed=1,,2"], "--sweep is 'seed=1,,2', but must be KEY=VALUE,VALUE"),
        (["seed="], "but must be KEY=VALUE,VALUE"),
        (["sed=1,2"], "There is no config key sed: did you mean seed?"),
        (["seed=1,x"], "seed is 'x', but must be an integer"),
        (
            ["optimizer.learning_rate=1e-3,-1"],
            "optimizer.learning_rate is -1.0, but must be a finite",
        ),
        (["seed=1", "seed=2"], "--sweep names a key twice"),
        (["optimizer.learning_rate=1e-3,0.001"], "are the same run: remove one"),
        (["get_sweep"], r"has no get_sweep\(\): define one that returns a dict of lists"),
        (["get_sweep", "seed=1"], "--sweep=get_sweep cannot be combined"),
    ],
)
def test_mistake_is_one_line(sweeps, message):
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        make(*sweeps)


@pytest.mark.parametrize("value", ["None", "{}", "{'seed': 5}", "[5]", "{'seed': []}", "1/0"])
def test_get_sweep_must_return_settings(value):
    text = f"{experiments.CONFIG}def get_sweep():\n    return {value}\n"
    experiments.write(".", {"experiment.py": text})
    with pytest.raises(UsageError, match=r"get_sweep\(\)"):
        make("get_sweep")
