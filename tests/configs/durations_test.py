"""Durations with units are resolved to steps by hand-computed numbers."""

import pytest

import ctl
from ctl.configs import durations, overrides
from ctl.errors import UsageError


def resolve(examples=1000, batch=64, **changes):
    config = ctl.config(trainer="a.py:A", data=dict(global_batch_size=batch), **changes)
    return durations.resolve(config, examples_per_epoch=examples)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("90 epochs", 1407),  # 90 * 1000 / 64 = 1406.25
        ("0.5 epochs", 8),
        ("6401 examples", 101),
        ("5e6 examples", 78125),
        ("1_000steps", 1000),
        (77, 77),
    ],
)
def test_steps_of_a_duration(text, steps):
    assert resolve(train=dict(steps=text)).train.steps == steps


@pytest.mark.parametrize(("text", "value"), [("1e4", 10_000), ("1.5e3", 1500), ("-7", -7)])
def test_integer_may_be_written_with_an_exponent(text, value):
    assert durations.parse_integer(text) == value
    assert durations.from_text("train.steps", text) == value


@pytest.mark.parametrize("text", ["1.55e1", "1e-2", "1e999"])
def test_other_numbers_are_not_integers(text):
    with pytest.raises(ValueError):
        durations.parse_integer(text)


def test_step_until_which_a_group_is_frozen_is_resolved():
    texts = [dict(variables="a/*", frozen_until="2 epochs"), dict(variables="b", frozen=True)]
    groups = [*texts, dict(variables="c", frozen_until=5, learning_rate_scale=0.5)]
    steps = [dict(group) for group in resolve(optimizer=dict(groups=groups)).optimizer.groups]
    assert steps == [dict(variables="a/*", frozen_until=32), *groups[1:]]  # 31.25
    with pytest.raises(UsageError, match=r"groups\[0\].frozen_until is '2 epochs'"):
        resolve(examples=None, optimizer=dict(groups=groups))


def test_durations_of_the_optimizer_of_a_group_are_resolved():
    arguments = dict(boundaries=["1 epoch", 50], factors=[0.5, 0.1])
    optimizer = dict(warmup_steps="2 epochs", schedule_arguments=arguments)
    groups = [dict(variables="a/*", optimizer=optimizer)]
    (group,) = resolve(optimizer=dict(groups=groups)).optimizer.groups
    assert group["optimizer"]["warmup_steps"] == 32  # 31.25
    assert group["optimizer"]["schedule_arguments"]["boundaries"] == [16, 50]


def test_every_key_with_a_duration_is_resolved():
    texts = {
        "train.steps": ("10 epochs", 157),
        "train.steps_per_loop": ("640 examples", 10),
        "train.checkpoint_interval": ("2 epochs", 32),
        # 62.5, as a multiple of the checkpoint interval
        "train.checkpoint_keep_every": ("4 epochs", 64),
        "train.summary_interval": ("3 epochs", 47),
        "optimizer.warmup_steps": ("1 epoch", 16),
        "optimizer.decay_steps": ("8 epochs", 125),
        "eval.interval": ("1 epoch", 16),
    }
    boundaries = dict(boundaries=["30 epochs", 1000, "64000 examples"])
    config = ctl.config(optimizer=dict(schedule_arguments=boundaries))
    config.data.global_batch_size = 64
    for key, (text, _) in texts.items():
        overrides.change(config, key, text)
    resolved = durations.resolve(config, examples_per_epoch=1000)
    assert resolved.optimizer.schedule_arguments.boundaries == [469, 1000, 1000]
    values = overrides.flatten(resolved)
    assert {key: (texts[key][0], values[key]) for key in durations.ACCEPTS_TIME} == texts


def test_a_time_as_an_interval_stays_a_time():
    config = ctl.config(data=dict(global_batch_size=64))
    intervals = ("train.checkpoint_interval", "train.summary_interval", "eval.interval")
    for key in intervals:
        overrides.change(config, key, "1.5 hours")
    values = overrides.flatten(durations.resolve(config, examples_per_epoch=None))
    assert {durations.split_interval(values[key]) for key in intervals} == {(0, 5400.0)}
    assert durations.split_interval(7) == (7, 0.0)


def test_kept_checkpoints_in_epochs_are_checkpoints_in_epochs():
    # 15.625 steps per epoch: every epoch is saved, every fifth is kept.
    config = resolve(train=dict(checkpoint_interval="1 epoch", checkpoint_keep_every="5 epochs"))
    assert (config.train.checkpoint_interval, config.train.checkpoint_keep_every) == (16, 80)
    config = resolve(train=dict(checkpoint_interval=100, checkpoint_keep_every="1 epoch"))
    assert config.train.checkpoint_keep_every == 100
    config = resolve(train=dict(checkpoint_interval=100, checkpoint_keep_every=30))
    assert config.train.checkpoint_keep_every == 30  # as it was given
    train = dict(checkpoint_interval=2**30 + 1, checkpoint_keep_every="2147483647 steps")
    assert resolve(train=train).train.checkpoint_keep_every == 2**30 + 1  # the next is no int32


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8 hours", 28800.0), ("1 hour", 3600.0), ("90minutes", 5400.0), ("1.5 seconds", 1.5)],
)
def test_seconds_of_a_limit(text, seconds):
    assert durations.seconds(text) == seconds


def test_duration_that_gives_no_number_of_steps_is_rejected():
    with pytest.raises(UsageError, match="number of training examples"):
        resolve(examples=None, train=dict(steps="2 epochs"))
    assert resolve(examples=None, train=dict(steps="128 examples")).train.steps == 2
    with pytest.raises(UsageError, match="15625000000 steps"):
        resolve(train=dict(steps="1e12 examples"))


@pytest.mark.parametrize("text", ["8", "8 epochs", "8 hors", "0 hours", "-1 hours", "long"])
def test_limit_that_is_not_a_time_is_one_line(text):
    with pytest.raises(UsageError, match=f"train.max_duration is '{text}', but must be a time, "):
        durations.seconds(text)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("train.steps", "-3 epochs", "must be an integer or a duration such as"),
        ("train.steps", "9 epocs", "which has no known unit: did you mean epochs?"),
        ("train.steps", "9 parsecs", "must be an integer or a duration such as"),
        ("train.steps", "0 examples", "must be longer than 0 examples"),
        ("train.steps", "30 minutes", "must not depend on the speed of the machine"),
        (durations.BOUNDARIES, "30 minutes", "must not depend on the speed of the machine"),
        ("train.checkpoint_interval", "30 minuts", "did you mean minutes?"),
        ("train.checkpoint_interval", "soon", 'such as "90 epochs" or "30 minutes"'),
    ],
)
def test_bad_durations_are_one_line(key, text, message):
    with pytest.raises(UsageError) as error:
        durations.check(key, text)
    assert message in str(error.value) and str(error.value).startswith(f"{key} is {text!r}")
