"""The program that compiles HLO by libtpu. It runs in an environment of its own, without ctl.

python compiler.py REQUEST.json

A request names the HLO's file, the topology, its cores and the chips of a machine, the effort from
-1 (quick) to 0 (the default), and the seconds that it may take. It prints one line of JSON: what the
compiler found, or `error`.
"""

import json
import math
import re
import signal
import sys
import time
from typing import Any, NamedTuple

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8}
_REDUCED = re.compile(r" = (.*?) all-reduce(?:-start)?\(")
_TENSOR = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")


class Parts(NamedTuple):
    """jax's private parts that are used here."""

    topology: Any
    to_stablehlo: Any
    device_list: Any
    options: Any
    context: Any
    ir: Any
    np: Any


def main(path: str) -> dict[str, Any]:
    """Compiles what a request asks for.

    Args:
        path: of the request.

    Returns:
        What was found, or `error` and its `kind`.
    """
    with open(path) as file:
        request = json.load(file)
    signal.alarm(request["seconds"])  # ends the process, inside the compiler too
    try:
        parts = private_parts()
    except (ImportError, AttributeError) as error:
        return {"error": str(error), "kind": "versions"}
    with open(request["hlo"], "rb") as file:
        hlo = file.read()
    start = time.monotonic()
    try:
        devices = _devices(parts, request)
        with parts.context() as context, parts.ir.Location.unknown(context):
            module = parsed(parts, hlo)
            executable = devices[0].client.compile(
                module, parts.device_list(tuple(devices)), _options(parts, request)
            )
    except Exception as error:  # XLA's errors have no common base, and all of them are told
        return {"error": str(error), "kind": type(error).__name__, "seconds": _since(start)}
    return {**_found(executable), "seconds": _since(start)}


def private_parts() -> Parts:
    """Jax's private parts, all of them, so that another version fails here and by name."""
    from jax._src import compiler  # type: ignore[import-not-found]
    from jax._src.interpreters import mlir  # type: ignore[import-not-found]
    from jax._src.lib import _jax  # type: ignore[import-not-found]
    from jax.experimental import topologies  # type: ignore[import-not-found]
    from jaxlib.mlir import ir  # type: ignore[import-not-found]
    import numpy as np

    return Parts(
        topology=topologies.get_topology_desc,
        to_stablehlo=_jax.mlir.hlo_to_stablehlo,
        device_list=_jax.DeviceList,
        options=compiler.get_compile_options,
        context=mlir.make_ir_context,
        ir=ir,
        np=np,
    )


def _devices(parts: Parts, request: dict[str, Any]) -> Any:
    devices = parts.topology(
        platform="tpu",
        topology_name=request["topology"],
        chips_per_host_bounds=tuple(request["host_chips"]),
    ).devices
    if len(devices) != request["cores"]:
        raise ValueError(f"the compiler sees {len(devices)} cores, want {request['cores']}")
    return devices


def _options(parts: Parts, request: dict[str, Any]) -> Any:
    cores = request["cores"]
    options = parts.options(
        num_replicas=cores,
        num_partitions=1,
        device_assignment=parts.np.arange(cores).reshape(cores, 1),
    )
    options.executable_build_options.exec_time_optimization_effort = request["effort"]
    return options


def parsed(parts: Parts, hlo: bytes) -> Any:
    """TensorFlow's HLO as a module, without what jax's newer dialect does not take."""
    ir = parts.ir
    module = ir.Module.parse(parts.to_stablehlo(hlo))
    copies, comparisons = [], []

    def look(op: Any) -> Any:
        if op.name == "mhlo.copy":
            copies.append(op)
        elif op.name == "stablehlo.compare" and "compare_type" in op.attributes:
            comparisons.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    for op in copies:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()
    for op in comparisons:
        element = ir.RankedTensorType(op.operands[0].type).element_type
        whole = isinstance(element, ir.IntegerType)
        if whole and "TOTALORDER" in str(op.attributes["compare_type"]):
            del op.attributes["compare_type"]  # an order of floats, which integers have no need of
    return module


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
