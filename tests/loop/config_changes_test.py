"""Which changes of the config a run may continue with."""

import pytest

import ctl
from ctl.configs import durations, keys, overrides
from ctl.loop.config_changes import ConfigChanges

KEYS = overrides.flatten(keys.defaults())


def config(**changes):
    """A complete config, nested."""
    return ctl.config(**(dict(trainer="net.py:Net") | changes)).to_dict()


def compare(saved, current):
    return ConfigChanges(overrides.flatten(saved), current)


# The keys that change the updates. A new key belongs here, or is marked as harmless.
HARMFUL = {
    "seed", "init.checkpoint", "init.variables", "init.layout", "init.averages",
    "runtime.precision", "runtime.loss_scale", "runtime.logical_shards",
    "runtime.all_reduce.dtype", "runtime.all_reduce.compression", "data.dir", "data.global_batch_size",
    "optimizer.name",
    "optimizer.learning_rate", "optimizer.learning_rate_batch_size", "optimizer.schedule",
    "optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.momentum",
    "optimizer.weight_decay", "optimizer.clip.global_norm", "optimizer.clip.norm",
    "optimizer.clip.value", "optimizer.weight_decay_exclude", "optimizer.ema_decay", "optimizer.groups",
    "train.loss_spike",
}  # fmt: skip


