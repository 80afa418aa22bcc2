"""The declarations of the config keys."""

import pytest

from ctl.configs import keys, overrides

DEFAULTS = overrides.flatten(keys.defaults())


def test_default_values_are_allowed():
    keys.check_values(DEFAULTS)


def test_each_call_returns_a_new_config():
    config = keys.defaults()
    config.train.steps = 5
    config.model.units = 5  # it is not locked
    config.summaries.writers.append("wandb")
    assert overrides.flatten(keys.defaults()) == DEFAULTS


def test_each_key_is_declared_once_and_described_by_a_sentence():
    assert len(keys.BY_NAME) == len(keys.KEYS)
    assert DEFAULTS.keys() == {
        key.name for key in keys.KEYS if key.default != {} and not key.optional
    }
    assert [key.name for key in keys.KEYS if not key.is_section and key.text[-1:] != "."] == []


@pytest.mark.parametrize(
    ("name", "type_name"),
    [
        ("seed", "integer"),
        ("optimizer.decay_steps", "duration"),
        ("eval.splits", "list"),
        ("eval.before_training", "boolean"),
        ("optimizer.learning_rate", "number"),
        ("data.dir", "string"),
        ("model", "free section"),
        ("optimizer.shard_state", "boolean or string"),
    ],
)
def test_type_of_a_key_is_that_of_its_default(name, type_name):
    assert keys.BY_NAME[name].type == type_name


def test_key_has_the_mark_of_its_sections():
    assert keys.is_harmless("train.best.metric") and keys.is_harmless("train.of_an_older_version")
    assert keys.is_harmless("runtime.xla") and not keys.is_harmless("runtime.precision")
    assert not keys.is_harmless("model.units")
