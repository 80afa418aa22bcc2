"""The reference of the config keys."""

import pytest

from ctl.configs import defaults, overrides
from ctl.configs.reference import config_keys

KEYS = {key.name: key for key in config_keys()}


def test_each_key_is_described():
    assert KEYS.keys() == overrides.flatten(defaults.defaults()).keys()
    assert [name for name, key in KEYS.items() if not key.text] == []


@pytest.mark.parametrize(
    ("name", "type_name", "default", "text"),
    [
        ("seed", "integer", "0", "Determines the initial weights, "),  # above the line
        ("train.best.keep", "integer", "1", "the number of checkpoints"),  # at its end
        ("optimizer.decay_steps", "duration", "0", "Updates of the decay after the warm-up"),
        (
            "eval.splits",
            "list",
            "['eval']",
            "The splits that build_dataset is asked for; [] for an",
        ),
        ("train.norms", "boolean", "False", "Log the global norms"),
        ("optimizer.learning_rate", "number", "0.001", "the highest rate"),
    ],
)
def test_key_has_the_text_of_its_comment(name, type_name, default, text):
    key = KEYS[name]
    assert (key.type, key.default) == (type_name, default)
    assert key.text.startswith(text)
