"""The program that compiles HLO by libtpu. It runs in an environment of its own, without ctl.

python compiler.py REQUEST.json

A request names the HLO's file, the topology, its cores and the chips of a machine, and the effort
from -1 (quick) to 0 (the default). It prints one line of JSON: what the compiler found, or `error`.
"""

import collections
import json
import math
import re
import sys
import time
from typing import Any

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8}
_REDUCED = re.compile(r" = (.*?) all-reduce(?:-start)?\(")
_TENSOR = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")


def main(path: str) -> dict[str, Any]:
    """Compiles what a request asks for.

    Args:
        path: of the request.

    Returns:
        What was found, or `error` and its `kind`.
    """
    with open(path) as file:
        request = json.load(file)
    try:
        parts = _parts()
    except (ImportError, AttributeError) as error:
        return {"error": str(error), "kind": "versions"}
    with open(request["hlo"], "rb") as file:
        hlo = file.read()
    start = time.monotonic()
    try:
        devices = _devices(parts, request)
        with parts.make_context() as context, parts.ir.Location.unknown(context):
            module = parts.ir.Module.parse(parts.jax.mlir.hlo_to_stablehlo(hlo))
            _adapt(module, parts.ir)
            executable = devices[0].client.compile(
                module, parts.jax.DeviceList(tuple(devices)), _options(parts, request)
            )
    except Exception as error:  # XLA's errors have no common base, and all of them are told
        return {"error": str(error), "kind": type(error).__name__, "seconds": _since(start)}
    return {**_found(executable), "seconds": _since(start)}


def _parts() -> Any:
    """Jax's private parts, all of them, so that another version fails here and by name."""
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jax.experimental import topologies
    from jaxlib.mlir import ir
    import numpy as np

    parts = collections.namedtuple("Parts", "topologies jax options ir make_context np")
    _ = (_jax.mlir.hlo_to_stablehlo, _jax.DeviceList)
    return parts(
        topologies.get_topology_desc,
        _jax,
        compiler.get_compile_options,
        ir,
        mlir.make_ir_context,
        np,
    )


def _devices(parts: Any, request: dict[str, Any]) -> Any:
    devices = parts.topologies(
        platform="tpu",
        topology_name=request["topology"],
        chips_per_host_bounds=tuple(request["host_chips"]),
    ).devices
    if len(devices) != request["cores"]:
        raise ValueError(f"the compiler sees {len(devices)} cores, want {request['cores']}")
    return devices


def _options(parts: Any, request: dict[str, Any]) -> Any:
    cores = request["cores"]
    options = parts.options(
        num_replicas=cores,
        num_partitions=1,
        device_assignment=parts.np.arange(cores).reshape(cores, 1),
    )
    options.executable_build_options.exec_time_optimization_effort = request["effort"]
    return options


def _adapt(module: Any, ir: Any) -> None:
    """Takes out of TensorFlow's HLO what jax's newer dialect does not take."""
    copies, comparisons = [], []

    def look(op: Any) -> Any:
        if op.name == "mhlo.copy":
            copies.append(op)
        elif op.name == "stablehlo.compare":
            comparisons.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    for op in copies:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()
    for op in comparisons:
        element = ir.RankedTensorType(op.operands[0].type).element_type
        kind = op.attributes["compare_type"] if "compare_type" in op.attributes else ""
        if isinstance(element, ir.IntegerType) and "TOTALORDER" in str(kind):
            del op.attributes["compare_type"]  # an order of floats, which integers have no need of


def _found(executable: Any) -> dict[str, Any]:
    memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
    sizes = reduced(executable.hlo_modules()[0].to_string())
    arguments = memory.argument_size_in_bytes
    # An output that takes an argument's place costs nothing.
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "peak_bytes": max(memory.peak_memory_in_bytes, arguments),
        "argument_bytes": arguments,
        "output_bytes": outputs,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "flops": cost.get("flops", 0.0),
        "bytes": cost.get("bytes accessed", 0.0),
        "all_reduces": len(sizes),
        "all_reduce_bytes": sum(sizes),
    }


def reduced(text: str) -> list[int]:
    """The bytes of each all-reduce of a compiled module, whose text is given."""
    return [
        sum(
            _BYTES.get(kind, 4) * math.prod(int(n) for n in shape.split(",") if n)
            for kind, shape in _TENSOR.findall(result)
        )
        for result in _REDUCED.findall(text)
    ]


def _since(start: float) -> float:
    return round(time.monotonic() - start, 2)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
