"""The options of a trainer, the config keys that set them, and the sections that it reads."""

import dataclasses
import functools
import math
import operator

import pytest

import ctl
from ctl.configs import options
from ctl.errors import UsageError
from tests.support import option_keys


def test_clip_is_another_form_of_three_options():
    created = ctl.TrainerOptions(clip=ctl.Clip(norm=1.5))
    assert created == ctl.TrainerOptions(clip_norm=1.5)
    assert dataclasses.replace(created, seed=1).clip_norm == 1.5
    assert dataclasses.replace(created, clip_norm=0.0) == ctl.TrainerOptions()
    with pytest.raises(UsageError, match=r"^clip_norm and clip_value are set: set one of them"):
        ctl.TrainerOptions(clip=ctl.Clip(norm=1.0, value=1.0))
    with pytest.raises(UsageError, match=r"^clip and clip_norm are set"):
        ctl.TrainerOptions(clip=ctl.Clip(value=1.0), clip_norm=1.0)


def test_trainer_options_are_frozen_and_convert_mappings_to_sections():
    created = options.TrainerOptions(data={"dir": "here"}, model={"head": {"rate": 0.5}})
    assert created.data.dir == "here"
    assert created.model.head.rate == 0.5
    assert created.data.unread() == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        created.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(precision="float8"), "precision is 'float8': did you mean float"),
        (dict(all_reduce_dtype="float16"), "all_reduce_dtype is 'float16': did you mean bfloat16?"),
        (dict(compression="float"), "compression is 'float': did you mean float16?"),
        (dict(loss_spike=0.5), "loss_spike is 0.5, but must be greater than 1, such as 3.0, or 0"),
        (dict(micro_batches=0), "micro_batches is 0, but must be at least 1."),
        (dict(clip=ctl.Clip(norm=-1.0)), "clip_norm is -1.0, but must be"),
        (dict(clip=ctl.Clip(norm=math.inf)), "clip_norm is inf, but must be"),
        (dict(placement="device"), "placement=device requires xla=loop, which reads examples"),
        (dict(loss_scale=8.0), "loss_scale has no effect without precision=float16: set loss_sca"),
        (dict(compression="float16", precision="float64"), "compression would undo precision="),
    ],
)
def test_messages_name_the_options_in_place_of_config_keys(changes, message):
    with pytest.raises(UsageError) as rejection:
        options.TrainerOptions(**changes)
    assert str(rejection.value).startswith(message)
    assert "\n" not in str(rejection.value)


def test_options_of_the_default_config_are_the_default_options():
    created = options.TrainerOptions.from_config(ctl.config())
    assert dict(created.data) == {"dir": ""}
    assert dataclasses.replace(created, data=options.TrainerOptions().data) == ctl.TrainerOptions()


@pytest.mark.parametrize("key", option_keys.KEYS, ids=operator.attrgetter("option"))
def test_from_config_reads_the_option_from_its_key(monkeypatch, key):
    monkeypatch.setattr(options, "check_rules", lambda values: None)  # some require others
    value = option_keys.other_value(key)
    config = ctl.config()
    *path, last = key.name.split(".")
    section = functools.reduce(getattr, path, config)
    with config.unlocked(), config.ignore_type():
        section.update({last: value})
    created = options.TrainerOptions.from_config(config)
    default = options.TrainerOptions.from_config(ctl.config())
    assert created == dataclasses.replace(default, **{key.option: value})
    assert created != default


def section():
    return options.Section({"units": 5, "head": {"rate": 0.5, "bias": True}}, "model")


def test_section_is_a_read_only_mapping_and_has_its_values_as_attributes():
    assert section().units == section()["units"] == 5
    assert dict(section().head) == {"rate": 0.5, "bias": True}
    assert len(section()) == 2
    assert ("units" in section(), "unit" in section()) == (True, False)
    with pytest.raises(TypeError):
        section()["units"] = 6


def test_section_reports_a_missing_key():
    with pytest.raises(UsageError, match=r"model\.head\.rat: did you mean model\.head\.rate"):
        section().head.rat  # noqa: B018
    with pytest.raises(UsageError, match=r"no key data\.dir: the section is empty"):
        options.Section({}, "data")["dir"]


def test_missing_key_may_have_a_default():
    assert section().get("units", 7) == 5
    assert section().get("layers", 7) == 7
    assert section().get("layers") is None
    assert getattr(section(), "layers", 7) == 7
    assert not hasattr(section(), "layers")


@pytest.mark.parametrize("key", ["items", "keys", "values", "get"])
def test_a_key_with_the_name_of_a_method_is_rejected(key):
    # The attribute would be the method, which is true and no number.
    with pytest.raises(UsageError, match=rf"model\.head\.{key}, but '{key}' is a method"):
        ctl.TrainerOptions(model={"head": {key: 3}})
    config = ctl.config(trainer="a.py:A", data=dict(global_batch_size=4), model={key: 3})
    with pytest.raises(UsageError, match=rf"model\.{key}, .* for example to model\.{key}_value\."):
        ctl.TrainerOptions.from_config(config)


def test_section_returns_the_keys_that_were_never_read():
    model = section()
    assert model.peek("units") is not None and model.peek("absent") is None and "units" in model
    assert model.unread() == ["model.units", "model.head.rate", "model.head.bias"]
    model.units  # noqa: B018
    model.head["bias"]
    model.get("layers")
    assert model.unread() == ["model.head.rate"]
    dict(model.head)
    assert model.unread() == []
