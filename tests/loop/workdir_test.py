"""The folder of a run. The messages for unsuitable folders are in mistakes_test.py."""

import datetime
import json
import pathlib
import types

import pytest

import ctl
from ctl.configs import keys, overrides
from ctl.errors import UsageError
from ctl.loop import workdir
from ctl.loop.workdir import Workdir, name_experiment, name_folder, name_values

KEYS = overrides.flatten(keys.defaults())


def config(**changes):
    """A complete config, nested."""
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
    assert folder.result() == {} and folder.move_aside() is None
    assert list(tmp_path.iterdir()) == []
    folder.create(config())
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["config.json"]


def test_url_is_rejected():
    with pytest.raises(UsageError, match=r"bucket/run.*URLs"):
        workdir.Workdir(pathlib.Path("s3://bucket/run"), writes=False)


def test_config_is_written_with_every_key(tmp_path):
    folder = run(tmp_path, model=dict(sizes=[1, 2]), train=dict(steps=7))
    kept = json.loads((tmp_path / "config.json").read_text())
    assert kept == config(model=dict(sizes=[1, 2]), train=dict(steps=7))
    assert folder.config() == KEYS | {
        "trainer": "net.py:Net", "model.sizes": [1, 2], "train.steps": 7,
    }  # fmt: skip


