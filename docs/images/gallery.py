"""Draws a picture of each experiment, from a run of it.

    python docs/images/gallery.py               # all of them, in about ten minutes of CPU time
    python docs/images/gallery.py vae ppo       # some of them

Each run is that of the experiment's config, but for what the functions below say.
"""

import base64
from collections.abc import Mapping, Sequence
import importlib
import os
import pathlib
import sys
import tempfile
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
import tf_keras

_FILE = pathlib.Path(__file__).resolve()
_ROOT = _FILE.parents[2]
sys.path[:0] = [str(_ROOT), str(_FILE.parent)]

import svg  # noqa: E402

import ctl  # noqa: E402

_LEFT, _TOP, _WIDTH, _HEIGHT = 60, 40, 540, 180  # of a chart


def start(name: str, workdir: str | None = None, **changes: Any) -> ctl.Run:
    """Returns a run of an experiment, with changed keys of its config (`__` for the point)."""
    config = importlib.import_module(f"experiments.{name}").get_config()
    tf_keras.backend.clear_session()  # or the names of layers count those of the runs before
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return ctl.Run(config, workdir, print_lines=False)


def pixels(images: np.ndarray, columns: int) -> tf.Tensor:
    """Returns images [count, height, width] from 0 to 1 side by side, as uint8."""
    count, height, width = images.shape
    rows = np.reshape(images, [count // columns, columns, height, width])
    joined = rows.transpose(0, 2, 1, 3).reshape(-1, columns * width)
    return tf.constant(np.round(255 * np.clip(joined, 0, 1)).astype(np.uint8))


def picture(x: float, y: float, images: np.ndarray, columns: int, size: float) -> str:
    """Returns images in rows of `columns`, each `size` wide, with the ink of the page."""
    code = base64.b64encode(tf.io.encode_png(pixels(images, columns)[..., None]).numpy()).decode()
    width, height = size * columns, size * len(images) / columns
    return (
        f'<image x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'href="data:image/png;base64,{code}"/>'
    )


def chart(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], unit: str, bound: str = ""
) -> list[str]:
    """Returns curves by name: steps and values; `bound` names one that is a dashed line."""
    last = max(max(steps) for steps, _ in curves.values())
    low = min(0.0, *(min(values) for _, values in curves.values()))
    high = 1.05 * max(max(values) for _, values in curves.values())
    bottom, right = _TOP + _HEIGHT, _LEFT + _WIDTH
    elements = [
        svg.curve([(_LEFT, _TOP), (_LEFT, bottom), (right, bottom)], ""),
        svg.text(_LEFT - 8, bottom, f"{low:g}", "end muted"),
        svg.text(_LEFT - 8, _TOP + 12, f"{high / 1.05:.4g}", "end muted"),
        svg.text(right, bottom + 20, f"step {last:,.0f}", "end muted"),
        svg.text(_LEFT, bottom + 20, unit, "muted"),
    ]
    for i, (name, (steps, values)) in enumerate(curves.items()):
        kind = ["sa", "sb", "sc"][i]
        points = [
            (_LEFT + _WIDTH * x / last, bottom - _HEIGHT * (y - low) / (high - low))
            for x, y in zip(steps, values, strict=True)
        ]
        extra = 'stroke-dasharray="5 5"' if name == bound else 'style="stroke-width:2.5"'
        elements.append(svg.curve(points, kind, extra))
        elements.append(svg.text(right, bottom - 14 - 20 * i, name, f"end {kind[1:]}"))
    return elements


def of_history(run: ctl.Run, name: str) -> tuple[list[float], list[float]]:
    """Returns the steps that have a value of this name, and the values."""
    pairs = zip(run.history["step"], run.history[name], strict=True)
    steps, values = zip(*((s, v) for s, v in pairs if not np.isnan(v)), strict=True)
    return list(steps), list(values)


def examples(run: ctl.Run, count: int) -> dict[str, tf.Tensor]:
    """Returns the first examples of the evaluation, as the model gets them."""
    source = run.trainer.build_dataset("eval", tf.distribute.InputContext())
    return run.trainer.preprocess(source.gather(tf.range(count, dtype=tf.int64)))


def write(name: str, title: str, height: float, elements: Sequence[str]) -> None:
    """Writes the picture of an experiment."""
    path = _FILE.with_name(f"gallery-{name}.svg")
    svg.write(path, title, 640, height, [svg.text(20, 22, title, "bold"), *elements])
    print(f"{path.name}: {title} ({path.stat().st_size / 1024:.0f} KiB)", flush=True)


def mnist() -> None:
    """Shows test images that the network gets wrong."""
    with start("mnist") as run:
        run.train()
        accuracy = run.evaluate()["accuracy"]
        batch = examples(run, 10_000)
        predicted = np.argmax(run.trainer.model.predict(batch["image"], verbose=0), axis=1)
    label = batch["label"].numpy()
    wrong = np.flatnonzero(predicted != label)[:11]
    elements = [picture(20, 36, batch["image"].numpy()[wrong], 11, 54)]
    for place, row in enumerate(wrong):
        text = f"{label[row]} → {predicted[row]}"
        elements.append(svg.text(47 + 54 * place, 108, text, "middle muted"))
    title = f"{100 * accuracy:.2f} % of the test images are right; these are not (digit → answer)"
    write("mnist", title, 120, elements)


def char_lm() -> None:
    """Shows a text that the model makes up, which is meant for the summaries."""
    texts: list[str] = []
    keep = mock.patch.object(tf.summary, "text", lambda name, data, **_: texts.append(data))
    with keep, start("char_lm") as run:
        run.train()
        steps, losses = of_history(run, "eval/loss")
    lines = [line[:84] for line in texts[-1].splitlines() if line.strip()][:10]
    style = '<text xml:space="preserve" style="font-family:monospace;font-size:12px" '
    elements = [svg.text(20, 50 + 18 * i, line) for i, line in enumerate(lines)]
    elements = [element.replace("<text ", style) for element in elements]
    title = (
        f"Trained on Python's library for {steps[-1]:,.0f} steps (loss {losses[-1]:.2f}), it writes"
    )
    write("char_lm", title, 60 + 18 * len(lines), elements)


def vae() -> None:
    """Shows test images, their reconstructions, and samples."""
    with start("vae") as run:
        run.train()
        bound = run.evaluate()["loss"]
        batch = examples(run, 16)
        model = run.trainer.model
        mean, _ = tf.split(model.encoder(batch["image"]), 2, axis=1)
        rebuilt = tf.sigmoid(model.decoder(mean))
        latent = tf.random.stateless_normal([32, model.latent], seed=[0, 0])
        samples = tf.sigmoid(model.decoder(latent))
    images = np.concatenate([batch["image"], rebuilt])
    elements = [
        svg.text(20, 52, "test images, and what the model makes of them", "muted"),
        picture(20, 60, images, 16, 37),
        svg.text(20, 158, "samples", "muted"),
        picture(20, 166, samples.numpy(), 16, 37),
    ]
    write("vae", f"Bound of {bound:.1f} nats after 10 epochs", 252, elements)


def dcgan() -> None:
    """Shows the same samples after each epoch."""
    elements = []
    with start("dcgan") as run:
        trainer = run.trainer
        latent = tf.random.stateless_normal([14, trainer.options.model.latent], seed=[0, 0])
        for epoch in range(1, 5):
            run.train("1 epoch")
            with trainer.averaged_weights():
                samples = trainer.model(latent).numpy()[..., 0]
            distance = of_history(run, "eval/frechet_distance")[1][-1]
            y = 38 * epoch
            elements.append(picture(20, y, samples, 14, 36))
            elements.append(svg.text(536, y + 23, f"distance {distance:.1f}", "muted"))
    write("dcgan", "The same samples after 1, 2, 3 and 4 epochs", 200, elements)


def simclr() -> None:
    """Shows the accuracy of a linear classifier of the features, which are trained without labels."""
    with start("simclr") as run:
        run.evaluate()
        run.train()
        steps, values = of_history(run, "eval/probe_accuracy")
    values = [100 * value for value in values]
    title = f"A linear classifier of the features: {values[0]:.1f} %, then {values[-1]:.1f} %"
    write("simclr", title, 250, chart({"accuracy": (steps, values)}, "accuracy, %"))


def two_tower() -> None:
    """Shows the recall beside the best possible one."""
    with start("two_tower") as run:
        run.evaluate()
        run.train()
        curves = {
            "best possible": of_history(run, "eval/best_recall_at_100"),
            "recall": of_history(run, "eval/recall_at_100"),
        }
    recall, best = curves["recall"][1][-1], curves["best possible"][1][-1]
    title = (
        f"Recall at 100 of 10,000 items: {100 * recall:.1f} %; best possible: {100 * best:.1f} %"
    )
    write("two_tower", title, 250, chart(curves, "recall at 100", "best possible"))


def ppo() -> None:
    """Shows the length of the episodes."""
    with start("ppo", train__steps_per_loop=1) as run:
        run.train()
        steps, lengths = of_history(run, "steps")
        final = run.evaluate()["steps"]
    curves = {"solved": ([1, steps[-1]], [475, 475]), "steps of an episode": (steps, lengths)}
    title = f"A pole is balanced for {final:.0f} of 500 steps after {steps[-1]:.0f} batches"
    write("ppo", title, 250, chart(curves, "mean of 32 episodes", "solved"))


def distill() -> None:
    """Shows the accuracy of the student with and without its teacher, which trained for two epochs."""
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        with start("mnist", f"{folder}/mnist", train__steps="2 epochs") as run:
            run.train()
        teacher = dict(init__models__teacher=f"{folder}/mnist", init__checkpoint=f"{folder}/mnist")
        for name, weight in (("with its teacher", 1.0), ("without", 0.0)):
            changes = dict(model__teacher_weight=weight, eval__interval=100)
            with start("distill", **teacher, **changes) as run:
                run.train()
                steps, values = of_history(run, "eval/accuracy")
                curves[name] = steps, [100 * value for value in values]
    ends = [values[-1] for _, values in curves.values()]
    title = f"A student of 1,000 images: {ends[0]:.1f} % with its teacher, {ends[1]:.1f} % without"
    write("distill", title, 250, chart(curves, "accuracy, %"))


def fashion_resnet() -> None:
    """Shows the accuracy of 12 epochs; it needs the data of the experiment."""
    with start("fashion_resnet") as run:
        run.train()
        steps, values = of_history(run, "eval/accuracy")
    title = f"Accuracy {100 * values[-1]:.2f} % after {steps[-1]:,.0f} steps"
    write("fashion_resnet", title, 250, chart({"evaluation": (steps, values)}, "accuracy"))


_ALL = (mnist, char_lm, vae, dcgan, simclr, two_tower, ppo, distill, fashion_resnet)

if __name__ == "__main__":
    os.chdir(_ROOT / "experiments")  # where the paths of the configs begin
    for draw in _ALL:
        if not sys.argv[1:] or draw.__name__ in sys.argv[1:]:
            draw()
