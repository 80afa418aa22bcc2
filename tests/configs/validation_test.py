"""Checks of a complete config. The messages of failures: mistakes_test.py."""

import functools
import math
import operator

from ml_collections import config_dict
import pytest

import ctl
from ctl.configs import keys, overrides, validation
from ctl.errors import UsageError

KEYS = overrides.flatten(keys.defaults())


def valid(**changes):
    """A valid config, with sections changed."""
    data = dict(global_batch_size=4) | changes.pop("data", {})
    return ctl.config(**(dict(trainer="net.py:Net") | changes), data=data)


JSONL = dict(writers=["jsonl"])
KEPT = dict(checkpoint_keep_every=5)
BEST = dict(metric="eval/accuracy", mode="max")


@pytest.mark.parametrize(
    "changes",
    [
        *(dict(trainer=t) for t in ("net.py:Net", "a/b c/net.py:Net", "net:Net", "a.b.net:Net")),
        dict(optimizer=dict(name="rmsprop", momentum=0.999)),
        dict(optimizer=dict(schedule="cosine", warmup_steps=999)),
        dict(optimizer=dict(schedule="cosine", warmup_steps=10, decay_steps=5000)),
        dict(optimizer=dict(clip=dict(value=0.5))),
        dict(data=dict(global_batch_size=0, per_replica_batch_size=4)),
        dict(model=dict(units=5, rate=0.5, name="a", bias=True, nothing=None)),
        dict(model=dict(sizes=[1, 2.5, None], shape=(3, (4, 5)), head=dict(x=[dict(units=5)]))),
        dict(init=dict(models=dict(teacher="runs/a"))),
        dict(train=dict(best=dict(BEST, keep=3, patience=2, restore=True)), eval=dict(interval=5)),
        dict(train=dict(best=dict(BEST, metric="eval/test/accuracy"))),
    ],
)
def test_config_is_accepted(changes):
    validation.check_config(valid(**changes))
    values = valid(**changes).to_dict()
    values["optimizer"]["learning_rate"] = 1  # an integer for a number
    validation.check_config(config_dict.ConfigDict(values))


RECURSIVE = []
RECURSIVE.append(RECURSIVE)
NOT_TRAINERS = ("net", "net.py", "net.py:", ":Net", "net.py:a.b", "a/net:Net", "a..b:Net")
NOT_RUNS = ("", 5, None, ["runs/a"])
NOT_JSON = [
    (math.inf, "model.x is inf"),
    ((1.0, math.nan), r"model.x\[1\] is nan"),
    (dict(y=dict(z=math.nan)), "model.x.y.z is nan"),
    ([dict(y=math.nan)], r"model.x\[0\].y is nan"),
    ({1, 2}, "model.x is a set"),
    (b"bytes", "model.x is a bytes"),
    ([10**5000], r"model.x\[0\] is a number of 5001 digits, but must have at most 99"),
    ([{(1, 2): 3}], r"model.x\[0\] has the key \(1, 2\), but its keys must be strings"),
    ([config_dict.ConfigDict()], r"model.x\[0\] is a ConfigDict, but the workdir can store only"),
    (RECURSIVE, r"model.x\[0\]\[0\].*has more than 50 nested sections or lists, or contains"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *((dict(trainer=t), r"but must be path/to/file\.py:Class or") for t in NOT_TRAINERS),
        *((dict(model=dict(x=value)), message) for value, message in NOT_JSON),
        *((dict(init=dict(models=dict(a=x))), "init.models.a is .* a run's") for x in NOT_RUNS),
        (dict(train=dict(best=dict(mode="max"))), "best.mode has no effect without train.best"),
        (dict(train=dict(best=dict(keep=2))), "best.keep has no effect without train.best.metric"),
        (dict(train=dict(best=dict(BEST, mode="high"))), "train.best.mode is 'high'"),
        (dict(train=dict(best=dict(BEST, metric="train/loss"))), "must be the name of a metric of"),
        (dict(train=dict(best=dict(BEST, keep=0))), "train.best.keep is 0, but must be at least 1"),
        (dict(train=dict(best=dict(patience=5)), eval=dict(interval=5)), "patience has no effect"),
        (dict(summaries=dict(JSONL, histogram_interval=5)), "histogram_interval has no effect"),
        (dict(summaries=JSONL, train=dict(summary_interval=5)), "summary_interval has no effect"),
        (
            dict(train=dict(KEPT, checkpoint_interval=0)),
            "checkpoint_keep_every has no effect witho",
        ),
    ],
)
def test_config_is_rejected(changes, message):
    with pytest.raises(UsageError, match=message):
        validation.check_config(valid(**changes))


def test_section_that_contains_itself_is_reported():
    config = valid()
    loop = {}
    loop["a"] = loop
    config.model = loop
    with pytest.raises(UsageError, match="a section or a list that contains itself"):
        validation.check_config(config)


def test_missing_model_section_is_reported():
    config = valid().unlock()
    del config["model"]
    for _ in range(2):  # without it, and with None
        with pytest.raises(UsageError, match="The config has no section model"):
            validation.check_config(config)
        config.model = None


# Keys that accept any text.
FREE = {"data.dir", "init.checkpoint"}


def is_rejected(name, value):
    """Whether a valid config is rejected after one value is changed."""
    config = valid()
    *path, last = name.split(".")
    try:
        functools.reduce(operator.getitem, path, config)[last] = value
        validation.check_config(config)
    except UsageError as error:
        return last in str(error)
    return False


@pytest.mark.parametrize("name", KEYS)
def test_every_key_has_values_that_are_rejected(name):
    by_type = {
        bool: ["true"],
        str: [5] if name in FREE else ["?"],
        int: [-2, 2**33],
        float: [-1.0, float("nan"), float("inf")],
        list: [["CPU"], ["GPU:0", "GPU:0"], ["GPU:0", "CPU:0"], [5]],
    }
    own = {
        "actions": [["?"], [5], [{"every": 5}], [{"name": "a:B", "x": float("nan")}]],
        "summaries.writers": [["?"], [5], ["json"], ["jsonl", "jsonl"]],
        "train.profile": ["?", "5", "5:5", "9:5", "0:1001", "-1:5"],
        "data.cache": ["gs://bucket/run", "S3://a"],
        "train.local_dir": ["file:///run"],
        "eval.splits": [["a b"], ["../a"], ["test", "test"], [5], [""]],
    }
    for value in own.get(name, by_type[type(KEYS[name])]):
        assert is_rejected(name, value), value
