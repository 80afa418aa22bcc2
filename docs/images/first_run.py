"""Draws first_run.svg: what `ctl digits.py` of README.md prints in a terminal.

python docs/images/first_run.py

The run reads MNIST of experiments/data, which `keras.datasets.mnist.load_data` would download.
"""

import os
import pathlib
import pty
import re
import subprocess
import sys
import tempfile

import check
from rich.text import Text

_FILE = pathlib.Path(__file__).resolve()
_ROOT = _FILE.parents[2]
_PROGRAM = """
import sys
import keras
import numpy as np
import ctl
from ctl import main

rows = [
    ctl.data.idx("{root}/experiments/data/mnist", split).gather(range(count))
    for split, count in (("train", 60_000), ("eval", 10_000))
]
arrays = tuple((r["image"].numpy().astype(np.uint8), r["label"].numpy()) for r in rows)
keras.datasets.mnist.load_data = lambda: arrays
sys.exit(main.run(["ctl", "digits.py"]))
"""


def run() -> str:
    """Returns everything that the run writes to its terminal."""
    (program,) = re.findall(
        r"^```python\n(.*?)^```", (_ROOT / "README.md").read_text(), re.M | re.S
    )
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "digits.py").write_text(program)
        command = [sys.executable, "-c", _PROGRAM.format(root=_ROOT)]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "COLUMNS": "100"}
        terminal, child_end = pty.openpty()
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=child_end, stderr=child_end
        )
        os.close(child_end)
        output = b""
        while chunk := _read(terminal):
            output += chunk
        assert child.wait() == 0, output.decode()
    return output.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux reports the end of a terminal's output as an error
        return b""


def lines(output: str) -> list[Text]:
    """Returns the lines that stay, and the progress bar as it was before its last quarter."""
    frames = [
        Text.from_ansi(re.sub(r"\x1b\[\d*[AK]|\x1b\[\?25.", "", each))
        for each in re.split(r"[\r\n]+", output)
    ]
    stay = [
        frame for frame in frames if re.match(r"one_device|image: |train |eval |Done", frame.plain)
    ]
    bars = [frame for frame in frames if "s left" in frame.plain]
    for line in stay:
        if waited := re.search(r" \| waited \d+% for input", line.plain):  # of a busy machine
            line.right_crop(len(line) - waited.start())
    return [*stay[:-3], *bars[-1:], *stay[-3:]]


if __name__ == "__main__":
    _FILE.with_suffix(".svg").write_text(
        check.draw_lines("ctl digits.py", lines(run()), width=112), encoding="utf-8"
    )
