"""The MNIST network, ResNet-50 and a Transformer in PyTorch: eager, and compiled with CUDA graphs.

    python -m benchmarks.comparisons.torch_speed

The examples are on the device. One JSON line per variant goes to stdout. It imports neither ctl nor
TensorFlow, and is not part of the tests: they would have to install PyTorch.
"""

import json
import statistics
import sys
import time
import traceback

import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers.torch_loop import CharLm, Convolution, Mnist

SMALL = "--small" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOWS = 1 if SMALL else 5


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions next to a shortcut (He et al. 2016)."""

    def __init__(self, channels, width, stride):
        super().__init__()
        sizes = ((channels, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.layers = nn.ModuleList(Convolution(*size) for size in sizes)
        change = stride > 1 or channels != 4 * width
        self.shortcut = Convolution(channels, 4 * width, 1, stride) if change else nn.Identity()

    def forward(self, x):
        first, second, third = self.layers
        return torch.relu(third(torch.relu(second(torch.relu(first(x))))) + self.shortcut(x))


def resnet50():
    stem = Convolution(3, 64, 7, 2)
    layers, channels = [stem, nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if block == 0 and width > 64 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def mnist():
    return Mnist(0.5)


def transformer():
    """The size of benchmarks/gpu/transformer.py."""
    return CharLm(0.0, layers=12, heads=12, width=768, context=1024)


def measure(name, network, shape, classes, *, batch, steps, dtype, compiled):
    """Reports the median over windows of the examples per second."""
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    images = len(shape) > 1
    layout = torch.channels_last if images else torch.contiguous_format
    network = network.to(DEVICE, memory_format=layout)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=DEVICE == "cuda")
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype == torch.float16 and DEVICE == "cuda")
    # The label of an image is a number, that of a text a byte for each byte.
    size = (4 * batch, *shape)
    y = torch.randint(0, classes, size[:1] if images else size, device=DEVICE)
    x = torch.randn(*size, device=DEVICE) if images else torch.randint_like(y, classes)
    x = x.to(memory_format=layout)

    def loss_fn(x, y):
        with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
            return functional.cross_entropy(network(x).flatten(0, -2).float(), y.flatten())

    if compiled:
        torch.compiler.reset()  # it would compile for any shape, after those of another network
        loss_fn = torch.compile(loss_fn, mode="reduce-overhead", dynamic=False)
    rates = []
    for _ in range(WINDOWS + 2):
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            rows = torch.randint(0, len(x), (batch,), device=DEVICE)
            loss = loss_fn(x[rows].contiguous(memory_format=layout), y[rows])
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        synchronize()
        rates.append(steps * batch / (time.perf_counter() - start))
    line = {
        "name": f"torch {torch.__version__}, {name}",
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "examples_per_second": round(statistics.median(rates[2:])),
        "windows": [round(rate) for rate in rates[2:]],
    }
    if DEVICE == "cuda":
        line["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        torch.cuda.reset_peak_memory_stats()
    print(json.dumps(line), flush=True)


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main():
    image, size = (3, 224, 224), {"batch": 128, "steps": 20}
    digit, many = (1, 28, 28), {"batch": 256, "steps": 200}
    if SMALL:
        image, size, many = (3, 32, 32), {"batch": 2, "steps": 1}, {"batch": 8, "steps": 1}
    half = torch.bfloat16 if SMALL else torch.float16
    text, few = (1024,), {"batch": 32, "steps": 10, "dtype": torch.bfloat16}
    if SMALL:
        text, few = (32,), {**few, "batch": 2, "steps": 1}
    double = {**few, "batch": 2 * few["batch"]}
    networks = [
        ("resnet50, float16", resnet50, image, 1000, {**size, "dtype": half}),
        ("transformer, bfloat16", transformer, text, 256, few),
        ("transformer, bfloat16, batch 64", transformer, text, 256, double),
        ("mnist256, float32", mnist, digit, 10, {**many, "dtype": torch.float32}),
    ]
    for way in ("eager",) if SMALL else ("eager", "compiled"):
        for name, make, shape, classes, options in networks:
            run(f"{name}, {way}", make, shape, classes, compiled=way == "compiled", **options)


def run(name, make, *arguments, **options):
    """Measures a variant, and reports what fails, such as a compiler that is missing."""
    try:
        measure(name, make(), *arguments, **options)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"name": name, "error": repr(error)[:300]}), flush=True)


if __name__ == "__main__":
    main()
