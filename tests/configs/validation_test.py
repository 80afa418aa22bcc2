"""What a config may be. The lines for what it may not be: mistakes_test.py."""

import math

from ml_collections import config_dict
import pytest

import ctl
from ctl.configs import defaults, overrides, validation
from ctl.errors import UsageError


def right(**changes):
    """A config that is right, with sections changed."""
    data = dict(global_batch_size=4) | changes.pop("data", {})
    return ctl.config(**(dict(trainer="net.py:Net") | changes), data=data)


@pytest.mark.parametrize("name", ["net.py:Net", "a/b c/net.py:Net", "net:Net", "a.b.net:Net"])
def test_trainer_may_be(name):
    validation.check_config(right(trainer=name))


@pytest.mark.parametrize(
    "name", ["net", "net.py", "net.py:", ":Net", "net.py:a.b", "a/net:Net", "a..b:Net"]
)
def test_trainer_may_not_be(name):
    with pytest.raises(UsageError, match=r"want path/to/file\.py:Class or package\.module:Class"):
        validation.check_config(right(trainer=name))


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rmsprop", "adagrad", "lion"])
def test_optimizer_may_be(name):
    validation.check_config(right(optimizer=dict(name=name)))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("runtime", "strategy", "one_device"),
        ("runtime", "strategy", "mirrored"),
        ("runtime", "precision", "float64"),
        ("runtime", "precision", "bfloat16"),
        ("runtime", "precision", "float16"),
        ("runtime", "xla", "off"),
        ("runtime", "xla", "step"),
        ("runtime", "xla", "gradients"),
        ("runtime", "xla", "autocluster"),
        ("runtime", "logical_shards", 4),
        ("runtime", "all_reduce", dict(dtype="bfloat16")),
        ("runtime", "logical_devices", 4),
        ("data", "prefetch", -1),
        ("data", "prefetch", 0),
        ("train", "steps", 1),
        ("train", "steps", 2**31 - 1),
        ("train", "checkpoint_interval", 0),
        ("eval", "interval", 0),
        ("eval", "global_batch_size", 1),
        ("optimizer", "learning_rate", 1e-300),
        ("optimizer", "learning_rate", 100.0),
        ("optimizer", "gradient_accumulation_steps", 1),
        ("optimizer", "learning_rate_batch_size", 256),
    ],
)
def test_value_may_be(section, key, value):
    validation.check_config(right(**{section: {key: value}}))


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_seed_may_be_what_numpy_takes(seed):
    validation.check_config(right(seed=seed))


@pytest.mark.parametrize(
    "optimizer",
    [
        dict(name="sgd", momentum=0.9),
        dict(name="sgd", momentum=0.9, nesterov=True),
        dict(name="rmsprop", momentum=0.999),
        dict(schedule="cosine"),
        dict(schedule="cosine", warmup_steps=999),
        dict(schedule="cosine", warmup_steps=10, decay_steps=5000),
        dict(clip=dict(value=0.5)),
    ],
)
def test_optimizer_options_may_go_together(optimizer):
    validation.check_config(right(optimizer=optimizer))


def test_per_replica_batch_size_will_do():
    validation.check_config(right(data=dict(global_batch_size=0, per_replica_batch_size=4)))


@pytest.mark.parametrize(
    "model",
    [
        dict(units=5, rate=0.5, name="a", bias=True, nothing=None),
        dict(sizes=[1, 2.5, None], shape=(3, (4, 5)), head=dict(layers=[dict(units=5)])),
    ],
)
def test_model_may_hold_what_json_can(model):
    validation.check_config(right(model=model))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (math.inf, "model.x is inf"),
        ((1.0, math.nan), r"model.x\[1\] is nan"),
        (dict(y=dict(z=math.nan)), "model.x.y.z is nan"),
        ([dict(y=math.nan)], r"model.x\[0\].y is nan"),
        ({1, 2}, "model.x is a set"),
        (b"bytes", "model.x is a bytes"),
    ],
)
def test_model_may_not_hold(value, name):
    with pytest.raises(UsageError, match=name):
        validation.check_config(right(model=dict(x=value)))


def test_whole_number_for_a_number_passes_in_a_bare_config_dict():
    values = right().to_dict()
    values["optimizer"]["learning_rate"] = 1
    validation.check_config(config_dict.ConfigDict(values))


@pytest.mark.parametrize("name", overrides.flat(defaults.defaults()))
def test_every_key_must_be_there(name):
    values = right().to_dict()
    *path, last = name.split(".")
    section = values
    for part in path:
        section = section[part]
    del section[last]
    with pytest.raises(UsageError, match=f"The config has no {name}: "):
        validation.check_config(config_dict.ConfigDict(values))


@pytest.mark.parametrize(("value", "words"), [(None, "None"), ({}, "a dict"), (5, "an int")])
def test_config_must_be_a_config_dict(value, words):
    with pytest.raises(UsageError, match=f"get_config returned {words}: let it return"):
        validation.check_config(value)


def test_values_of_the_defaults_pass_one_by_one():
    validation.check_values(overrides.flat(defaults.defaults()))


def looped():
    found = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([10**5000], r"model.a\[0\] is a number of 5001 digits, want fewer than 100"),
        ([{(1, 2): 3}], r"model.a\[0\] has the key \(1, 2\), want strings as keys"),
        ([{1: 2}], r"model.a\[0\] has the key 1, want strings as keys"),
        ([config_dict.ConfigDict({"b": 1})], r"model.a\[0\] is a ConfigDict: want numbers"),
        (looped(), r"model.a\[0\]\[0\].*goes on for more than 50 sections or lists in each other"),
    ],
)
def test_model_value_that_the_workdir_cannot_keep(value, says):
    with pytest.raises(UsageError, match=says):
        validation.check_config(right(model=dict(a=value)))


def test_number_of_thousands_of_digits_is_told():
    with pytest.raises(
        UsageError, match=r"train\.steps is a number of 5001 digits, want 2147483647"
    ):
        validation.check_config(right(train=dict(steps=10**5000)))


def test_section_in_itself_is_told():
    config = right()
    loop = {}
    loop["a"] = loop
    config.model = loop
    with pytest.raises(UsageError, match="a section or a list that holds itself"):
        validation.check_config(config)


def test_config_without_a_model_section_is_told():
    for replaced in (False, True):
        config = right().unlock()
        del config["model"]
        if replaced:
            config.model = None
        with pytest.raises(UsageError, match="The config has no section model"):
            validation.check_config(config)


def test_value_that_cannot_be_shown_is_named_by_its_type():
    class Odd:
        def __repr__(self):
            raise ZeroDivisionError

    with pytest.raises(UsageError, match=r"train\.steps is an Odd, want a whole number"):
        right(train=dict(steps=Odd()))


def test_device_that_cannot_be_shown_is_named_by_its_type():
    with pytest.raises(UsageError, match=r"runtime\.devices has an int, want names"):
        validation.check_config(right(runtime=dict(devices=[10**5000])))
