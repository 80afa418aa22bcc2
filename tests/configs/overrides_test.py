"""Setting the keys of a config. The messages of failures: mistakes_test.py."""

from ml_collections import config_dict
import numpy as np
import pytest

import ctl
from ctl import errors
from ctl.configs import keys, overrides
from ctl.errors import UsageError
from tests.support import child

KEYS = overrides.flatten(keys.defaults())


def test_config_is_the_defaults_with_the_changes_of_the_experiment():
    train = config_dict.ConfigDict({"steps": 5})
    optimizer = dict(clip=dict(norm=1.0))
    config = ctl.config(trainer="net.py:Net", train=train, optimizer=optimizer, model=None)
    changed = {"trainer": "net.py:Net", "train.steps": 5, "optimizer.clip.norm": 1.0}
    assert overrides.flatten(config) == KEYS | changed


def test_config_is_locked_in_every_section():
    config = ctl.config(model=dict(head=dict(units=5)))
    sections = [config, config.train, config.optimizer.clip, config.model, config.model.head]
    assert [section.is_locked for section in sections] == [True] * 5
    with pytest.raises(AttributeError, match="stps"):
        config.train.stps = 5


def test_model_takes_any_keys_and_sections():
    config = ctl.config(model=dict(units=5, head=dict(rate=0.5), sizes=[1, 2]))
    assert config.model.to_dict() == {"units": 5, "head": {"rate": 0.5}, "sizes": [1, 2]}


@pytest.mark.parametrize("model", [[], 0, print])
def test_empty_or_other_value_is_not_a_section_of_the_model(model):
    with pytest.raises(UsageError, match=r"model is .*, but must be a section: model=dict"):
        ctl.config(model=model)


@pytest.mark.parametrize("text", ["(" * 3000, "[" * 99_999, "-" * 9999 + "1", "{[]: 1}"])
def test_text_that_python_cannot_parse_is_rejected(text):
    with pytest.raises(UsageError, match=r"runtime\.devices is .*, but must be a list"):
        overrides.change(keys.defaults(), "runtime.devices", text)


@pytest.mark.parametrize("value", [1, np.float64(1.0)])
def test_number_is_converted_to_a_float_of_python(value):
    rate = ctl.config(optimizer=dict(learning_rate=value)).optimizer.learning_rate
    assert (rate, type(rate)) == (1.0, float)


def test_key_that_is_not_a_string_is_reported():
    with pytest.raises(UsageError, match=r"There is no config key train\.5"):
        ctl.config(train={5: 1})


def test_flatten_names_every_value_by_its_path():
    config = {"seed": 1, "train": {"steps": 5}, "model": {"head": {"units": (2, 3)}, "no": {}}}
    flat = {"seed": 1, "train.steps": 5, "model.head.units": (2, 3)}
    assert overrides.flatten(config) == flat
    assert overrides.flatten(config_dict.ConfigDict(config)) == flat


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("data.prefetch", "-1", -1),
        ("train.steps", "1_000", 1000),
        ("train.steps", "2 epochs", "2 epochs"),
        ("data.dir", "a=b, c", "a=b, c"),
        ("data.dir", "", ""),
        ("data.dir", "5", "5"),
        ("runtime.deterministic", None, True),
        ("runtime.deterministic", "True", True),
        ("runtime.deterministic", "0", False),
        ("model.head.rate", "1", 1.0),
        ("model.sizes", "[3, 4, 5]", [3, 4, 5]),
        ("model.shape", "[3]", (3,)),
        ("model.nothing", "relu", "relu"),
        ("model.nothing", "[1]", [1]),
    ],
)
def test_change_parses_a_text_by_the_type_of_the_key(name, text, value):
    head = dict(rate=0.5)
    model = dict(units=5, head=head, sizes=[1, 2], shape=(1, 2), nothing=None)
    config = ctl.config(model=model)
    before = overrides.flatten(config)
    overrides.change(config, name, text)
    assert overrides.flatten(config) == before | {name: value}
    assert type(overrides.flatten(config)[name]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("model.sizes", "3", r"model\.sizes is '3', but must be a list, such as \[1, 2\]\."),
        (
            "model.sizes",
            "'64'",
            r"model\.sizes is \"'64'\", but must be a list, such as \[1, 2\]\.",
        ),
        ("summaries.writers", "wandb", r"must be a list, such as \['tensorboard', 'jsonl'\]\."),
        ("model.shape", "x", r"model\.shape is 'x', but must be a tuple, such as \(1, 2\)\."),
        ("runtime.fused_attention", "off", r"fused_attention: it is now runtime\.kernels\."),
        (
            "data.overfit_batches",
            "2",
            r"no config key data\.overfit_batches any more: run ctl chec",
        ),
        ("model.other", "5", r"There is no config key model\.other: expected one of model\.head, "),
    ],
)
def test_change_rejects(name, text, line):
    config = ctl.config(model=dict(head=dict(rate=0.5), sizes=[1, 2], shape=(1, 2)))
    with pytest.raises(UsageError, match=line):
        overrides.change(config, name, text)


KEY = "optimizer.shard_state"


def test_a_boolean_or_text_is_one_of_its_choices():
    for value in (True, "gradients"):
        config = ctl.config(optimizer=dict(shard_state=value))
        assert config.optimizer.shard_state is value
    for text, parsed in (("true", True), ("gradients", "gradients"), ("0", False), (None, True)):
        overrides.change(config, KEY, text)
        assert config.optimizer.shard_state is parsed


def test_another_text_is_rejected_with_the_choices():
    for call in (
        lambda: ctl.config(optimizer=dict(shard_state="gradient")),
        lambda: overrides.change(ctl.config(), KEY, "gradient"),
        lambda: ctl.TrainerOptions(shard_state="gradient"),
    ):
        with pytest.raises(UsageError, match="is 'gradient': did you mean gradients"):
            call()
    with pytest.raises(UsageError, match=f"{KEY} is 1, but must be true or false"):
        ctl.config(optimizer=dict(shard_state=1))


def test_attribute_that_does_not_exist_has_a_default():
    config = ctl.config(model=dict(head=dict(rate=0.5)))
    assert getattr(config.model.head, "size", 3) == 3 and not hasattr(config.train, "stps")
    with pytest.raises(AttributeError, match=r"no config key train\.stps: did you mean"):
        config.train.stps  # noqa: B018


def test_values_whose_repr_fails_or_has_an_address_are_shown_by_their_name_or_type():
    class Broken:
        def __repr__(self):
            raise ZeroDivisionError

    values = ["a", print, child.run, dict, errors, object(), 10**5000, Broken()]
    assert ", ".join(map(errors.show_value, values)) == (
        "'a', the function print, the function run, the class dict, the module ctl.errors, an object, "
        "an int, a Broken"
    )
    with pytest.raises(UsageError, match=r"train\.steps .*integer"):
        ctl.config(train=dict(steps=Broken()))
