"""What XLA's compiler makes of complete steps of several GPUs: kernels, all-reduces, and what overlaps.

    python -m benchmarks.collectives --jax_python PATH --result benchmarks/results/collectives.json

It needs no GPU: TensorFlow traces the programs of GPUs on logical CPUs, and JAX compiles them
for H100. PATH is a Python as benchmarks/collectives_compiler.py requires it. Nothing is run, so there
are no times.
"""

import json
import pathlib
import subprocess
import tempfile

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks import flags as command_line
from benchmarks import results
from benchmarks.gpu import several
import ctl
from ctl import testing
from ctl.built.inner_loop import loop_of
from ctl.rows import replicas
from experiments.trainers import char_lm
from tests.support import gpu_programs

_COMPILER = pathlib.Path(__file__).with_name("collectives_compiler.py")
_OVERLAP = "--xla_gpu_enable_latency_hiding_scheduler=true"
_SMALL = "--xla_gpu_all_reduce_combine_threshold_bytes=65536"
_STEPS = 4
# Name, GPUs, whether each gradient has an all-reduce of its own, flags of XLA.
_FORMS = (
    ("1 GPU", 1, False, ()),
    ("2 GPUs", 2, False, ()),
    ("2 GPUs, latency-hiding scheduler", 2, False, (_OVERLAP,)),
    ("2 GPUs, an all-reduce per gradient", 2, True, ()),
    ("the same, latency-hiding scheduler", 2, True, (_OVERLAP,)),
    ("the same, combined up to 64 KiB", 2, True, (_OVERLAP, _SMALL)),
    ("the same, without that scheduler", 2, True, (_SMALL,)),
)


class Text(several.Trainer):
    """The Transformer of experiments/char_lm.py with two small layers, on random bytes."""

    def build_model(self):
        model = char_lm.Transformer(layers=2, heads=2, width=64, context=32, recompute="")
        model(np.zeros([2, 32], np.int32))
        return model

    def build_dataset(self, split, input_context):
        draw = np.random.default_rng(0)
        x = draw.integers(0, 256, (64, 33)).astype(np.int32)
        return ctl.data.arrays({"x": x[:, :-1], "label": x[:, 1:]})

    def per_example_loss(self, batch, outputs):
        return tf.reduce_mean(super().per_example_loss(batch, outputs), axis=-1)


def export(cls, gpus: int, *, one_by_one: bool) -> bytes:
    """Returns the program of an inner loop of a replica, as XLA would get it on GPUs."""

    def make(strategy):
        return cls(
            strategy=strategy,
            global_batch_size=8,
            optimizer=lambda: tf_keras.optimizers.Adam(1e-3),
            options=ctl.TrainerOptions(xla="loop", clip=ctl.Clip(global_norm=1.0)),
        )

    if gpus == 1:
        loop = loop_of(make(tf.distribute.OneDeviceStrategy("CPU:0")))
        loop.prepare(_STEPS)
        chunk = next(iter(loop.training_data(0)))
        with loop.step.trace_scope():
            program = loop.compiled_loop.usual_program()
            ir = program.experimental_get_compiler_ir(chunk, tf.constant(0))
            return ir(stage="hlo_serialized")
    together = replicas._sum
    if one_by_one:
        replicas._sum = lambda values: [v for value in values for v in together([value])]
    try:
        with gpu_programs.pretended(gpus) as strategy:
            return gpu_programs.export(make(strategy), _STEPS).hlo
    finally:
        replicas._sum = together


def compile_apart(python: str, hlo: bytes, gpus: int, flags) -> dict:
    """Compiles a program in a process of the other Python."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "program.hlo").write_bytes(hlo)
        command = [python, str(_COMPILER), str(folder / "program.hlo"), str(gpus)]
        done = subprocess.run(
            [*command, str(folder / "dump"), *flags], capture_output=True, text=True, check=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    flags = command_line.parse(__doc__, jax_python="python3", result=pathlib.Path)
    testing.split_cpu(2)
    rows = []
    for name, gpus, one_by_one, xla_flags in _FORMS:
        row = [name]
        for cls in (several.Trainer, Text):
            hlo = export(cls, gpus, one_by_one=one_by_one)
            found = compile_apart(flags.jax_python, hlo, gpus, xla_flags)
            during = found["during"]
            spread = dict.fromkeys((min(during), max(during))) if during else ()
            row += [found["kernels"], len(during), " to ".join(map(str, spread))]
        rows.append(row)
        print(json.dumps(row), flush=True)
    columns = [("program of complete steps", None)]
    for model in ("CNN", "Transformer"):
        columns += [(f"{model}: kernels", 0), ("all-reduces", 0), ("kernels during each", None)]
    if flags.result:
        results.save(
            flags.result,
            {"programs": results.Table(columns, rows)},
            samples="figures of XLA's compiler for H100, nothing was run",
            packages=["tensorflow-cpu"],
            versions={"jaxlib": "0.7.0"},
            command="python -m benchmarks.collectives",
        )


if __name__ == "__main__":
    main()
