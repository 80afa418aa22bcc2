"""ctl new NAME: creates a small project with a trainer, a config, tests, a README and CI.

    ctl new digits && cd digits && pytest && ctl config.py
    ctl new reviews --kind=text

Its data is generated, so that everything works before you change anything. The files are copies of those
in ctl/commands/project_template: the files of the kind replace the shared ones.
"""

from collections.abc import Sequence
import importlib.metadata
import json
import pathlib
import re
import shutil
import tempfile

from ctl.commands import Parser
from ctl.errors import UsageError, print_line
from ctl.version import DISTRIBUTION, FOLDER

TEMPLATE = pathlib.Path(__file__).parent / "project_template"
KINDS = ("images", "segmentation", "text", "tabular", "gan")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def main(arguments: Sequence[str]) -> int:
    """Creates the project and prints what to do with it; returns the exit code.

    Raises:
        UsageError: the name is not allowed, the folder exists already, or it cannot be written.
    """
    parser = Parser("ctl new", "ctl new NAME --kind=text", __doc__)
    parser.add_argument("name", metavar="NAME", help="the folder to create, such as digits")
    parser.add_argument(
        "--kind", choices=KINDS, default=KINDS[0], help="what the examples are; images by default"
    )
    flags = parser.parse_args(list(arguments))
    path = pathlib.Path(flags.name)
    _check(path)
    names = _create(path, flags.kind)
    print_line(f"Created {path} with {', '.join(names)}.")
    print_line(f"Test and train: cd {path} && pytest && ctl config.py")
    return 0


def list_files(kind: str) -> dict[str, pathlib.Path]:
    """Returns path in a project of a kind -> file of the template."""
    files = {}
    for folder in (TEMPLATE / "shared", TEMPLATE / kind):
        for source in folder.rglob("*"):
            # pip also compiles the Python files of the template.
            if source.is_file() and "__pycache__" not in source.parts:
                # The package has dot_NAME instead of .NAME, since tools skip hidden files.
                parts = source.relative_to(folder).parts
                files["/".join(re.sub("^dot_", ".", part) for part in parts)] = source
    return dict(sorted(files.items()))


def _check(path: pathlib.Path) -> None:
    if not _NAME.fullmatch(path.name):
        raise UsageError(
            f"{path.name!r} is not the name of a project: use letters, digits, - and _, and begin "
            "with a letter, such as ctl new digits."
        )
    try:
        exists, has_parent = path.exists() or path.is_symlink(), path.parent.is_dir()
    except OSError as error:  # such as a name that is too long
        raise UsageError(f"{path} cannot be created ({error.strerror}).") from None
    if exists:
        raise UsageError(f"{path} exists already, and was not changed: choose another name.")
    if not has_parent:
        raise UsageError(f"{path.parent} is not a folder: create it first.")


def _create(path: pathlib.Path, kind: str) -> list[str]:
    """Writes the files into a temporary folder, which becomes the project when it is complete."""
    values = {"PROJECT_NAME": path.name, "CTL_REQUIREMENT": _requirement()}
    placeholders = re.compile("|".join(values))
    files, temporary = list_files(kind), None
    try:
        temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        for name, source in files.items():
            text = source.read_text(encoding="utf-8")
            text = placeholders.sub(lambda match: values[match[0]], text)
            target = temporary / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp allows one user only
        temporary.rename(path)
    except OSError as error:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        raise UsageError(f"{path} cannot be created ({error.strerror}).") from None
    return list(files)


def _requirement() -> str:
    """Returns the requirement by which pip installs the same ctl from the same place."""
    package = f"{DISTRIBUTION}[cpu]"
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return f"{package} @ {FOLDER.parent.as_uri()}"
    text = installed.read_text("direct_url.json")
    if not text:  # from a package index
        return f"{package}=={installed.version}"
    origin = json.loads(text)  # as in PEP 610
    if "vcs_info" in origin:
        info = origin["vcs_info"]
        return f"{package} @ {info['vcs']}+{origin['url']}@{info['commit_id']}"
    return f"{package} @ {origin['url']}"
