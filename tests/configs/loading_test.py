"""Loading a config file and its trainer class. The messages of failures: mistakes_test.py."""

import pathlib
import sys

from ml_collections import config_dict
import pytest

import ctl
from ctl.configs import loading
from ctl.errors import UsageError

CLASS = """
import ctl

class Net(ctl.StandardTrainer):
    origin = "{}"
"""
CONFIG = """
import ctl

def get_config():
    return ctl.config(train=dict(steps=5))
"""


def trainer_class(trainer, config_path):
    return loading.load_trainer_class(trainer, config_path, ctl.StandardTrainer)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, which is importable and contains a folder `sub`."""
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # A namespace package of this name, which another test has imported, would hide the folder.
    monkeypatch.delitem(sys.modules, "sub", raising=False)
    before = dict(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        module = sys.modules[name]
        places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
        if any(place.startswith(str(tmp_path)) for place in places):
            del sys.modules[name]


def test_file_with_too_long_a_name_does_not_exist(folder):
    with pytest.raises(UsageError, match="There is no config file xxx"):
        loading.load_config("x" * 300 + ".py")
    with pytest.raises(UsageError, match="but there is no"):
        loading.find_trainer_file("x" * 300 + ".py:Net", "exp.py")


def test_error_that_cannot_be_printed_is_reported_by_its_type(folder):
    (folder / "exp.py").write_text("def get_config():\n    raise OSError([10**5000])\n")
    with pytest.raises(UsageError, match=r"get_config\(\) fails: exp.py:2: OSError$"):
        loading.load_config("exp.py")


def test_get_config_receives_the_text_after_the_colon(folder):
    text = "import ctl\ndef get_config(steps):\n    return ctl.config(train=dict(steps=int(steps)))"
    (folder / "exp.py").write_text(text)
    assert loading.load_config("exp.py:7").train.steps == 7


def test_config_file_may_import_modules_of_its_folder_when_read_and_when_called(folder):
    (folder / "sub" / "base.py").write_text(CONFIG)
    (folder / "sub" / "base2.py").write_text(CONFIG)
    (folder / "sub" / "exp.py").write_text(
        "import base\ndef get_config():\n    import base2\n    config = base2.get_config()\n"
        "    config.train.steps += base.get_config().train.steps\n    return config\n"
    )
    path = list(sys.path)
    assert loading.load_config("sub/exp.py").train.steps == 10
    assert sys.path == path


def test_config_is_a_locked_copy_without_references(folder):
    (folder / "exp.py").write_text(
        "import ctl\nfrom ml_collections import FrozenConfigDict\n"
        "CONFIG = FrozenConfigDict(ctl.config(train=dict(steps=5)))\n"
        "def get_config():\n    return CONFIG\n"
    )
    config = loading.load_config("exp.py")
    config.train.steps = 6
    assert type(config) is config_dict.ConfigDict
    assert config.is_locked
    assert loading.load_config("exp.py").train.steps == 5


def test_trainer_is_in_the_configs_folder_or_in_the_current_one_or_in_a_package(folder):
    (folder / "net.py").write_text(CLASS.format("in the current folder"))
    assert trainer_class("net.py:Net", "sub/exp.py").origin == "in the current folder"
    assert loading.find_trainer_file("net.py:Net", "sub/exp.py") == pathlib.Path("net.py")
    (folder / "sub" / "net.py").write_text(CLASS.format("next to the config"))
    for name in ("net.py:Net", f"{folder}/sub/net.py:Net", "sub.net:Net"):
        cls = trainer_class(name, "sub/exp.py")
        assert cls.origin == "next to the config" and issubclass(cls, ctl.StandardTrainer)
    assert loading.find_trainer_file("sub.net:Net", "exp.py") is None


@pytest.mark.parametrize(
    "text",
    [
        "from nets import *",
        "import nets as Net",
        "Net = 1",
        "if True:\n    class Net: pass",
        "def __getattr__(name): return 1",
    ],
)
def test_file_that_may_define_the_class_is_not_rejected_before_it_runs(folder, text):
    (folder / "net.py").write_text(text)
    assert loading.find_trainer_file("net.py:Net", "exp.py") == pathlib.Path("net.py")


def test_config_and_trainer_may_be_one_file_which_runs_once(folder):
    (folder / "exp.py").write_text(
        "import pathlib\nlog = pathlib.Path('log')\n"
        "log.write_text(log.read_text() + 'x' if log.exists() else 'x')\n"
        f"{CONFIG}{CLASS.format('one file')}"
    )
    assert loading.load_config("exp.py").train.steps == 5
    cls = trainer_class("exp.py:Net", "exp.py")
    assert cls.origin == "one file"
    assert (folder / "log").read_text() == "x"
    assert sys.modules[cls.__module__].Net is cls


def test_trainer_may_import_modules_of_its_folder_which_belong_to_its_source(folder):
    (folder / "sub" / "nets.py").write_text(CLASS.format("the base"))
    (folder / "sub" / "net.py").write_text("import nets\nclass Net(nets.Net): pass\n")
    cls = trainer_class("net.py:Net", "sub/exp.py")
    assert cls.origin == "the base"
    source = loading.read_trainer_source(cls)
    assert "class Net(nets.Net): pass" in source and "the base" in source
    assert "def train_step" not in source


def test_writer_without_its_package_is_rejected_before_tensorflow_is_imported(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    loading.find_writers(["tensorboard", "jsonl"], "experiment.py")
    with pytest.raises(UsageError, match=r"wandb .*pip install"):
        loading.find_writers(["jsonl", "wandb"], "experiment.py")
    with pytest.raises(UsageError, match=r"summaries\.writers\[0\].*missing"):
        loading.find_writers(["missing/file.py:Writer"], "experiment.py")


def test_data_is_searched_in_the_current_folder_then_next_to_the_config(folder):
    (folder / "exp" / "data").mkdir(parents=True)
    assert loading.find_data("data", "exp/config.py") == "exp/data"
    assert loading.find_data("nowhere", "exp/config.py") == "nowhere"
    assert loading.find_data("", "exp/config.py") == ""
    assert loading.find_data("/", "exp/config.py") == "/"
    (folder / "data").mkdir()
    assert loading.find_data("data", "exp/config.py") == "data"


def test_key_that_is_not_text_is_rejected_in_one_line(folder):
    (folder / "exp.py").write_text(
        "import ctl\ndef get_config():\n    config = ctl.config(trainer='net.py:Net')\n"
        "    config.train.checkpoint_interval = {None: 0}\n    return config\n"
    )
    with pytest.raises(UsageError, match=r"exp\.py .*dictionary .*key"):
        loading.load_config("exp.py")


def test_file_runs_once_however_its_path_is_written_and_again_if_it_changes(folder):
    (folder / "net.py").write_text("origin = 'one'\n")
    module = loading.import_file(folder / "net.py")
    assert loading.import_file(folder / "sub" / ".." / "net.py") is module
    assert sys.modules[module.__name__] is module
    (folder / "net.py").write_text("origin = 'another'\n")
    assert loading.import_file(folder / "net.py").origin == "another"


def test_files_with_the_same_name_are_separate_modules(folder):
    files = [folder / "net.py", folder / "sub" / "net.py"]
    for file in files:
        file.write_text(f"origin = {str(file)!r}\n")
    modules = [loading.import_file(file) for file in files]
    assert [module.origin for module in modules] == [str(file) for file in files]
    assert [sys.modules[module.__name__] for module in modules] == modules


def test_file_that_fails_leaves_no_module(folder):
    (folder / "broken.py").write_text("Net = 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        loading.import_file(folder / "broken.py")
    assert not [name for name in sys.modules if "broken" in name]
