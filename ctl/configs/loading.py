"""The config that --config names, and the class that its `trainer` names. Loads no TensorFlow."""

import ast
from collections.abc import Callable, Iterator
import contextlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import sysconfig
import traceback
from types import ModuleType
from typing import Any

from ml_collections import config_dict

from ctl import errors
from ctl.configs import overrides
from ctl.errors import UsageError

_CTL = str(pathlib.Path(__file__).resolve().parent.parent) + os.sep
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_loaded: dict[tuple[str, int, int], ModuleType] = {}


def load_config(flag: str) -> config_dict.ConfigDict:
    """What the `get_config` of a config file returns.

    Args:
        flag: path/to/file.py, or path/to/file.py:TEXT for a `get_config(text)`.

    Returns:
        A copy of the config, not checked yet.

    Raises:
        UsageError: there is no such file, it fails, or it returns something else.
    """
    path, colon, text = flag.partition(":")
    file = _config_file(path)
    arguments = [text] if colon else []
    with _importable(file.parent):
        try:
            module = _from_file(file)
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
            told = isinstance(error, UsageError) or overrides.explain(error)
            what = "" if told else "get_config() fails: "
            raise UsageError(f"{what}{error_location(error, file)}") from error
    if not isinstance(result, config_dict.ConfigDict):
        raise UsageError(
            f"get_config() of {path} returned {errors.type_name(result)}: let it return what "
            "ctl.config(...) returns."
        )
    try:
        return config_dict.ConfigDict(result.to_dict()).lock()
    except config_dict.RequiredValueError:
        raise UsageError(
            f"get_config() of {path} leaves a required_placeholder: give it a value there."
        ) from None


def trainer_file(trainer: str, config_path: str) -> pathlib.Path | None:
    """The file that a `trainer` key names, or None where it names a package's module.

    It is not run, since it may load TensorFlow; what can be known without is checked.

    Args:
        trainer: path/to/file.py:Class or package.module:Class.
        config_path: the experiment's config file; paths are relative to its folder, or else to the
            current one.

    Raises:
        UsageError: there is no such file or package, or the file has no such class.
    """
    path = trainer.rpartition(":")[0]
    if not path.endswith(".py"):
        _check_package(trainer, config_path)
        return None
    candidates = _candidates(path, config_path)
    for candidate in candidates:
        if os.path.isfile(candidate):
            _check_source(candidate, trainer)
            return candidate
    tried = " nor ".join(dict.fromkeys(str(c) for c in candidates))
    raise UsageError(f"trainer is {trainer!r}, and there is no {tried}: mend the path.")