def other(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    return value + {str: "x", list: ["CPU:0"]}.get(type(value), 1)


def nested(name, value):
    """A key as ctl.config takes it."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("name", [name for name in KEYS if name != "trainer"])
def test_every_key_is_harmless_or_harmful(name):
    value = other(KEYS[name])
    changes = compare(config(), config(**nested(name, value)))
    if name == "data.per_replica_batch_size":  # the global batch is not known yet
        assert changes.lines == {}
    else:
        assert changes.lines == {name: f"{name}: {KEYS[name]!r} -> {value!r}"}
        assert changes.harmful == [name] * (name in HARMFUL)


@pytest.mark.parametrize(
    ("before", "after", "harmful"),
    [
        ({}, dict(on_non_finite="skip"), False),  # the advice after such a step
        (dict(on_non_finite="ignore"), dict(on_non_finite="skip"), True),
        (dict(loss_spike=3.0), dict(loss_spike=4.0), False),
        (dict(loss_spike=3.0), {}, False),
        (dict(loss_spike=3.0), dict(loss_spike=2.0), True),
        ({}, dict(loss_spike=2.0), True),
        (dict(on_non_finite="skip", loss_spike=3.0), dict(on_non_finite="skip"), True),
    ],
)
def test_what_decides_on_updates_may_change_only_if_no_update_was_left_out(before, after, harmful):
    changes = compare(config(train=before), config(train=after))
    assert len(changes.lines) == 1 and bool(changes.harmful) == harmful


@pytest.mark.parametrize(
    ("before", "after", "harmful"),
    [
        ("auto", "mirrored", False),
        ("mirrored", "parameter_server", True),
        ("parameter_server", "mirrored", True),
    ],
)
def test_changing_to_or_from_asynchronous_updates_is_harmful(before, after, harmful):
    changes = compare(config(runtime=dict(strategy=before)), config(runtime=dict(strategy=after)))
    assert changes.lines == {"runtime.strategy": f"runtime.strategy: {before!r} -> {after!r}"}
    assert bool(changes.harmful) == harmful


@pytest.mark.parametrize(
    ("optimizer", "harmful"),
    [
        ({}, False),
        (dict(schedule="cosine"), True),
        (dict(schedule="cosine", decay_steps=50), False),
        (dict(schedule="inverse_sqrt", warmup_steps=3), False),
        (dict(schedule="a.b:schedule"), True),
    ],
)
def test_train_steps_is_harmful_if_a_cosine_schedule_depends_on_it(optimizer, harmful):
    longer = config(optimizer=optimizer, train=dict(steps=2000))
    changes = compare(config(optimizer=optimizer), longer)
    assert changes.lines == {"train.steps": "train.steps: 1000 -> 2000"}
    assert changes.harmful == ["train.steps"] * harmful


def test_model_keys_that_appear_and_disappear_are_named():
    model = dict(shape=(1, 2), head=dict(rate=0.1 + 0.2, nothing=None))
    saved = overrides.flatten(config(model=model)) | {"model.shape": [1, 2]}  # as JSON has it
    assert ConfigChanges(saved, config(model=model)).lines == {}
    changes = ConfigChanges(saved, config(model=dict(shape=(1, 2), rate=0, head=dict(rate=0.3))))
    assert changes.lines == {
        "model.head.nothing": "model.head.nothing: None -> absent",
        "model.head.rate": "model.head.rate: 0.30000000000000004 -> 0.3",
        "model.rate": "model.rate: absent -> 0",
    }
    assert changes.harmful == [*changes.lines]


def test_key_that_an_older_ctl_did_not_have_was_at_its_default():
    saved = overrides.flatten(config())
    saved = {key: value for key, value in saved.items() if not key.startswith("optimizer.clip.")}
    assert ConfigChanges(saved, config()).lines == {}
    changes = ConfigChanges(saved, config(optimizer=dict(clip=dict(norm=1.0))))
    assert changes.lines == {"optimizer.clip.norm": "optimizer.clip.norm: 0.0 -> 1.0"}


def test_key_that_an_older_ctl_called_by_another_name_keeps_its_value():
    saved = overrides.flatten(config())
    saved["optimizer.gradient_accumulation_steps"] = saved.pop("optimizer.micro_batches") + 1
    changes = ConfigChanges(saved, config())
    assert changes.lines == {"optimizer.micro_batches": "optimizer.micro_batches: 2 -> 1"}
    assert changes.harmful == []


def test_key_that_was_removed_is_ignored_if_it_had_no_effect():
    saved = overrides.flatten(config())
    assert ConfigChanges(saved | {"data.overfit_batches": 0}, config()).lines == {}
    changes = ConfigChanges(saved | {"data.overfit_batches": 2}, config())
    assert list(changes.lines.values()) == ["data.overfit_batches: 2 -> absent"]
    assert changes.harmful == ["data.overfit_batches"]


def test_batch_sizes_are_compared_once_the_replicas_are_known():
    saved = config(data=dict(global_batch_size=8))
    assert compare(saved, config(data=dict(per_replica_batch_size=4))).lines == {}
    changes = compare(saved, config(data=dict(global_batch_size=4)))
    assert changes.harmful == ["data.global_batch_size"]


def test_a_duration_with_a_unit_is_compared_once_it_is_resolved():
    def make(examples, steps, boundary):
        arguments = dict(boundaries=[boundary], factors=[0.1])
        made = ctl.config(
            trainer="net.py:Net",
            data=dict(global_batch_size=4),
            train=dict(steps=steps),
            optimizer=dict(schedule="piecewise", schedule_arguments=arguments),
        )
        if examples:
            made = durations.resolve(made, examples_per_epoch=examples)
        return made.to_dict()

    saved, unresolved = make(100, "9 epochs", "3 epochs"), make(None, "9 epochs", "3 epochs")
    assert compare(saved, unresolved).lines == {}
    assert compare(saved, make(100, "9 epochs", "3 epochs")).lines == {}
    changed = compare(saved, make(200, "9 epochs", "3 epochs"))
    assert changed.harmful == [durations.BOUNDARIES]
    assert changed.lines["train.steps"] == "train.steps: 225 -> 450"


def with_group(train=(), **group):
    groups = [{"variables": "*/kernel", **group}]
    return config(optimizer=dict(groups=groups), train=dict(train))


def test_group_that_is_frozen_for_epochs_is_compared_once_they_are_steps():
    saved = with_group(frozen_until=5)
    assert compare(saved, with_group(frozen_until="1 epoch")).lines == {}
    assert compare(saved, with_group(frozen_until=6)).harmful == ["optimizer.groups"]


def test_group_with_an_optimizer_is_compared_with_all_its_keys():
    saved, adam = with_group(optimizer={"name": "adam", "learning_rate": 0.001}), {"name": "adam"}
    assert compare(saved, with_group(optimizer=adam)).lines == {}
    assert compare(saved, with_group(optimizer={"name": "sgd"})).harmful == ["optimizer.groups"]
    assert compare(saved, with_group(dict(steps=20), optimizer=adam)).harmful == []
    cosine = {"schedule": "cosine"}
    changes = compare(with_group(optimizer=cosine), with_group(dict(steps=20), optimizer=cosine))
    assert changes.harmful == ["train.steps"]


def test_folder_of_the_data_may_be_named_in_another_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ctl.config(trainer="a.py:A", data=dict(dir="data"))
    saved = overrides.flatten(config.to_dict())
    config.data.dir = str(tmp_path / "data")
    assert ConfigChanges(saved, config.to_dict()).lines == {}
    for other in ("other", "\ud800"):  # which no file system can name
        config.data.dir = other
        assert ConfigChanges(saved, config.to_dict()).harmful == ["data.dir"]


@pytest.mark.parametrize("name", ["eval", "inputs"])
@pytest.mark.parametrize("schedule", ["plateau", "cosine"])
def test_what_is_evaluated_is_harmful_if_the_rate_follows_it(name, schedule):
    before = config(optimizer=dict(schedule=schedule))
    before["inputs"] = dict(eval=dict(examples=40))
    changed = {"eval": before["eval"] | dict(interval=56), "inputs": dict(eval=dict(examples=56))}
    after = before | {name: changed[name]}
    assert bool(compare(before, after).harmful) == (schedule == "plateau")


@pytest.mark.parametrize(
    ("inputs", "best", "harmful", "evaluation"),
    [
        (dict(train=dict(examples=56)), "", True, False),
        (dict(init=dict(checkpoint="a.h5 (9 bytes)")), "", True, False),
        # The updates are the same, but the best checkpoint is chosen among evaluations.
        (dict(eval=dict(examples=56)), "", False, True),
        (dict(eval=dict(examples=56)), "eval/loss", True, True),
    ],
)
def test_inputs_are_compared_like_keys(inputs, best, harmful, evaluation):
    recorded = dict(examples=40, files="a (1 bytes)")
    before = dict(train=recorded, eval=recorded, init=dict(checkpoint="a.h5 (8 bytes)"))
    current = config(train=dict(best=dict(metric=best)))
    saved = overrides.flatten(current | {"inputs": before})
    changes = ConfigChanges(saved, current | {"inputs": before | inputs})
    ((key, line),) = changes.lines.items()
    assert line.startswith(f"inputs.{next(iter(inputs))}.") and " -> " in line
    assert changes.harmful == [key] * harmful
    assert changes.evaluation == [key] * evaluation
    assert changes.harmful_to_evaluation == []
    # A run of an older ctl has no record, nor does a mode that does not read the data.
    for old, new in ((saved, current), (overrides.flatten(current), current | {"inputs": inputs})):
        assert ConfigChanges(old, new).lines == {}
