"""From the config to actions."""

import pytest

import ctl
from ctl.loop.actions import registry
from ctl.loop.actions.best_checkpoint import BestCheckpoint
from ctl.loop.actions.stopping import EarlyStopping
from ctl.loop.workdir import Workdir
from tests.support import experiments

MINE = """\
import ctl

class Mine(ctl.Action):
    def __init__(self, every=1):
        self.every = every

    def __call__(self, outputs):
        print(outputs)

def make_printer():
    return print

def make_nothing(): pass

VALUE = 3
"""


@pytest.fixture
def make(tmp_path):
    experiments.write(tmp_path, {"mine.py": MINE})

    def build(**keys):
        return registry.make_actions(
            ctl.config(**keys),
            str(tmp_path / "experiment.py"),
            workdir=Workdir(tmp_path, writes=False),
        )

    return build


def test_default_config_has_no_actions(make):
    assert make() == []


def test_sections_come_before_the_list_and_the_best_checkpoint_before_early_stopping(make):
    metric = {"metric": "eval/accuracy", "mode": "max"}
    actions = make(
        train={"best": {**metric, "patience": 2, "restore": True}},
        actions=["mine.py:Mine"],
    )
    assert [type(action) for action in actions[:2]] == [BestCheckpoint, EarlyStopping]
    assert type(actions[2]).__name__ == "Mine"
    assert actions[0]._restore_at_end and actions[1]._patience == 2


def test_every_row_makes_its_action(make, tmp_path):
    config = ctl.config(
        summaries={"histogram_interval": 10},
        optimizer={
            "schedule": "plateau",
            "schedule_arguments": {"metric": "eval/loss", "mode": "min", "factor": 0.5},
        },
        train={
            "best": {"metric": "eval/loss", "mode": "min", "patience": 2, "target": 0.1},
            "max_duration": "1 hour", "export": "best",
        },
    )  # fmt: skip
    workdir = Workdir(tmp_path, writes=False)
    made = [
        *registry.make_actions(config, "", workdir=workdir),
        *registry.make_watching(config, workdir),
    ]
    rows = [*filter(None, registry.CONFIGURED.values()), *registry.WATCHING]
    assert [f"{type(each).__module__}:{type(each).__name__}" for each in made] == rows
    assert {each.at for each in made[7:]} == {"train"}  # a run repeats evaluations for the others


def test_names_modules_files_arguments_and_options(make):
    actions = make(
        actions=[
            {"name": "mine.py:Mine", "every": 5, "at": "train", "everywhere": True},
            "mine.py:make_printer",
            {"name": "orbit.actions:NewBestMetric", "metric": "accuracy"},
            {
                "name": "ctl.loop.actions.stopping:EarlyStopping",
                "metric": "eval/loss",
                "mode": "min",
            },
        ]
    )
    mine, printer, orbit_action, stopping = actions
    assert (mine.every, mine.at, mine.everywhere) == (5, "train", True)
    assert printer.at == "eval" and orbit_action({"accuracy": 0.5})
    assert isinstance(stopping, EarlyStopping)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("mine.py:Other", r"actions\[0\] is 'mine.py:Other', but .*mine.py has no class Other"),
        ("none.py:Mine", r"actions\[0\] is 'none.py:Mine', but there is no "),
        (
            "no_module.a:Mine",
            r"actions\[0\] is 'no_module.a:Mine', but there is no module no_module",
        ),
        ({"name": "mine.py:Mine", "evry": 5}, r"actions\[0\] .* fails .*keyword argument 'evry'"),
        ("mine.py:make_nothing", r"actions\[0\] .* does not return an action"),
        ("mine.py:VALUE", r"actions\[0\] is 'mine.py:VALUE', which is an int: name a class"),
        (
            {"name": "ctl.loop.actions.stopping:EarlyStopping", "metric": "loss", "mode": "min"},
            "must be eval/NAME",
        ),
    ],
)
def test_mistakes_are_rejected_in_one_line(make, action, message):
    with pytest.raises(ctl.UsageError, match=message) as error:
        make(actions=[action])
    assert "\n" not in str(error.value)


def test_files_are_found_without_importing_them(tmp_path):
    experiments.write(tmp_path, {"mine.py": "class Mine: pass\nraise RuntimeError"})
    path = str(tmp_path / "experiment.py")
    registry.loading.find_action_files(["mine.py:Mine", "orbit.actions:NewBestMetric"], path)
    with pytest.raises(ctl.UsageError, match=r"actions\[1\] is 'm.py:Mine'"):
        registry.loading.find_action_files(["mine.py:Mine", {"name": "m.py:Mine"}], path)