def trainer_class(trainer: str, config_path: str, base: type) -> type:
    """Imports the class that a `trainer` key names.

    Args:
        trainer: path/to/file.py:Class or package.module:Class.
        config_path: the experiment's config file.
        base: the class that it must be a subclass of, `ctl.StandardTrainer`. It is an argument since
            ctl.configs imports neither ctl.trainer nor TensorFlow.

    Returns:
        A subclass of `base`.

    Raises:
        UsageError: the file or module cannot be imported, or has no such class.
    """
    where, _, name = trainer.rpartition(":")
    file = trainer_file(trainer, config_path)
    try:
        module = _from_file(file) if file else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{where}.".startswith(f"{missing}.") and not file:
            raise UsageError(_no_module(trainer, missing, config_path)) from None
        raise UsageError(
            f"The trainer cannot be imported: {error_location(error, file)}"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        classes = [k for k, v in vars(module).items() if isinstance(v, type)]
        raise UsageError(_no_class(trainer, str(file or where), classes))
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UsageError(
            f"trainer is {trainer!r}, which is not a subclass of ctl.{base.__name__}: derive it "
            "from that, or name another."
        )
    return found


def trainer_source(cls: type) -> str:
    """The source of the modules that a trainer's class and its bases are from, but for ctl's."""
    modules = {base.__module__ for base in cls.__mro__}
    own = [m for m in modules if m.split(".")[0] not in ("ctl", "orbit", "tensorflow", "builtins")]
    found = []
    for name in own:
        try:
            found.append(inspect.getsource(sys.modules[name]))
        except (OSError, TypeError, KeyError):  # made in a notebook, or in C
            continue
    return "\n".join(found)


def error_location(error: BaseException, file: pathlib.Path | None = None) -> str:
    """Where an error arose and what it is: "file:line: Kind: message".

    The line is the innermost one that is neither ctl's, nor Python's, nor an installed package's.

    Args:
        error: what was raised.
        file: what was being read, to name where no line is known.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _is_library(f.filename)]
    if own:
        return f"{_short(own[-1].filename)}:{own[-1].lineno}: {_what(error)}"
    return f"{_short(str(file))}: {_what(error)}" if file else _what(error)


def _what(error: BaseException) -> str:
    if isinstance(error, UsageError):
        return str(error)
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # a file may raise what cannot be shown
        lines = []
    return overrides.explain(error) or ": ".join([type(error).__name__, *lines[:1]])


def _config_file(path: str) -> pathlib.Path:
    file = pathlib.Path(path)
    if os.path.isdir(file):  # pathlib raises where a name is too long
        raise UsageError(f"--config={path} is a folder: name a file in it.")
    if not os.path.isfile(file):
        siblings = {p.name: str(p) for p in sorted(file.parent.glob("*.py"))}
        hint = errors.did_you_mean(file.name, siblings) if len(siblings) < 20 else ""
        raise UsageError(f"There is no config file {path}{hint or ': mend the path.'}")
    if file.suffix != ".py":
        raise UsageError(
            f"--config={path} is not a Python file: a config is a .py file with a get_config()."
        )
    return file


def _check_arguments(get_config: Callable[..., Any], arguments: list[str], path: str) -> None:
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError:
        mend = f"leave out :{arguments[0]}" if arguments else f"write --config={path}:VALUE"
        takes = "takes no argument" if arguments else "wants an argument"
        raise UsageError(f"get_config() of {path} {takes}: {mend}.") from None


def _candidates(path: str, config_path: str) -> list[pathlib.Path]:
    return [pathlib.Path(config_path).parent / path, pathlib.Path(path)]


def _check_package(trainer: str, config_path: str) -> None:
    """Refuses a module whose package is not there, without importing it."""
    top = trainer.rpartition(":")[0].partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise UsageError(_no_module(trainer, top, config_path))


def _check_source(file: pathlib.Path, trainer: str) -> None:
    """Refuses a file that does not parse, or that binds the class' name nowhere."""
    name = trainer.rpartition(":")[-1]
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"The trainer cannot be imported: {error_location(error, file)}") from None
    nodes = list(ast.walk(tree))
    classes = [n.name for n in nodes if isinstance(n, ast.ClassDef)]
    functions = [n.name for n in nodes if isinstance(n, ast.FunctionDef)]
    stored = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    imported = [n.asname or n.name for n in nodes if isinstance(n, ast.alias)]
    bound = {*classes, *functions, *stored, *imported}
    if name not in bound and not bound & {"*", "__getattr__"}:
        raise UsageError(_no_class(trainer, str(file), classes))


def _no_module(trainer: str, missing: str, config_path: str) -> str:
    module, _, name = trainer.rpartition(":")
    file = module.replace(".", "/") + ".py"
    hint = ": mend the name, or install it."
    if any(os.path.isfile(candidate) for candidate in _candidates(file, config_path)):
        hint = f": did you mean {file}:{name}?"
    return f"trainer is {trainer!r}, and there is no module {missing}{hint}"


def _no_class(trainer: str, where: str, classes: list[str]) -> str:
    name = trainer.rpartition(":")[-1]
    hint = errors.did_you_mean(name, classes) or ": it has no class at all."
    return f"trainer is {trainer!r}, and {where} has no class {name}{hint}"


def _from_file(file: pathlib.Path) -> ModuleType:
    """Runs a file as a module: once, though it be config and trainer both."""
    path = file.resolve()
    state = (str(path), path.stat().st_mtime_ns, path.stat().st_size)
    if state in _loaded:
        return _loaded[state]
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importable(path.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _loaded[state] = module
    return module


def _module_name(path: pathlib.Path) -> str:
    """A name in sys.modules that no other file has: a config and a trainer may be called alike."""
    name = stem = f"ctl_experiment_{path.stem}"
    number = 1
    while name in sys.modules and sys.modules[name].__file__ != str(path):
        number += 1
        name = f"{stem}_{number}"
    return name


@contextlib.contextmanager
def _importable(folder: pathlib.Path) -> Iterator[None]:
    """Lets what runs inside import the neighbours of an experiment's file."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def _is_library(filename: str) -> bool:
    if filename.startswith(("<", _CTL, *_STANDARD)):
        return True
    return any(part in filename for part in _INSTALLED)


def _short(filename: str) -> str:
    here = os.getcwd() + os.sep
    return filename.removeprefix(here)
