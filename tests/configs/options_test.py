"""A trainer's options."""

import dataclasses

import pytest

from ctl.configs import options
from ctl.errors import UsageError


def section():
    return options.Section({"units": 5, "head": {"rate": 0.5, "bias": True}}, "model")


def test_section_gives_values_by_attribute_and_by_key():
    assert section().units == section()["units"] == 5
    assert section().head.rate == section()["head"]["rate"] == 0.5


def test_section_is_a_mapping():
    assert dict(section().head) == {"rate": 0.5, "bias": True}
    assert list(section()) == ["units", "head"]
    assert len(section()) == 2
    assert ("units" in section(), "unit" in section()) == (True, False)


def test_section_names_the_key_that_is_not_there():
    with pytest.raises(
        UsageError, match=r"no key model\.head\.rat: did you mean model\.head\.rate\?"
    ):
        section().head.rat  # noqa: B018
    with pytest.raises(UsageError, match=r"no key model\.unit: did you mean model\.units\?"):
        section()["unit"]
    with pytest.raises(UsageError, match=r"no key data\.dir: the section is empty"):
        options.Section({}, "data").dir  # noqa: B018


def test_key_that_may_be_missing_can_have_a_default():
    assert section().get("units", 7) == 5
    assert section().get("layers", 7) == 7
    assert section().get("layers") is None
    assert getattr(section(), "layers", 7) == 7
    assert not hasattr(section(), "layers")


def test_section_can_not_be_changed():
    with pytest.raises(TypeError):
        section()["units"] = 6


def test_section_knows_the_keys_that_nobody_read():
    model = section()
    assert model.unread() == ["model.units", "model.head.rate", "model.head.bias"]
    model.units  # noqa: B018
    model.head["bias"]
    model.get("layers")
    assert model.unread() == ["model.head.rate"]
    dict(model.head)
    assert model.unread() == []


def test_asking_whether_a_key_is_there_does_not_read_it():
    model = section()
    assert "units" in model
    assert "model.units" in model.unread()


@pytest.mark.parametrize(
    ("clip", "words"),
    [
        (options.Clip(), "none"),
        (options.Clip(global_norm=1.5), "by global norm 1.5, after the reduction"),
        (options.Clip(norm=2.0), "by norm 2, after the reduction"),
        (options.Clip(value=0.5), "by value 0.5, after the reduction"),
    ],
)
def test_clip_says_what_it_is(clip, words):
    assert str(clip) == words


@pytest.mark.parametrize("bound", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("rule", ["global_norm", "norm", "value"])
def test_clip_bound_is_a_positive_number(rule, bound):
    with pytest.raises(UsageError, match=f"Clip {rule} is {bound}, want"):
        options.Clip(**{rule: bound})


def test_clip_has_one_rule():
    with pytest.raises(
        UsageError, match="Clip by one rule, not by norm and value: set one of them"
    ):
        options.Clip(norm=1.0, value=1.0)


def test_trainer_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.TrainerOptions().seed = 1  # type: ignore[misc]


def test_trainer_options_make_sections_of_mappings():
    made = options.TrainerOptions(data={"dir": "here"}, model=section())
    assert made.data.dir == "here"
    assert made.model.head.rate == 0.5
    assert made.data.unread() == []


def test_trainer_options_name_their_sections():
    with pytest.raises(
        UsageError, match=r"The config has no key data\.dri: did you mean data\.dir"
    ):
        options.TrainerOptions(data={"dir": ""}).data.dri  # noqa: B018


@pytest.mark.parametrize("count", [0, -1])
def test_accumulation_is_at_least_one_micro_batch(count):
    with pytest.raises(UsageError, match=f"gradient_accumulation_steps is {count}, want 1 or more"):
        options.TrainerOptions(gradient_accumulation_steps=count)
