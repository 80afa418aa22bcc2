"""Runs an exported program repeatedly on the CPU: python run_on_cpu.py FOLDER STEPS.

It runs in the compiler's environment. FOLDER holds program.hlo, arguments.npz (arg_0, arg_1, ...) and
compiler.py. An output that aliases an argument replaces it in the next step. The arguments after the
last step are written to results.npz.
"""

import pathlib
import re
import sys

import numpy as np


def main(folder, steps):
    sys.path.insert(0, str(folder))
    import compiler
    import jax

    jax.config.update("jax_enable_x64", True)
    from jax._src.compiler import get_compile_options
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax, xla_client

    hlo = (folder / "program.hlo").read_bytes()
    text = xla_client.XlaComputation(hlo).as_hlo_text()
    aliases = {int(out): int(arg) for out, arg in re.findall(r"\{(\d+)\}: \((\d+),", text)}
    device = jax.devices("cpu")[0]
    with mlir.make_ir_context():
        module = compiler.parse_module(hlo)
        options = get_compile_options(1, 1, device_assignment=np.zeros((1, 1), int))
        program = device.client.compile_and_load(module, _jax.DeviceList((device,)), options)
    arguments = np.load(folder / "arguments.npz")
    values = [arguments[f"arg_{i}"] for i in range(len(arguments.files))]
    for _ in range(steps):
        outputs = program.execute([jax.device_put(value, device) for value in values])
        for out, arg in aliases.items():
            values[arg] = np.asarray(outputs[out])
    np.savez(folder / "results.npz", **{f"arg_{i}": v for i, v in enumerate(values)})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
