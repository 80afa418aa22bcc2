"""Damages each file of a complete run in turn, and runs the program's commands on it.

    python -m tests.support.faults.damage --stride=5 --json=damage.json

A try is survived if each command ends with exit code 0, or with 1 or 2 and one line, and every file of a
checkpoint is still there.
"""

from collections.abc import Callable, Iterator
import pathlib
import shutil
from typing import Any

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
COMMANDS = {
    "report": ("report", FOLDER),
    "diff": ("diff", FOLDER, "other"),
    "eval": ("eval", *COMMAND),
    "export": ("export", *COMMAND),
    "export best": ("export", *COMMAND, "--checkpoint=best"),
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
        if file.parts[0] not in ("export", "summaries")
    ]
    yield len(points)
    for file, name in points[offset::stride]:
        faults = []
        for command, arguments in COMMANDS.items():
            shutil.rmtree(FOLDER)
            shutil.copytree("other", FOLDER)
            path = pathlib.Path(FOLDER) / file
            path.write_bytes(DAMAGES[name](path.read_bytes()))
            before = _checkpoints()
            code, _, err = run(*arguments)
            if code is None or len(err.splitlines()) > (code != 0):
                faults.append(f"{command}: {code} {err.strip()[-200:]}")
            elif lost := before - _checkpoints():
                faults.append(f"{command}: deleted {', '.join(sorted(lost))}")
        yield {"where": str(file), "error": name, "fault": "; ".join(faults)}


def _checkpoints() -> set[str]:
    return {
        path.name
        for name in ("checkpoints", "best")
        for path in pathlib.Path(FOLDER, name).iterdir()
    }


if __name__ == "__main__":
    io_faults.main_in_process(loop)
