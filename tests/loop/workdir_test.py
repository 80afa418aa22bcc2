"""The folder of a run. The lines for a folder that cannot be one: mistakes_test.py."""

import datetime
import json
import os
import pathlib

import pytest

import ctl
from ctl.configs import defaults, overrides
from ctl.errors import UsageError
from ctl.loop import workdir

KEYS = overrides.flat(defaults.defaults())


def config(**changes):
    """A config as the workdir gets it."""
    return ctl.config(**(dict(trainer="net.py:Net") | changes)).to_dict()


def run(path, **changes):
    """A workdir with a run in it."""
    folder = workdir.Workdir(path)
    folder.create(config(**changes))
    return folder


def test_nothing_is_written_before_create(tmp_path):
    folder = workdir.Workdir(tmp_path / "a" / "b")
    assert not folder.has_run()
    assert folder.check_config(config()) == []
    assert folder.result() == {}
    assert list(tmp_path.iterdir()) == []
    folder.create(config())
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["config.json"]


def test_config_is_kept_whole(tmp_path):
    folder = run(tmp_path, model=dict(sizes=[1, 2]), train=dict(steps=7))
    kept = json.loads((tmp_path / "config.json").read_text())
    assert kept == config(model=dict(sizes=[1, 2]), train=dict(steps=7))
    assert folder.config() == KEYS | {
        "trainer": "net.py:Net", "model.sizes": [1, 2], "train.steps": 7,
    }  # fmt: skip


def test_the_same_config_passes_without_a_word(tmp_path):
    model = dict(shape=(1, 2), head=dict(rate=0.1 + 0.2, nothing=None))
    assert run(tmp_path, model=model).check_config(config(model=model)) == []


