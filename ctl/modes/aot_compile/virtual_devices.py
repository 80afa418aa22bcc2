"""Runs the program of several replicas on as many virtual devices of the CPU.

python virtual_devices.py DEVICES < FOLDERS

It runs in the compiler's environment, with at most DEVICES replicas. Each line of the input is a folder:

    program.hlo     the program of a replica, a serialized HLO module
    arguments.npz   I_R: argument I of replica R; I_R_N: the same in step N, if the steps have their own
    request.json    the number of `replicas` and of `steps`

In each step, an argument becomes the output that aliases it. The arguments after the last step are
written to results.npz, as I_R. Then a line of JSON follows: {}, or the `error`.
"""

import json
import os
import pathlib
import re
import sys
from typing import Any

_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}, may-alias\)")


def run(folder: pathlib.Path) -> dict[str, Any]:
    """Runs the program of a folder; returns the `error`, or nothing."""
    from compiler import parse_module  # type: ignore[import-not-found]  # of this folder
    from jax._src import compiler  # type: ignore[import-not-found]
    from jax._src.interpreters import mlir  # type: ignore[import-not-found]
    from jax._src.lib import _jax, xla_client  # type: ignore[import-not-found]
    import numpy as np

    request = json.loads((folder / "request.json").read_text())
    arguments = dict(np.load(folder / "arguments.npz"))
    hlo, replicas = (folder / "program.hlo").read_bytes(), range(request["replicas"])
    header = xla_client.XlaComputation(hlo).as_hlo_text().splitlines()[0]
    aliases = {int(out or 0): int(argument) for out, argument in _ALIAS.findall(header)}
    devices = _devices(len(replicas))
    try:
        with mlir.make_ir_context():
            assignment = np.arange(len(replicas)).reshape(-1, 1)
            options = compiler.get_compile_options(len(replicas), 1, device_assignment=assignment)
            program = devices[0].client.compile_and_load(
                parse_module(hlo), _jax.DeviceList(tuple(devices)), options
            )
        count = 1 + max(int(name.split("_")[0]) for name in arguments)
        for n in range(request["steps"]):
            given = [
                [arguments.get(f"{i}_{r}_{n}", arguments.get(f"{i}_{r}")) for r in replicas]
                for i in range(count)
            ]
            results = program.execute_sharded([_distribute(parts, devices) for parts in given])
            outputs = results.disassemble_into_single_device_arrays()
            for out, i in aliases.items():
                arguments |= {f"{i}_{r}": np.asarray(outputs[out][r]) for r in replicas}
    except Exception as error:  # XLA's errors have no common base class; report each
        return {"error": str(error)}
    last = {name: value for name, value in arguments.items() if name.count("_") == 1}
    np.savez(folder / "results.npz", **last)
    return {}


def _devices(count: int) -> list[Any]:
    import jax  # type: ignore[import-not-found]

    jax.config.update("jax_enable_x64", True)
    return jax.devices("cpu")[:count]


def _distribute(parts: Any, devices: Any) -> Any:
    """Returns an array that has another value on each device, which jax does not compare."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec  # type: ignore[import-not-found]
    import numpy as np

    sharding = NamedSharding(Mesh(np.array(devices), ("replica",)), PartitionSpec())
    on_devices = [jax.device_put(part, to) for part, to in zip(parts, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(parts[0].shape, sharding, on_devices)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[1]}"
    for line in sys.stdin:
        print(json.dumps(run(pathlib.Path(line.strip()))), flush=True)
