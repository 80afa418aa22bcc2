"""Writes what docs/speed.md shows of a run: `python -m benchmarks.gpu.tables gpu.jsonl FILE`."""

from collections.abc import Mapping, Sequence
import json
import pathlib
import sys
from typing import Any

from benchmarks import results, variants
from benchmarks.results import Table

_CTL = f"{variants.CTL}loop{variants.RESIDENT}"
_TOKENS = 1024  # per example
# Label, the line of ctl (part, name), its key and unit; the other program, its line, units per example.
_ROWS = [
    (
        f"Transformer like GPT-2 small, bfloat16, batch {batch}",
        ("transformer", f"bfloat16, batch {batch}", "tokens_per_second", "tokens"),
        (f"PyTorch, {way}", "torch", f"transformer, bfloat16{note}, {way}", _TOKENS),
    )
    for batch, note in ((64, ", batch 64"), (32, ""))
    for way in ("compiled", "eager")
] + [
    (
        "ResNet-50, float16, batch 128, `data.placement=device`",
        ("resnet50", f"resnet50_float16 {_CTL}", "examples_per_second", "images"),
        (f"PyTorch, {way}", "torch", f"resnet50, float16, {way}", 1),
    )
    for way in ("compiled", "eager")
] + [
    (
        "MNIST, float32, batch 256, `data.placement=device`",
        ("mnist_float32", f"mnist256 {_CTL}", "examples_per_second", "examples"),
        ("JAX, `lax.scan`", "jax", "scan, float32, data on the device", 1),
    )
]  # fmt: skip


def main(lines_path: str, path: str) -> None:
    """Writes the tables of a file of lines, with the machine that they name."""
    lines = [json.loads(line) for line in pathlib.Path(lines_path).read_text().splitlines()]
    lines = [line for line in lines if "name" in line and "error" not in line]
    environment = {line["name"]: line for line in lines if line["part"] == "environment"}
    host = {key: environment["host"][key] for key in ("processor", "cores")}
    (gpu,) = environment["tensorflow"]["gpus"]
    versions = {"tensorflow": environment["packages"]["tensorflow"]}
    for line in lines:
        if line["part"] in ("torch", "jax") and line["name"].startswith(f"{line['part']} "):
            name, version, *_ = line["name"].replace(",", "").split()
            versions[name] = version
    results.save(
        pathlib.Path(path),
        make_tables(lines),
        samples="medians of 3 to 7 windows in one start",
        versions=versions,
        host={"gpu": f"one {gpu['device_name']}", **host},
        command="python -m benchmarks.gpu --out gpu.jsonl",
    )


def make_tables(lines: Sequence[Mapping[str, Any]]) -> dict[str, Table]:
    """Returns the tables; a row that was not measured is missing.

    Args:
        lines: the results, with their parts. The last one with a name counts.
    """

    def find(part: str, name: str) -> Mapping[str, Any]:
        """Returns the result of a part whose model and name end with `name`."""
        texts = [(f"{line.get('model', '')} {line['name']}", line) for line in lines]
        found = [e for text, e in texts if e["part"] == part and text.endswith(f" {name}")]
        return found[-1] if found else {}

    speed, memory, step = [], [], []
    for label, (part, name, key, unit), (other, other_part, other_name, factor) in _ROWS:
        of_ctl, of_other = find(part, name), find(other_part, other_name)
        if of_ctl and of_other:
            rate, other_rate = of_ctl[key], of_other["examples_per_second"] * factor
            ratio = round(rate / other_rate, 2)
            speed.append([label, f"{rate:,} {unit}", other, other_rate, ratio])
    for batch, note in ((64, ", batch 64"), (32, "")):
        of_ctl = find("transformer", f"bfloat16, batch {batch}")
        of_torch = find("torch", f"transformer, bfloat16{note}, compiled")
        if of_ctl:
            peaks = [of_ctl["peak_gib"], of_torch.get("peak_gib")]
            memory.append([f"batch {batch}", of_ctl["milliseconds_per_step"], *peaks])
    kinds = find("transformer", "bfloat16, batch 64, kernels").get("milliseconds", {})
    if kinds:
        complete = find("transformer", "bfloat16, batch 64")["milliseconds_per_step"]
        step = [list(pair) for pair in sorted(kinds.items(), key=lambda pair: -pair[1])]
        step.append(["between kernels", round(complete - sum(kinds.values()), 1)])
    titles = [(title, None) for title in ("model", "ctl, per second", "other program")]
    memory_titles = [("Transformer", None), ("ctl, ms per step", 1), ("ctl, GiB", 1)]
    tables = {
        "speed": Table([*titles, ("per second", 0), ("ctl is N times as fast", 2)], speed),
        "memory": Table([*memory_titles, ("PyTorch, compiled, GiB", 1)], memory),
        "step": Table([("part of a step of the Transformer, batch 64", None), ("ms", 1)], step),
    }
    return {name: table for name, table in tables.items() if table.rows}


if __name__ == "__main__":
    main(*sys.argv[1:])
