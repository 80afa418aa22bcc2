"""Draws check.svg: what `ctl check` prints about a step with a planted mistake.

python docs/images/check.py

This file is an experiment with that mistake, too: the mean of the losses is taken on each replica, as
if it were alone, and the optimizer sums the gradients of the replicas.
"""

from collections.abc import Sequence
import contextlib
import io
import pathlib
import re

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
import tensorflow as tf

import ctl
from ctl import main

_FILE = pathlib.Path(__file__).resolve()
_ROOT = _FILE.parents[2]
_COMMAND = "ctl check my_loop.py"
_STYLES = {"pass": "green", "warning": "yellow", "FAIL": "bold red"}
# Without the web font that rich names: a picture in a page must not load anything.
_TEMPLATE = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>{title}</title>
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class MyLoop(ctl.StandardTrainer):
    """Trains MNIST by a step that is right on one replica only."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])

    def build_dataset(self, split, input_context):
        return ctl.data.idx(_ROOT / "experiments/data/mnist", split)

    def replica_step(self, batch):
        with tf.GradientTape() as tape:
            logits = self.model(batch["image"], training=True)
            losses = tf.keras.losses.sparse_categorical_crossentropy(
                batch["label"], logits, from_logits=True
            )
            loss = tf.reduce_mean(losses)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss


def get_config():
    return ctl.config(trainer=f"{_FILE}:MyLoop", data=dict(global_batch_size=64))


def draw(printed: str) -> str:
    """Returns the picture of a terminal that shows the command and what it printed."""
    lines = []
    for line in printed.splitlines():
        word = line.partition(" ")[0]
        text = Text(line)
        text.stylize(_STYLES.get(word, ""), 0, len(word))
        if line.lstrip().startswith("->"):
            text = Text(line.strip(), "bold")
        lines.append(text)
    return draw_lines(_COMMAND, lines)


def draw_lines(command: str, lines: Sequence[Text], width: int = 104) -> str:
    """Returns the picture of a terminal with a command and lines."""
    console = Console(width=width, record=True, file=io.StringIO(), color_system="truecolor")
    console.print(Text(f"$ {command}", "bold"))
    for line in lines:
        console.print(line)
    template = _TEMPLATE.replace("{title}", f"What {command} prints")
    svg = console.export_svg(
        title="", theme=MONOKAI, code_format=template, unique_id="ctl", font_aspect_ratio=0.602
    )
    return re.sub(r"[ \t]+\n", "\n", svg)


def run_check() -> str:
    """Returns what `ctl check` prints about this file, without the line about the time."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main.run(["ctl", f"--config={_FILE}", "--mode=check"])
    assert code == 1, code
    return "\n".join(
        line for line in output.getvalue().splitlines() if not line.startswith("Checking ")
    )


if __name__ == "__main__":
    _FILE.with_suffix(".svg").write_text(draw(run_check()), encoding="utf-8")
