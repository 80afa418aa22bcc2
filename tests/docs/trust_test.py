"""The code blocks and the message of docs/trust.md."""

import json

import fsspec
import pytest

import ctl
from ctl.configs import keys, loading
from ctl.modes import export
from tests.docs.pages import blocks
from tests.support import child

URL = "s3://bucket/runs/mnist"


def test_a_run_in_a_bucket_is_loaded_with_your_trainer_only(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(child.ROOT)
    config = {**keys.defaults().to_dict(), "trainer": "trainers/mnist.py:MnistTrainer"}
    url, store = URL.replace("s3", "memory"), fsspec.filesystem("memory")
    store.pipe_file(f"{url}/config.json", json.dumps(config).encode())
    store.pipe_file(f"{url}/checkpoints/ckpt-5.index", b"data")
    marker = json.dumps({"files": {"ckpt-5.index": 4}}).encode()
    store.pipe_file(f"{url}/checkpoints/ckpt-5.whole", marker)
    alone, with_config = (block.replace(URL, url) for block in blocks("trust"))
    with pytest.raises(ctl.UsageError) as error:
        exec(alone, {"ctl": ctl})
    (message,) = blocks("trust", "text")
    assert f"ctl.errors.UsageError: {error.value}".replace(url, URL) == " ".join(message.split())

    classes = []
    monkeypatch.setattr(export.inference, "restore_trainer", lambda c, *_, **__: classes.append(c))
    monkeypatch.setattr(export, "TrainedModel", lambda *_: None)
    exec(with_config, {"ctl": ctl})
    trainer = child.ROOT / "experiments/trainers/mnist.py"
    assert classes == [loading.import_file(trainer).MnistTrainer]


def test_the_page_sets_the_token_that_all_processes_read():
    (commands,) = blocks("trust", "sh")
    assert "export CTL_TOKEN=" in commands and "-x CTL_TOKEN" in commands