# A new key must be put here, or in defaults.HARMLESS.
ARITHMETIC = {
    "seed", "init.checkpoint", "init.variables",
    "runtime.precision", "runtime.loss_scale", "runtime.logical_shards",
    "runtime.all_reduce.dtype", "data.dir", "data.global_batch_size", "data.tfrecord.interleave",
    "data.tfrecord.cache", "data.tfrecord.shuffle_buffer", "optimizer.name",
    "optimizer.learning_rate", "optimizer.learning_rate_batch_size", "optimizer.schedule",
    "optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.momentum", "optimizer.nesterov",
    "optimizer.weight_decay", "optimizer.clip.global_norm", "optimizer.clip.norm",
    "optimizer.clip.value",
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
def test_harmless_change_passes_with_a_line_and_another_is_refused(tmp_path, name):
    value = other(KEYS[name])
    folder, changed = run(tmp_path), config(**nested(name, value))
    line = f"{name}: {KEYS[name]!r} -> {value!r}"
    if name == "data.per_replica_batch_size":  # with which the batch is not known yet
        assert folder.check_config(changed) == []
    elif name not in ARITHMETIC:
        assert folder.check_config(changed) == [line]
    else:
        with pytest.raises(UsageError) as refused:
            folder.check_config(changed)
        assert str(refused.value) == (
            f"{tmp_path} holds a run with another config ({line}): go on with the change by "
            "--allow_config_change, or start anew by --fresh or another --workdir."
        )
        assert folder.check_config(changed, allow_change=True) == [line]


@pytest.mark.parametrize(
    ("before", "after", "arithmetic"),
    [
        ("auto", "mirrored", False),
        ("mirrored", "parameter_server", True),
        ("parameter_server", "mirrored", True),
    ],
)
def test_asynchronous_updates_are_other_arithmetic(tmp_path, before, after, arithmetic):
    folder = run(tmp_path, runtime=dict(strategy=before))
    changed, line = config(runtime=dict(strategy=after)), f"{before!r} -> {after!r}"
    if arithmetic:
        with pytest.raises(UsageError, match=rf"\(runtime\.strategy: {line}\).*--allow_config"):
            folder.check_config(changed)
    (told,) = folder.check_config(changed, allow_change=True)
    assert told == f"runtime.strategy: {line}"


def test_refusal_names_every_key_that_matters_and_none_else(tmp_path):
    folder = run(tmp_path)
    changed = config(seed=1, train=dict(steps=7), optimizer=dict(name="sgd"))
    with pytest.raises(UsageError, match=r"\(optimizer\.name: 'adam' -> 'sgd'; seed: 0 -> 1\)"):
        folder.check_config(changed)
    assert len(folder.check_config(changed, allow_change=True)) == 3


@pytest.mark.parametrize(
    ("optimizer", "arithmetic"),
    [
        (dict(schedule="constant"), False),
        (dict(schedule="cosine"), True),
        (dict(schedule="cosine", warmup_steps=3), True),
        (dict(schedule="cosine", decay_steps=50), False),
    ],
)
def test_train_steps_is_arithmetic_when_a_cosine_is_spread_over_it(tmp_path, optimizer, arithmetic):
    folder = run(tmp_path, optimizer=optimizer)
    longer = config(optimizer=optimizer, train=dict(steps=2000))
    if arithmetic:
        with pytest.raises(UsageError, match=r"\(train\.steps: 1000 -> 2000\)"):
            folder.check_config(longer)
    else:
        assert folder.check_config(longer) == ["train.steps: 1000 -> 2000"]


def test_model_keys_that_come_and_go_are_named(tmp_path):
    folder = run(tmp_path, model=dict(units=5, nothing=None))
    with pytest.raises(
        UsageError, match=r"model\.nothing: None -> absent; model\.rate: absent -> 0"
    ):
        folder.check_config(config(model=dict(units=5, rate=0)))


def test_another_experiment_is_refused_first(tmp_path):
    folder = run(tmp_path, trainer="other.py:Net", seed=5)
    with pytest.raises(UsageError, match=r"a run of another experiment, trainer other\.py:Net"):
        folder.check_config(config())
    assert "trainer: 'other.py:Net' -> 'net.py:Net'" in folder.check_config(
        config(), allow_change=True
    )


def test_key_that_an_older_ctl_did_not_have_was_at_its_default(tmp_path):
    folder = run(tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())
    del kept["optimizer"]["clip"]
    (tmp_path / "config.json").write_text(json.dumps(kept))
    assert folder.check_config(config()) == []
    with pytest.raises(UsageError, match=r"optimizer\.clip\.norm: 0\.0 -> 1\.0"):
        folder.check_config(config(optimizer=dict(clip=dict(norm=1.0))))


def test_per_replica_batch_size_is_compared_once_the_replicas_are_known(tmp_path):
    folder = run(tmp_path, data=dict(global_batch_size=8))
    assert folder.check_config(config(data=dict(per_replica_batch_size=4))) == []
    with pytest.raises(UsageError, match=r"data\.global_batch_size: 8 -> 4"):
        folder.check_config(config(data=dict(global_batch_size=4)))


@pytest.mark.parametrize("text", ["", "{", "\x00"])
def test_broken_config_is_told_and_moved_aside_by_fresh(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(text)
    folder = workdir.Workdir(tmp_path / "run")
    with pytest.raises(
        UsageError, match=r"config\.json cannot be read .*: mend it, or use --fresh"
    ):
        folder.check_config(config())
    aside = folder.move_aside()
    assert (aside / "config.json").read_text() == text


@pytest.mark.parametrize("files", [["photo"], ["config.json"], ["config.json", "photo"]])
def test_folder_of_something_else_is_neither_used_nor_moved(tmp_path, files):
    for name in files:
        (tmp_path / name).write_text('["not", "ours"]')
    folder = workdir.Workdir(tmp_path)
    for attempt in (lambda: folder.check_config(config()), folder.check_movable, folder.move_aside):
        with pytest.raises(
            UsageError, match=r"no config\.json of ctl, so it is not a run's folder"
        ):
            attempt()
    assert sorted(path.name for path in tmp_path.iterdir()) == files


@pytest.mark.parametrize("left", [".config.json.new", "run.lock"])
def test_folder_that_a_killed_start_left_is_used(tmp_path, left):
    (tmp_path / left).write_text('{"trai')
    folder = workdir.Workdir(tmp_path)
    assert folder.check_config(config()) == []
    folder.create(config())
    assert {path.name for path in tmp_path.iterdir()} - {"run.lock"} == {"config.json"}


def test_move_aside_keeps_everything_and_says_where(tmp_path):
    folder = run(tmp_path / "run", seed=5)
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints" / "ckpt-1").write_text("weights")
    aside = folder.move_aside()
    assert not folder.path.exists()
    assert aside.parent == tmp_path
    assert (aside / "checkpoints" / "ckpt-1").read_text() == "weights"
    assert workdir.Workdir(aside).config()["seed"] == 5


def test_move_aside_twice_in_a_second_loses_nothing(tmp_path, monkeypatch):
    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(workdir.datetime, "datetime", Stopped)
    aside = [run(tmp_path / "run", seed=seed).move_aside() for seed in range(3)]
    names = [path.name for path in aside]
    assert names == ["run.2026-01-02-030405", "run.2026-01-02-030405.2", "run.2026-01-02-030405.3"]
    assert [workdir.Workdir(path).config()["seed"] for path in aside] == [0, 1, 2]


def test_move_aside_where_there_is_no_run_does_nothing(tmp_path):
    assert workdir.Workdir(tmp_path / "run").move_aside() is None
    (tmp_path / "run").mkdir()
    assert workdir.Workdir(tmp_path / "run").move_aside() is None
    assert (tmp_path / "run").is_dir()


@pytest.mark.parametrize("name", [".", "..", "../run"])
def test_the_current_folder_is_not_moved_away_under_ones_feet(tmp_path, monkeypatch, name):
    run(tmp_path / "run")
    (tmp_path / "run" / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "run" / ("sub" if name == ".." else ""))
    with pytest.raises(UsageError, match=r"--fresh would move .*/run aside, and you are in it"):
        workdir.Workdir(name).move_aside()
    assert (tmp_path / "run" / "config.json").exists()


def test_folder_that_cannot_be_moved_is_told(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(16, "Device or resource busy")

    folder = run(tmp_path / "run")
    monkeypatch.setattr(pathlib.Path, "rename", refuse)
    with pytest.raises(
        UsageError, match=r"cannot be moved to .*run\..* \(Device or resource busy\)"
    ):
        folder.move_aside()


def test_events_are_appended_a_line_each(tmp_path):
    folder = run(tmp_path)
    folder.event("start", 0)
    folder.event("checkpoint", 5, path="ckpt-5")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [list(line) for line in lines] == [
        ["time", "event", "step"],
        ["time", "event", "step", "path"],
    ]
    assert [(line["event"], line["step"]) for line in lines] == [("start", 0), ("checkpoint", 5)]
    assert lines[0]["time"] <= lines[1]["time"]


def test_result_is_replaced(tmp_path):
    folder = run(tmp_path)
    folder.write_result({"step": 1, "eval": {"loss": 0.5}})
    folder.write_result({"step": 2})
    assert folder.result() == {"step": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "result.json"]


def test_result_is_whole_or_the_old_one(tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    folder = run(tmp_path)
    folder.write_result({"step": 1})
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        folder.write_result({"step": 2})
    assert folder.result() == {"step": 1}


def test_broken_result_is_told(tmp_path):
    folder = run(tmp_path)
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(UsageError, match=r"result\.json cannot be read"):
        folder.result()
    (tmp_path / "result.json").write_text("[]")
    with pytest.raises(UsageError, match=r"result\.json is not a JSON object"):
        folder.result()


def test_folders_of_a_run(tmp_path):
    folder = workdir.Workdir(str(tmp_path))
    assert folder.checkpoints == tmp_path / "checkpoints"
    assert folder.summaries("eval") == str(tmp_path / "summaries" / "eval")


def refuse_writing(*_, **__):
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("name", ["", "new/run"])
def test_folder_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch, name):
    monkeypatch.setattr(workdir.tempfile, "TemporaryFile", refuse_writing)
    with pytest.raises(UsageError, match=r"cannot be written \(Permission denied\): name another"):
        workdir.Workdir(tmp_path / name)


def test_folder_that_cannot_be_made_after_all_is_told(tmp_path, monkeypatch):
    folder = workdir.Workdir(tmp_path / "run")
    monkeypatch.setattr(pathlib.Path, "mkdir", refuse_writing)
    with pytest.raises(UsageError, match=r"cannot be written \(Permission denied\): name another"):
        folder.create(config())


def test_link_to_nowhere_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="link is a file: name a folder"):
        workdir.Workdir(tmp_path / "link")
