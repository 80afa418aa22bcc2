"""Compiles a program of several replicas for H100 GPUs, without a GPU; `benchmarks.collectives` runs it.

JAX_PYTHON collectives_compiler.py PROGRAM.hlo REPLICAS DUMP_FOLDER [XLA_FLAG...]

It prints a line of JSON: the kernels of a step, its all-reduces, and the kernels that are scheduled
between the start and the end of each. The environment has jax, jaxlib, jax-cuda12-plugin and
jax-cuda12-pjrt 0.7.0, and ptxas of nvidia-cuda-nvcc-cu12 in its PATH.
"""

import json
import os
import pathlib
import re
import sys

# Without command buffers, so that the schedule shows the kernels, and without what is tuned on a GPU.
_FLAGS = (
    "--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_enable_command_buffer=", "--xla_dump_hlo_as_text",
)  # fmt: skip
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_KERNEL = re.compile(r" (?:fusion|custom-call|convolution|dot)\(")
_AOT_COMPILE = pathlib.Path(__file__).resolve().parents[1] / "ctl/modes/aot_compile"


def compile_program(hlo: bytes, replicas: int) -> None:
    """Compiles a program; XLA writes it into the folder of the flag --xla_dump_to."""
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jax.experimental import topologies
    import numpy as np

    sys.path.insert(0, str(_AOT_COMPILE))
    from compiler import parse_module

    shape = f"1x1x{replicas}"
    devices = topologies.get_topology_desc("", "cuda", target_config=_H100, topology=shape).devices
    with mlir.make_ir_context():
        assignment = np.arange(replicas).reshape(-1, 1)
        options = compiler.get_compile_options(replicas, 1, device_assignment=assignment)
        module = mlir.module_to_bytecode(parse_module(hlo))
        devices[0].client.compile(module, _jax.DeviceList(tuple(devices)), options)


def describe(text: str) -> dict:
    """Counts kernels and all-reduces of a compiled program, in the order of its schedule."""
    during = []
    for body in re.split(r"\n\}\n", text):
        lines = [line.strip() for line in body.splitlines() if " = " in line]
        for i, line in enumerate(lines):
            if " all-reduce-start(" not in line:
                continue
            name = line.split(" = ")[0].removeprefix("ROOT ")
            end = next(
                k for k, other in enumerate(lines)
                if " all-reduce-done(" in other and f"({name})" in other
            )  # fmt: skip
            during.append(sum(bool(_KERNEL.search(each)) for each in lines[i + 1 : end]))
    return {"kernels": len(_KERNEL.findall(text)), "during": during}


if __name__ == "__main__":
    program, replicas, dump, *flags = sys.argv[1:]
    os.environ["XLA_FLAGS"] = " ".join([*_FLAGS, f"--xla_dump_to={dump}", *flags])
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    compile_program(pathlib.Path(program).read_bytes(), int(replicas))
    (compiled,) = pathlib.Path(dump).glob("*after_optimizations.txt")
    print(json.dumps(describe(compiled.read_text())))
