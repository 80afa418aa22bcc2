"""The program that compiles HLO with libtpu. It runs in its own environment, which has no ctl.

python compiler.py REQUEST.json

REQUEST.json holds: the path of the HLO, the topology, its number of cores, the chips of one host,
the effort from -1 (quick) to 0 (the default), and a time limit in seconds. The program prints one
line of JSON: the compiler's figures, or `error`.
"""

import json
import math
import re
import signal
import sys
import time
from typing import Any

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8}
_ALL_REDUCE = re.compile(r" = (.*?) all-reduce(?:-start)?\(")
_TENSOR = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")


def main(path: str) -> dict[str, Any]:
    """Compiles one program.

    Args:
        path: the file with the request.

    Returns:
        The compiler's figures, or `error`.
    """
    with open(path) as file:
        request = json.load(file)
    signal.alarm(request["seconds"])  # ends the process even inside the compiler
    import jax  # type: ignore[import-not-found]  # noqa: F401 - not part of the time

    start = time.monotonic()
    try:
        answer = _compile(request)
    except Exception as error:  # XLA's errors have no common base class; report each
        answer = {"error": str(error)}
    return {**answer, "seconds": round(time.monotonic() - start, 2)}


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    from jax._src import compiler  # type: ignore[import-not-found]
    from jax._src.interpreters import mlir  # type: ignore[import-not-found]
    from jax._src.lib import _jax  # type: ignore[import-not-found]
    from jax.experimental import topologies  # type: ignore[import-not-found]
    import numpy as np

    cores = request["cores"]
    devices = topologies.get_topology_desc(
        platform="tpu",
        topology_name=request["topology"],
        chips_per_host_bounds=tuple(request["host_chips"]),
    ).devices
    if len(devices) != cores:
        raise ValueError(f"the compiler reports {len(devices)} cores, but the slice has {cores}")
    assignment = np.arange(cores).reshape(cores, 1)
    options = compiler.get_compile_options(cores, 1, device_assignment=assignment)
    options.executable_build_options.exec_time_optimization_effort = request["effort"]
    with open(request["hlo"], "rb") as file, mlir.make_ir_context():
        module = parse_module(file.read())
        executable = devices[0].client.compile(module, _jax.DeviceList(tuple(devices)), options)
    return _collect_figures(executable)


def parse_module(hlo: bytes) -> Any:
    """Parses TensorFlow's HLO in the current context, and removes what jax's newer dialect rejects."""
    from jax._src.lib import _jax
    from jaxlib.mlir import ir  # type: ignore[import-not-found]

    module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(hlo))
    copies, comparisons = [], []

    def visit(op: Any) -> Any:
        if op.name == "mhlo.copy":
            copies.append(op)
        elif op.name == "stablehlo.compare" and "compare_type" in op.attributes:
            comparisons.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for op in copies:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()
    for op in comparisons:
        element = ir.RankedTensorType(op.operands[0].type).element_type
        is_integer = isinstance(element, ir.IntegerType)
        if is_integer and "TOTALORDER" in str(op.attributes["compare_type"]):
            del op.attributes["compare_type"]  # an order of floats, which integers must not have
    return module


def _collect_figures(executable: Any) -> dict[str, Any]:
    memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
    sizes = measure_all_reduces(executable.hlo_modules()[0].to_string())
    arguments = memory.argument_size_in_bytes
    return {
        "peak_bytes": max(memory.peak_memory_in_bytes, arguments),
        "argument_bytes": arguments,
        "flops": cost.get("flops", 0.0),
        "bytes": cost.get("bytes accessed", 0.0),
        "all_reduces": len(sizes),
        "all_reduce_bytes": sum(sizes),
    }


def measure_all_reduces(text: str) -> list[int]:
    """Returns the size in bytes of each all-reduce in the text of a compiled module."""
    return [
        sum(
            _BYTES.get(dtype, 4) * math.prod(int(n) for n in shape.split(",") if n)
            for dtype, shape in _TENSOR.findall(result)
        )
        for result in _ALL_REDUCE.findall(text)
    ]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
