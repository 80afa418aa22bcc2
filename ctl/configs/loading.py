"""Loads the config file of an experiment, and the classes and files that it names."""

import ast
from collections.abc import Callable, Iterable, Iterator
import contextlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
from types import ModuleType
from typing import Any

from ml_collections import config_dict

from ctl import errors
from ctl.configs.error_location import error_location
from ctl.configs.values import SERVERS
from ctl.errors import UsageError

_modules: dict[tuple[str, int, int], ModuleType] = {}  # by path, time of change and size


def load_config(flag: str) -> config_dict.ConfigDict:
    """Runs the `get_config` of a config file.

    Args:
        flag: path/to/file.py, or path/to/file.py:TEXT to call `get_config(TEXT)`.

    Returns:
        A locked copy of the config, which is not checked yet.

    Raises:
        UsageError: the file does not exist, it raises, or it does not return a config.
    """
    path, colon, text = flag.partition(":")
    file = _find_config_file(path)
    arguments = [text] if colon else []
    with importable(file.parent):
        try:
            module = import_file(file)
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"The config file cannot be read: {error_location(error, file)}"
            ) from error
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise UsageError(
                f"{path} has no get_config(): define one that returns ctl.config(...)."
            )
        _check_arguments(get_config, arguments, path)
        try:
            result = get_config(*arguments)
        except (Exception, SystemExit) as error:
            prefix = "" if isinstance(error, UsageError) else "get_config() fails: "
            raise UsageError(f"{prefix}{error_location(error, file)}") from error
    returned = f"get_config() of {path} returned"
    if not isinstance(result, config_dict.ConfigDict):
        what = errors.type_name(result)
        raise UsageError(f"{returned} {what}: return the result of ctl.config(...).")
    try:
        return config_dict.ConfigDict(result.to_dict()).lock()
    except config_dict.RequiredValueError:
        raise UsageError(f"{returned} a required_placeholder: replace it by a value.") from None
    except TypeError:  # a key that cannot be searched for dots
        raise UsageError(
            f"{returned} a dictionary with a key that is not text, such as None: use text."
        ) from None


def find_data(folder: str, config_path: str) -> str:
    """Returns the folder that `data.dir` names.

    Args:
        folder: the value of the key. A relative path is searched in the current folder, then in the
            folder of the config file; one that exists in neither is returned as it is.
        config_path: the experiment's config file.
    """
    sibling = pathlib.Path(config_path).parent / folder
    return str(sibling) if folder and not os.path.exists(folder) and sibling.exists() else folder


def find_trainer_file(
    trainer: str, config_path: str, *, key: str = "trainer"
) -> pathlib.Path | None:
    """Finds the file that a `trainer` key names, and checks it without running it.

    Running it would import TensorFlow, which takes seconds.

    Args:
        trainer: path/to/file.py:Class or package.module:Class.
        config_path: the experiment's config file. A relative path is searched in its folder, then in
            the current folder.
        key: the key of the config, for messages.

    Returns:
        The file, or None for a module of a package.

    Raises:
        UsageError: the file or package does not exist, or the file does not define the class.
    """
    path = trainer.rpartition(":")[0]
    if not path.endswith(".py"):
        package = path.partition(".")[0]
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            raise _missing_module(trainer, package, config_path, key)
        return None
    candidates = _candidate_paths(path, config_path)
    for candidate in candidates:
        if os.path.isfile(candidate):
            _check_source(candidate, trainer, key)
            return candidate
    tried = " nor ".join(dict.fromkeys(str(c) for c in candidates))
    raise UsageError(f"{key} is {trainer!r}, but there is no {tried}: correct the path.")


def load_trainer_class(trainer: str, config_path: str, base: type) -> type:
    """Imports the class that a `trainer` key names.

    Args:
        trainer: path/to/file.py:Class or package.module:Class.
        config_path: the experiment's config file.
        base: the class that it must be a subclass of, `ctl.StandardTrainer`. It is an argument since
            ctl.configs imports neither ctl.trainer nor TensorFlow.

    Returns:
        A subclass of `base`.

    Raises:
        UsageError: the file or module cannot be imported, or does not define such a class.
    """
    cls = _load_attribute(trainer, config_path, key="trainer")
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UsageError(
            f"trainer is {trainer!r}, which is not a subclass of ctl.{base.__name__}: derive it from "
            f"ctl.{base.__name__}, or name another class."
        )
    return cls


def find_action_files(actions: Iterable[Any], config_path: str) -> None:
    """Raises UsageError if a file or package that `actions` names does not exist; imports none."""
    for index, action in enumerate(actions):
        name = action if isinstance(action, str) else action["name"]
        find_trainer_file(name, config_path, key=f"actions[{index}]")


def find_writers(writers: Iterable[str], config_path: str) -> None:
    """Raises UsageError if the file or the package of a writer does not exist; imports nothing."""
    for index, name in enumerate(writers):
        if ":" in name:
            find_trainer_file(name, config_path, key=f"summaries.writers[{index}]")
        elif name in SERVERS and importlib.util.find_spec(name) is None:
            raise UsageError(
                f"summaries.writers contains {name}, but the package {name} is not installed: run "
                f"pip install {name}, or remove it from summaries.writers."
            )


def load(row: str) -> Any:
    """Returns what a row of a table names, "package.module:name"; imports its module."""
    module, _, name = row.partition(":")
    return getattr(importlib.import_module(module), name)


