"""Examples per second of ctl's loops, of hand-written loops, and of other frameworks.

The processes and windows are those of `benchmarks.loops`. Here one variant is measured after the other,
the most important ones first: the machine is expected to be idle, and each figure is known at once.
"""

import contextlib
import json
import pathlib
import statistics
import subprocess
import time

from benchmarks import loops, models, variants
from benchmarks.gpu.parts import Report
from benchmarks.windows import request

_CTL = variants.CTL
_LOOPS = (
    f"{_CTL}loop{variants.RESIDENT}",
    f"{_CTL}loop",
    variants.LOOP_XLA,
    f"{_CTL}step",
    "tf_keras fit, best options",
    "Keras 3 fit, best options",
    variants.TUTORIAL,
    f"{_CTL}off",
    variants.LOOP,
    "tf_keras fit",
    "Keras 3 fit",
)
_SMALL_LOOPS = (_LOOPS[0], f"{_CTL}off", variants.TUTORIAL)
_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def measure_mnist_float32(report: Report) -> None:
    """The MNIST network in float32."""
    model, names = ("empty", _SMALL_LOOPS) if report.small else ("mnist256", _LOOPS)
    _measure(report, model, names)


def measure_resnet50(report: Report) -> None:
    """ResNet-50 with its data on the device, and from the memory of the host."""
    if report.small:
        _measure(report, "resnet50_small", [f"{_CTL}off"])
        return
    for model in ("resnet50_float16", "resnet50_bfloat16"):
        _measure(report, model, _LOOPS[:2], windows=3, seconds=2.0)


def measure_jax(report: Report) -> None:
    """The MNIST network by `jax.lax.scan`, with its data on the device."""
    _run_script(report, report.flags.jax_python, "jax_scan", "jax, flax, optax")


def measure_torch(report: Report) -> None:
    """PyTorch: the MNIST network and ResNet-50."""
    _run_script(report, report.flags.torch_python, "torch_speed", "torch")


def _measure(report: Report, model: str, names, *, windows: int = 5, seconds: float = 0.6) -> None:
    """Reports each variant as soon as it is measured."""
    if report.small:
        windows, seconds = 1, 0.05
    with contextlib.ExitStack() as stack:
        # All processes import TensorFlow at the same time, and then wait for their first window.
        workers = {name: stack.enter_context(loops.worker(name, model)) for name in names}
        for name, process in workers.items():
            with report.attempt(name):
                batch = models.MODELS[model].batch
                first = request(name, process, 0.0)
                request(name, process, seconds)
                answers = [request(name, process, seconds) for _ in range(windows)]
                rates = [batch * answer["steps"] / answer["seconds"] for answer in answers]
                report(
                    name,
                    model=model,
                    examples_per_second=round(statistics.median(rates)),
                    windows=[round(rate) for rate in rates],
                    first_window_seconds=round(first["seconds"], 2),
                    host_peak_mib=round(answers[-1]["peak_mib"]),
                )
            process.kill()  # it would keep its memory on the GPU


def _run_script(report: Report, python: str, script: str, modules: str) -> None:
    """Runs a script that imports neither ctl nor TensorFlow, and reports its lines."""
    module = script.split("_")[0]
    check = subprocess.run([python, "-c", f"import {modules}"], capture_output=True, text=True)
    if check.returncode:
        report(module, skipped=f"{python} cannot import {modules}: pass --{module}_python")
        return
    command = [python, "-m", f"benchmarks.comparisons.{script}"]
    command += ["--small"] if report.small else []
    process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    start = time.monotonic()
    for line in process.stdout:
        report(**json.loads(line))
    if process.wait():
        seconds = time.monotonic() - start
        report(module, error=f"exit code {process.returncode} after {seconds:.0f} s")
