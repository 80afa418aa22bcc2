"""Draws replicas.svg and killed.svg: loss curves of 1, 2 and 4 replicas, and of a killed run.

python docs/images/curves.py

A small network with dropout learns 500 rows, in 60 steps of 50 rows, in float32. For the second
picture, the process of a run kills itself by SIGKILL at two steps, and is started again.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile

_FILE = pathlib.Path(__file__).resolve()
_ROOT = _FILE.parents[2]
sys.path.insert(0, str(_ROOT))

import svg  # noqa: E402

_STEPS = 60
_KILLS = (17, 41)
_LEFT, _TOP, _WIDTH, _HEIGHT = 50, 40, 560, 190
EXPERIMENT = """
import ctl
import numpy as np
import tensorflow as tf
import tf_keras

random = np.random.default_rng(0)
x = random.normal(size=(500, 8)).astype(np.float32)
label = np.tanh(x @ random.normal(size=8)).astype(np.float32)
label += 0.3 * random.normal(size=500).astype(np.float32)


class Line(ctl.StandardTrainer):
    def build_model(self):
        dense = tf_keras.layers.Dense
        return tf_keras.Sequential([dense(16, "tanh"), tf_keras.layers.Dropout(0.2), dense(1)])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": x, "label": label})

    def per_example_loss(self, batch, outputs):
        return tf.square(batch["label"] - outputs[:, 0])


def get_config():
    return ctl.config(
        trainer="experiment.py:Line",
        data=dict(global_batch_size=50),
        optimizer=dict(learning_rate=0.01),
        train=dict(steps=60, steps_per_loop=1, checkpoint_interval=5),
        eval=dict(splits=[]),
    )
"""
# Prints each loss with all its digits; the process kills itself after a step.
RUN = """
import os, signal, sys
import ctl
replicas, workdir, last = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
runtime = dict(strategy="mirrored", logical_devices=replicas) if replicas > 1 else {}
from experiment import get_config
config = get_config()
config.runtime.update(runtime)
with ctl.Run(config, workdir, print_lines=False) as run:
    while run.step < 60:
        print(run.step + 1, repr(float(run.train(steps=1)["loss"])), flush=True)
        if run.step == last:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def losses(folder: pathlib.Path, name: str, replicas: int, last: int = 0) -> dict[int, float]:
    """Trains in a process of its own, which may end by SIGKILL; returns step -> loss."""
    environment = {**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{folder}"}
    command = [sys.executable, "-c", RUN, str(replicas), name, str(last)]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == (-signal.SIGKILL if last else 0), done.stderr
    pairs = [line.split() for line in done.stdout.splitlines()]
    return {int(step): float(loss) for step, loss in pairs}


def measure() -> dict[str, object]:
    """Returns the curves, and the parts of the killed run."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        (folder / "experiment.py").write_text(EXPERIMENT)
        replicas = {count: losses(folder, f"runs/{count}", count) for count in (1, 2, 4)}
        parts = [losses(folder, "runs/killed", 1, last) for last in (*_KILLS, 0)]
    return {"replicas": replicas, "parts": parts}


def axes() -> list[str]:
    """Returns the axes of a picture."""
    bottom, right = _TOP + _HEIGHT, _LEFT + _WIDTH
    return [
        svg.curve([(_LEFT, _TOP), (_LEFT, bottom), (right, bottom)], ""),
        svg.text(_LEFT - 8, _TOP + 10, "loss", "end muted"),
        svg.text(_LEFT - 8, bottom + 4, "0", "end muted"),
        svg.text(right, bottom + 20, f"step {_STEPS}", "end muted"),
    ]


def place(points: dict[int, float], top: float) -> list[tuple[float, float]]:
    """Returns the places of losses in a picture."""
    return [
        (_LEFT + _WIDTH * step / _STEPS, _TOP + _HEIGHT * (1 - loss / top))
        for step, loss in sorted(points.items())
    ]


def difference(measured: dict[str, object]) -> float:
    """Returns the largest relative difference between the losses on several replicas and on one."""
    whole = measured["replicas"][1]
    curves = measured["replicas"].values()
    return max(abs(curve[step] / whole[step] - 1) for curve in curves for step in whole)


def assert_same(measured: dict[str, object]) -> None:
    """Raises an error if a loss of the killed run has other bits than that of the undisturbed one."""
    killed = {step: loss for part in measured["parts"] for step, loss in part.items()}
    assert killed == measured["replicas"][1]


def draw(measured: dict[str, object]) -> None:
    """Draws both pictures."""
    replicas, parts = measured["replicas"], measured["parts"]
    whole = replicas[1]
    top = 1.05 * max(whole.values())
    title = (
        f"1, 2 and 4 replicas: the losses differ by {difference(measured):.0e} at most (float32)"
    )
    elements = [svg.text(_LEFT, 22, title, "bold"), *axes()]
    looks = (
        ("sa", 'style="stroke-width:7;opacity:.3"'),
        ("sb", 'style="stroke-width:3.5;opacity:.7"'),
        ("sc", 'stroke-dasharray="2 5" style="stroke-width:2"'),
    )
    for i, ((kind, extra), (count, points)) in enumerate(zip(looks, replicas.items(), strict=True)):
        elements.append(svg.curve(place(points, top), kind, extra))
        y = 70 + 22 * i
        elements.append(svg.curve([(430, y), (470, y)], kind, extra))
        elements.append(svg.text(480, y + 5, f"{count} replica" + "s" * (count > 1)))
    svg.write(_FILE.with_name("replicas.svg"), title, 640, 260, elements)

    assert_same(measured)
    title = f"Killed at steps {_KILLS[0]} and {_KILLS[1]}: all {_STEPS} losses have the same bits"
    elements = [svg.text(_LEFT, 22, title, "bold"), *axes()]
    elements.append(svg.curve(place(whole, top), *looks[0]))
    for kind, part in zip(("sb", "sc", "sb"), parts, strict=True):
        elements.append(svg.curve(place(part, top), kind, 'style="stroke-width:2"'))
    for last in _KILLS:
        x = _LEFT + _WIDTH * last / _STEPS
        elements += [
            svg.curve([(x, _TOP + 6), (x, _TOP + _HEIGHT)], "sb", 'stroke-dasharray="4 4"'),
            svg.text(x + 5, _TOP + 16, "kill -9", "b"),
        ]
    elements += [
        svg.curve([(250, 92), (290, 92)], *looks[0]),
        svg.text(300, 97, "left alone"),
        svg.curve([(250, 114), (290, 114)], "sc", 'style="stroke-width:2"'),
        svg.text(300, 119, "killed, resumed"),
    ]
    svg.write(_FILE.with_name("killed.svg"), title, 640, 260, elements)


if __name__ == "__main__":
    draw(measure())