def test_broken_config_is_reported_and_moved_aside_by_fresh(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{")
    folder = workdir.Workdir(tmp_path / "run")
    with pytest.raises(UsageError, match=r"config\.json .*--fresh"):
        folder.check_config(config())
    aside = folder.move_aside()
    assert (aside / "config.json").read_text() == "{"


@pytest.mark.parametrize("files", [["photo"], ["config.json"], ["config.json", "photo"]])
def test_folder_of_something_else_is_neither_used_nor_moved(tmp_path, files):
    for name in files:
        (tmp_path / name).write_text('["not", "ours"]')
    folder = workdir.Workdir(tmp_path)
    for attempt in (lambda: folder.check_config(config()), folder.check_movable, folder.move_aside):
        with pytest.raises(UsageError, match=r"not a run's folder"):
            attempt()
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def test_lost_checkpoints_are_not_a_new_beginning(tmp_path):
    folder = run(tmp_path / "run")
    assert folder.check_config(config()) == []
    for event, step in (("start", 0), ("checkpoint", 10), ("checkpoint", 20), ("eval", 25)):
        folder.event(event, step)
    with pytest.raises(UsageError, match=r"events\.jsonl .*step 20.*/checkpoints"):
        folder.check_config(config())
    assert folder.check_config(config(), only_evaluates=True) == []
    folder.checkpoints.mkdir()
    (folder.checkpoints / "ckpt-10.whole").write_text("damaged")  # the restore names it
    assert folder.check_config(config()) == []


def test_only_checkpoints_that_were_in_a_store_can_be_lost_there(tmp_path):
    folder = Workdir(tmp_path, store=types.SimpleNamespace(url="gs://bucket/run"))
    folder.create(config())
    folder.event("checkpoint", 10)  # the machine was lost before the upload
    assert folder.check_config(config()) == []
    folder.event("durable", 20)
    with pytest.raises(UsageError, match=r"gs://bucket/run/events\.jsonl .*20.*--workdir"):
        folder.check_config(config())


def test_lost_config_is_named_and_fresh_moves_what_is_left(tmp_path):
    folder = run(tmp_path / "run")
    folder.event("start", 0)
    (folder.path / "config.json").unlink()
    with pytest.raises(UsageError, match=r"events\.jsonl of a run: restore config"):
        folder.check_config(config())
    assert (folder.move_aside() / "events.jsonl").exists()


def test_long_names_are_cut_to_what_file_systems_allow(tmp_path):
    folder = run(tmp_path / ("\N{GREEK SMALL LETTER ALPHA}" * 127))
    assert (folder.move_aside() / "config.json").exists()
    for text in ("a" * 300, "\N{HUGGING FACE}" * 100):
        assert len(name_values({"name": text}).encode()) <= 120


def refuse_writing(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_folder_that_can_only_be_read_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.TemporaryFile", refuse_writing)
    with pytest.raises(UsageError, match=r"Permission denied.*name another"):
        Workdir(tmp_path)
    folder = Workdir(tmp_path, may_read=True)
    folder.event("eval", 1)
    folder.write_result({"step": 1})
    assert not folder.writes and not any(tmp_path.iterdir())
    assert "cannot be written, so nothing is recorded there" in capsys.readouterr().out


@pytest.mark.parametrize("left", [".config.json.new", "run.lock", "find_lr.html"])
def test_files_of_other_modes_and_of_a_run_killed_while_it_started_are_no_obstacle(tmp_path, left):
    (tmp_path / left).write_text('{"trai')
    folder = workdir.Workdir(tmp_path)
    assert folder.check_config(config()) == []
    folder.create(config())
    names = {path.name for path in tmp_path.iterdir()}
    assert names - {"run.lock", "find_lr.html"} == {"config.json"}


def test_move_aside_of_a_link_moves_the_folder_and_keeps_the_link(tmp_path):
    run(tmp_path / "disk" / "run", seed=5)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    folder = workdir.Workdir(tmp_path / "link")
    aside = folder.move_aside()
    assert aside.parent == tmp_path / "disk" and workdir.Workdir(aside).config()["seed"] == 5
    folder.create(config())
    assert folder.path.is_symlink() and (tmp_path / "disk" / "run" / "config.json").exists()


def test_move_aside_keeps_everything_also_twice_in_a_second(tmp_path, monkeypatch):
    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr("datetime.datetime", Stopped)
    aside = []
    for seed in range(3):
        folder = run(tmp_path / "run", seed=seed)
        (folder.path / "checkpoints").mkdir()
        aside.append(folder.move_aside())
        assert not folder.path.exists() and (aside[-1] / "checkpoints").is_dir()
    names = [path.name for path in aside]
    assert names == ["run.2026-01-02-030405", "run.2026-01-02-030405.2", "run.2026-01-02-030405.3"]
    assert [workdir.Workdir(path).config()["seed"] for path in aside] == [0, 1, 2]


@pytest.mark.parametrize("name", [".", "..", "../run"])
def test_current_folder_is_not_moved(tmp_path, monkeypatch, name):
    run(tmp_path / "run")
    (tmp_path / "run" / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "run" / ("sub" if name == ".." else ""))
    with pytest.raises(UsageError, match=r"--fresh .*/run.* current folder"):
        workdir.Workdir(name).move_aside()
    assert (tmp_path / "run" / "config.json").exists()


def test_folder_that_cannot_be_moved_is_reported(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(16, "Device or resource busy")

    folder = run(tmp_path / "run")
    monkeypatch.setattr(pathlib.Path, "rename", fail)
    with pytest.raises(UsageError, match=r"moved .*run\..*busy"):
        folder.move_aside()


def test_config_file_is_read_despite_a_line_that_a_kill_cut_short(tmp_path):
    folder = run(tmp_path)
    assert folder.config_file() == ""
    folder.event("start", 0, config="a.py")
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"time": 1.0, "event": "start", "config": "b')
    assert folder.config_file() == "a.py"


def test_name_that_no_file_system_can_have_is_rejected():
    with pytest.raises(UsageError, match=r"surrogates .*name another"):
        workdir.Workdir("\ud800")


def test_folder_that_cannot_be_created_later_is_reported(tmp_path, monkeypatch):
    folder = workdir.Workdir(tmp_path / "run")
    monkeypatch.setattr(pathlib.Path, "mkdir", refuse_writing)
    with pytest.raises(UsageError, match=r"Permission denied.*name another"):
        folder.create(config())


def test_link_to_nowhere_is_rejected(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="link is a file: name a folder"):
        workdir.Workdir(tmp_path / "link")


EXPERIMENT, CHANGED = "runs/exp", "runs/exp.learning_rate=0.5"
RATE, SEED = ("optimizer.learning_rate", "0.5"), ("seed", "3")


@pytest.mark.parametrize(
    ("changes", "folder"),
    [
        ([], EXPERIMENT),
        ([("train.steps", "9"), ("runtime.xla", "off")], EXPERIMENT),  # they keep the updates
        ([("data.dir", "other")], EXPERIMENT),
        # The spelling and the order of the changes do not matter.
        ([RATE, SEED], f"{CHANGED},seed=3"),
        ([SEED, ("optimizer.learning_rate", "5e-1")], f"{CHANGED},seed=3"),
    ],
)
def test_folder_without_workdir_is_named_after_the_changes_of_the_updates(changes, folder):
    config = ctl.config(trainer="a.py:A", data=dict(global_batch_size=4))
    for key, text in changes:
        overrides.change(config, key, text)
    assert str(name_folder("a/exp.py", config, changes)) == folder


def test_each_argument_of_a_config_file_has_its_own_folder():
    names = ["runs/k.py", "k.py:A", "k.py:B", "k.py:a/b"]
    assert [name_experiment(name) for name in names[:3]] == ["k", "k.A", "k.B"]
    assert name_experiment(names[3]).startswith("k.a_b-")


def test_name_is_safe_for_file_systems_and_unique():
    assert name_values({"a.b": "0.1", "c": "x"}) == "b=0.1,c=x"
    assert name_values({"a.b": "1", "c.b": "2"}) == "a.b=1,c.b=2"
    assert name_values({"a": "x/y"}).startswith("a=x_y-")
    assert len(name_values({"a": "9" * 500})) < 120
    assert name_values({"a": "x/y"}) != name_values({"a": "x:y"})


def test_workers_are_those_of_the_last_process(tmp_path):
    def write(*events):
        lines = (json.dumps(event) for event in events)
        (tmp_path / "events.jsonl").write_text("\n".join(lines))

    workdir = Workdir(tmp_path)
    assert workdir.last_workers() is None
    write({"event": "start"})  # by an older ctl
    assert workdir.last_workers() is None
    write({"event": "start", "workers": 3}, {"event": "resume", "workers": 2}, {"event": "eval"})
    assert workdir.last_workers() == 2
