"""From the config to actions."""

import pytest

import ctl
from ctl.loop.actions import registry
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


STOPPING = "ctl.loop.actions.stopping:EarlyStopping"


@pytest.fixture
def make(tmp_path):
    experiments.write(tmp_path, {"mine.py": MINE})

    def build(**keys):
        path, workdir = str(tmp_path / "experiment.py"), Workdir(tmp_path, writes=False)
        return registry.make_actions(ctl.config(**keys), path, workdir=workdir)

    return build


def test_every_row_makes_its_action(make, tmp_path):
    metric = dict(metric="eval/loss", mode="min")
    best = dict(**metric, patience=2, target=0.1, restore=True)
    plateau = dict(schedule="plateau", schedule_arguments=dict(**metric, factor=0.5))
    keys = dict(
        summaries=dict(histogram_interval=10), optimizer=plateau, actions=["mine.py:Mine"],
        train=dict(best=best, max_duration="1 hour", export="best"),
    )  # fmt: skip
    assert make() == []
    made = make(**keys)
    assert type(made[6]).__name__ == "Mine"
    assert made[1]._restore_at_end and made[3]._patience == 2
    made += registry.make_watching(ctl.config(**keys), Workdir(tmp_path, writes=False))
    rows = [*(row or "mine:Mine" for row in registry.CONFIGURED.values()), *registry.WATCHING]
    assert [type(each).__name__ for each in made] == [row.partition(":")[2] for row in rows]
    assert {each.at for each in made[8:]} == {"train"}  # a run repeats evaluations for the others


def test_names_modules_files_arguments_and_options(make):
    actions = make(
        actions=[
            {"name": "mine.py:Mine", "every": 5, "at": "train", "everywhere": True},
            "mine.py:make_printer",
            {"name": "orbit.actions:NewBestMetric", "metric": "accuracy"},
            {"name": STOPPING, "metric": "eval/loss", "mode": "min"},
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
        ("no_module.a:Mine", r"actions\[0\] is .*, but there is no module no_module"),
        ({"name": "mine.py:Mine", "evry": 5}, r"actions\[0\] .* fails .*keyword argument 'evry'"),
        ("mine.py:make_nothing", r"actions\[0\] .* does not return an action"),
        ("mine.py:VALUE", r"actions\[0\] is 'mine.py:VALUE', which is an int: name a class"),
        ({"name": STOPPING, "metric": "loss", "mode": "min"}, "must be eval/NAME"),
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
