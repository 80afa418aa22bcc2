"""Damages each file of a complete run in turn, and runs the program's commands and `ctl.load` on it.

    python -m tests.support.faults.damage --stride=5 --json=damage.json

A try is survived if each command ends with exit code 0, or with 1 or 2 and one line, and every file of
the run is still there.
"""

from collections.abc import Callable, Iterator
import pathlib
import shutil
import traceback
from typing import Any

import ctl
from ctl.errors import Failure, UsageError
from tests.support.faults import io_faults
from tests.support.faults.io_faults import COMMAND, FOLDER, run

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "a flipped bit": lambda content: _flip(content, len(content) // 3),
    "not UTF-8": lambda content: _insert(content, b"\xff\xfe"),
    "deep nesting": lambda content: b'{"step": ' * 50_000,
    "a huge number": lambda content: _insert(content, b"1" * 5_000),
    "no fields": lambda content: b"{}\n",
    "a list": lambda content: b"[1, 2]\n",
    "texts": lambda content: b'{"step": "x", "time": "y", "event": "start", "split": 3}\n',
}
BINARY = ("empty", "cut", "a flipped bit")  # the damages of files that ctl does not parse


def load() -> tuple[int | None, str, str]:
    """Loads the run; returns what `io_faults.run` returns of a command."""
    try:
        ctl.load(FOLDER)
    except (Failure, UsageError) as error:
        return 2, "", str(error)
    except BaseException:
        return None, "", traceback.format_exc()
    return 0, "", ""


COMMANDS: dict[str, tuple[str, ...] | Callable[[], Any]] = {
    "report": ("report", FOLDER),
    "diff": ("diff", FOLDER, "other"),
    "eval": ("eval", *COMMAND),
    "export": ("export", *COMMAND),
    "export best": ("export", *COMMAND, "--checkpoint=best"),
    "ctl.load": load,
    "train": COMMAND,
}


def _flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] if content else b"\x01"


def _insert(content: bytes, other: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + other + content[middle:]


def loop(stride: int, offset: int) -> Iterator[Any]:
    """Yields first the number of damages, then each try."""
    assert run(*COMMAND)[0] == 0
    shutil.copytree(FOLDER, "other")
    root = pathlib.Path("other")
    files = [path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file()]
    points = [
        (file, name)
        for file in files
        for name in DAMAGES
        if name in BINARY or file.parts[0] not in ("export", "summaries")
    ]
    yield len(points)
    for file, name in points[offset::stride]:
        faults = []
        for command, arguments in COMMANDS.items():
            shutil.rmtree(FOLDER)
            shutil.copytree("other", FOLDER)
            path = pathlib.Path(FOLDER) / file
            path.write_bytes(DAMAGES[name](path.read_bytes()))
            before = _names()
            code, _, err = arguments() if callable(arguments) else run(*arguments)
            if code is None or len(err.splitlines()) > (code != 0):
                faults.append(f"{command}: {code} {err.strip()[-200:]}")
            elif lost := before - _names():
                faults.append(f"{command}: deleted {', '.join(sorted(lost))}")
        yield {"where": str(file), "error": name, "fault": "; ".join(faults)}


def _names() -> set[str]:
    root = pathlib.Path(FOLDER)
    return {str(path.relative_to(root)) for path in root.rglob("*")}


if __name__ == "__main__":
    io_faults.main_in_process(loop)
