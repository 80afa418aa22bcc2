"""The default config."""

import pytest

from ctl.configs import defaults, overrides, values

KEYS = overrides.flatten(defaults.defaults())


def test_default_values_are_allowed():
    values.check_values(KEYS)


def test_each_call_returns_a_new_config():
    defaults.defaults().train.steps = 5
    assert defaults.defaults().train.steps == KEYS["train.steps"]


def test_config_is_unlocked():
    config = defaults.defaults()
    config.model.units = 5
    assert config.model.units == 5


@pytest.mark.parametrize("name", defaults.HARMLESS)
def test_harmless_name_is_a_key_or_a_section(name):
    assert name in KEYS or (name.endswith(".") and any(key.startswith(name) for key in KEYS))