def load_action_factory(reference: str, config_path: str, *, key: str) -> Callable[..., Any]:
    """Imports the class or function that an element of `actions` names.

    Args:
        reference: path/to/file.py:Name or package.module:Name.
        config_path: the experiment's config file.
        key: the element, for messages, such as "actions[0]".

    Raises:
        UsageError: the file or module cannot be imported, or the name is not callable.
    """
    factory = _load_attribute(reference, config_path, key=key)
    if not callable(factory):
        raise UsageError(
            f"{key} is {reference!r}, which is {errors.type_name(factory)}: name a class."
        )
    return factory


def _load_attribute(reference: str, config_path: str, *, key: str) -> Any:
    """Imports the object that path/to/file.py:Name or package.module:Name names."""
    where, _, name = reference.rpartition(":")
    file = find_trainer_file(reference, config_path, key=key)
    try:
        module = import_file(file) if file else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{where}.".startswith(f"{missing}.") and not file:
            raise _missing_module(reference, missing, config_path, key) from None
        raise _import_error(error, file, key) from error
    value = getattr(module, name, None)
    if value is None:
        classes = [k for k, v in vars(module).items() if isinstance(v, type)]
        raise _missing_class(reference, str(file or where), classes, key)
    return value


def import_file(file: pathlib.Path) -> ModuleType:
    """Imports a file as a module, once even if it holds both the config and the trainer."""
    path = file.resolve()
    state = (str(path), path.stat().st_mtime_ns, path.stat().st_size)
    if state in _modules:
        return _modules[state]
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with importable(path.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _modules[state] = module
    return module


def _module_name(path: pathlib.Path) -> str:
    """Returns a name that is unique in sys.modules: several files may have the same name."""
    name = stem = f"ctl_experiment_{path.stem}"
    number = 1
    while name in sys.modules and sys.modules[name].__file__ != str(path):
        number += 1
        name = f"{stem}_{number}"
    return name


@contextlib.contextmanager
def importable(folder: pathlib.Path) -> Iterator[None]:
    """Makes the other modules of an experiment's folder importable within the `with` block."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def read_trainer_source(cls: type, *, folders: bool = False) -> str:
    """Returns the source of the user's modules that define a trainer class and its bases.

    Args:
        cls: the trainer class.
        folders: whether to add the other Python files in the folders of these modules.
    """
    sources = []
    for name in sorted({base.__module__ for base in cls.__mro__}):
        if name.split(".")[0] in ("ctl", "orbit", "tensorflow", "builtins"):
            continue
        with contextlib.suppress(OSError, TypeError, KeyError):  # from a notebook, or in C
            module = sys.modules[name]
            sources.append(inspect.getsource(module))
            others = pathlib.Path(module.__file__ or "").parent.glob("*.py") if folders else ()
            sources += [file.read_text(errors="replace") for file in others]
    return "\n".join(sources)


def _find_config_file(path: str) -> pathlib.Path:
    file = pathlib.Path(path)
    if os.path.isdir(file):  # unlike Path.is_dir, this does not raise if the name is too long
        raise UsageError(f"--config={path} is a folder: name a file in it.")
    if not os.path.isfile(file):
        siblings = {p.name: str(p) for p in sorted(file.parent.glob("*.py"))}
        hint = errors.did_you_mean(file.name, siblings) if len(siblings) < 20 else ""
        raise UsageError(f"There is no config file {path}{hint or ': correct the path.'}")
    if file.suffix != ".py":
        raise UsageError(
            f"--config={path} is not a Python file: a config is a .py file with a get_config()."
        )
    return file


def _check_arguments(get_config: Callable[..., Any], arguments: list[str], path: str) -> None:
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError:
        if arguments:
            raise UsageError(
                f"get_config() of {path} takes no argument: remove :{arguments[0]}."
            ) from None
        raise UsageError(
            f"get_config() of {path} requires an argument: write --config={path}:VALUE."
        ) from None


def _candidate_paths(path: str, config_path: str) -> list[pathlib.Path]:
    return [pathlib.Path(config_path).parent / path, pathlib.Path(path)]


def _check_source(file: pathlib.Path, trainer: str, key: str) -> None:
    """Raises UsageError if a file has a syntax error, or binds the name of the class nowhere."""
    name = trainer.rpartition(":")[-1]
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise _import_error(error, file, key) from None
    nodes = list(ast.walk(tree))
    classes = [n.name for n in nodes if isinstance(n, ast.ClassDef)]
    bound = {n.name for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    bound |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.asname or n.name for n in nodes if isinstance(n, ast.alias)}
    if name not in bound and not bound & {"*", "__getattr__"}:
        raise _missing_class(trainer, str(file), classes, key)


def _import_error(error: BaseException, file: pathlib.Path | None, key: str) -> UsageError:
    subject = "The trainer" if key == "trainer" else key
    return UsageError(f"{subject} cannot be imported: {error_location(error, file)}")


def _missing_module(trainer: str, missing: str, config_path: str, key: str) -> UsageError:
    module, _, name = trainer.rpartition(":")
    file = module.replace(".", "/") + ".py"
    hint = ": correct the name, or install it."
    if any(os.path.isfile(candidate) for candidate in _candidate_paths(file, config_path)):
        hint = f": did you mean {file}:{name}?"
    return UsageError(f"{key} is {trainer!r}, but there is no module {missing}{hint}")


def _missing_class(trainer: str, where: str, classes: list[str], key: str) -> UsageError:
    name = trainer.rpartition(":")[-1]
    hint = errors.did_you_mean(name, classes) or ": it defines no classes."
    return UsageError(f"{key} is {trainer!r}, but {where} has no class {name}{hint}")
