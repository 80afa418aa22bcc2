"""The code and the commands of runs and data in a bucket."""

import re

import fsspec
import pytest

import ctl
from ctl import main
from tests.data.record_files import FEATURES, write
from tests.docs.pages import blocks
from tests.support import child, experiments

pytestmark = pytest.mark.slow
PAGE = (child.ROOT / "docs/reliability.md").read_text()


def test_records_in_a_bucket_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    content = open(write(tmp_path / "file", range(5)), "rb").read()  # noqa: SIM115
    fsspec.filesystem("memory").pipe_file("/bucket/data/train-0.tfrecord", content)
    (code,) = (block for block in blocks("data") if 'f"gs://' in block)
    names = {"ctl": ctl, "features": FEATURES}
    exec(code.replace("gs://", "memory://"), names)
    assert len(names["build_dataset"](None, "train", None)) == 5


def test_commands_with_a_bucket_train(tmp_path, monkeypatch, capsys):
    commands = re.findall(r"ctl experiments/mnist.py (--workdir=[^\n\"']*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for command in commands:
        flags = re.sub(r"\w+://", "memory://", command).replace("/scratch", str(tmp_path)).split()
        flags += ["--dry_run=false", "--config.train.steps=5"]
        assert main.run(["ctl", "experiment.py", *flags]) == 0, capsys.readouterr().err
