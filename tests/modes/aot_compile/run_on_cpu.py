"""Runs an exported program on the CPU, again and again: python run_on_cpu.py FOLDER STEPS.

It runs in the compiler's environment. FOLDER holds program.hlo, arguments.npz (arg_0, arg_1, ...) and
the compiler's own file; what an output takes the place of is the next step's argument. The arguments
after the last step go to results.npz.
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
    from jax._src.lib import xla_client

    hlo = (folder / "program.hlo").read_bytes()
    text = xla_client.XlaComputation(hlo).as_hlo_text()
    places = {int(out): int(arg) for out, arg in re.findall(r"\{(\d+)\}: \((\d+),", text)}
    parts = compiler.private_parts()
    device = jax.devices("cpu")[0]
    with parts.context() as context, parts.ir.Location.unknown(context):
        module = compiler.parsed(parts, hlo)
        options = parts.options(1, 1, parts.np.zeros((1, 1), int))
        program = device.client.compile_and_load(module, parts.device_list((device,)), options)
    held = np.load(folder / "arguments.npz")
    values = [held[f"arg_{i}"] for i in range(len(held.files))]
    for _ in range(steps):
        outputs = program.execute([jax.device_put(value, device) for value in values])
        for out, arg in places.items():
            values[arg] = np.asarray(outputs[out])
    np.savez(folder / "results.npz", **{f"arg_{i}": v for i, v in enumerate(values)})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
