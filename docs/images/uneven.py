"""Draws uneven.svg: how one update of three examples on two replicas moves a weight.

python docs/images/uneven.py

The programs run on two virtual devices of the CPU. Lightning needs PyTorch: its number is that of the
table in docs/compared.md, which benchmarks/comparisons/torch_loops.py has measured.
"""

import pathlib
import re
import sys

_FILE = pathlib.Path(__file__).resolve()
_ROOT = _FILE.parents[2]
sys.path.insert(0, str(_ROOT))

import svg  # noqa: E402
import tensorflow as tf  # noqa: E402

from benchmarks import uneven_split as programs  # noqa: E402


def measure() -> dict[str, float]:
    """Returns how far each program moves the weight."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    page = (_ROOT / "docs/compared.md").read_text()
    titles, update = (
        re.search(rf"^\| {row}.*", page, re.M)[0].split(" | ") for row in ("case", "update of w")
    )
    return {
        "mean of the three gradients": programs.true_update(),
        "ctl": programs.ctl_update(),
        "Keras fit": programs.tf_keras_fit_update(),
        "Orbit": programs.orbit_example_update(),
        "Lightning": float(update[titles.index("Lightning")]),
    }


def draw(updates: dict[str, float]) -> None:
    """Draws one bar per program."""
    right = updates["mean of the three gradients"]
    elements = [svg.text(0, 18, "One update of 3 examples on 2 replicas moves w by", "bold")]
    for i, (name, update) in enumerate(updates.items()):
        y, width = 34 + 30 * i, 22 * update
        kind = "c" if abs(update - right) < 1e-4 else "b"
        elements += [
            svg.text(200, y + 16, name, "end"),
            svg.box(210, y, width, 22, kind),
            svg.text(202 + width, y + 16, f"{update:.1f}", "end on bold"),
        ]
        if kind == "b":
            elements.append(svg.text(220 + width, y + 16, f"{update / right - 1:+.0%}", "muted"))
    title = "ctl moves the weight by 14, other programs by 16.5"
    svg.write(_FILE.with_suffix(".svg"), title, 640, 190, elements)


if __name__ == "__main__":
    draw(measure())
