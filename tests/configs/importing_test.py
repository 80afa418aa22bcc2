"""The user's Python files as modules."""

import sys

import pytest

from ctl.configs.importing import import_file, importable


@pytest.fixture
def folder(tmp_path):
    """A folder whose modules are removed at the end."""
    before = dict(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_file_runs_once_however_its_path_is_written(folder):
    (folder / "sub").mkdir()
    (folder / "net.py").write_text("values = []\n")
    module = import_file(folder / "net.py")
    assert import_file(folder / "sub" / ".." / "net.py") is module
    assert sys.modules[module.__name__] is module


def test_file_that_was_changed_runs_again(folder):
    (folder / "net.py").write_text("origin = 'one'\n")
    assert import_file(folder / "net.py").origin == "one"
    (folder / "net.py").write_text("origin = 'another'\n")
    assert import_file(folder / "net.py").origin == "another"


def test_files_with_the_same_name_are_separate_modules(folder):
    (folder / "sub").mkdir()
    files = [folder / "net.py", folder / "sub" / "net.py"]
    for file in files:
        file.write_text(f"origin = {str(file)!r}\n")
    modules = [import_file(file) for file in files]
    assert [module.origin for module in modules] == [str(file) for file in files]
    assert [sys.modules[module.__name__].__file__ for module in modules] == [
        str(file) for file in files
    ]


def test_file_that_fails_leaves_no_module(folder):
    (folder / "broken.py").write_text("Net = 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        import_file(folder / "broken.py")
    assert not [name for name in sys.modules if "broken" in name]


def test_folder_is_importable_only_within_the_block(folder):
    before = list(sys.path)
    with importable(folder):
        assert sys.path == [str(folder.resolve()), *before]
    assert sys.path == before
