"""Lists the TPU slices that exist.

The compiler also accepts slices that nobody can rent, such as v5e:3x3, so they are listed here.

Sources: the shapes, chips and hosts are from Google's pages "TPU v2" to "TPU7x (Ironwood)" under
cloud.google.com/tpu/docs. Cores and their memory are as libtpu 0.0.42 reports them: the memory is the
limit named by its out-of-memory message, which is less than the memory on the data sheet.
"""

from collections.abc import Sequence
import dataclasses
import math

from ctl import errors
from ctl.errors import UsageError

DEFAULT = "v5e:2x2"
GIB = 2**30
_SMALL_2D = ("1x1", "2x2", "2x4")
_LARGE_2D = ("4x4", "4x8", "8x8", "8x16", "16x16")
_UNDER_A_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_CUBES = ("4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")


@dataclasses.dataclass(frozen=True)
class Generation:
    """One generation of TPUs.

    Attributes:
        name: as in v5e:2x2.
        cores: cores per chip as TensorFlow counts them; each is a replica.
        hbm_gib: memory available to the programs of one core.
        shapes: the slices that exist, by their chips along each axis.
        compiler_name: libtpu's name of the generation; "" for the same.
    """

    name: str
    cores: int
    hbm_gib: float
    shapes: tuple[str, ...]
    compiler_name: str = ""


_ROWS = (
    Generation("v2", 2, 7.48, ("2x2", "4x4", "8x8", "8x16", "16x16")),
    Generation("v3", 2, 15.48, ("2x2", *_LARGE_2D, "16x32", "32x32")),
    Generation("v4", 2, 15.25, (*_UNDER_A_CUBE, *_CUBES, "12x16x16")),
    Generation("v5e", 1, 15.75, (*_SMALL_2D, *_LARGE_2D)),
    Generation("v5p", 1, 95.74, (*_UNDER_A_CUBE, *_CUBES, "16x16x24")),
    Generation("v6e", 1, 31.25, (*_SMALL_2D, *_LARGE_2D)),
    Generation("v7x", 2, 94.75, (*_UNDER_A_CUBE, *_CUBES), "tpu7x"),
)
GENERATIONS = {generation.name: generation for generation in _ROWS}
_OTHER_NAMES = {"v5litepod": "v5e", "v5": "v5p", "tpu7x": "v7x", "v7": "v7x"}


@dataclasses.dataclass(frozen=True)
class TpuSlice:
    """One slice.

    Attributes:
        name: such as v5e:2x2.
        cores: number of cores, each of which runs one replica.
        hosts: number of machines.
        hbm_bytes: memory available to the programs of one core.
        compiler_name: libtpu's name of the slice.
        host_chips: the chips of one machine along x, y and z.
    """

    name: str
    cores: int
    hosts: int
    hbm_bytes: int
    compiler_name: str
    host_chips: tuple[int, int, int]


def parse_topology(names: str) -> list[TpuSlice]:
    """Parses a list of slices such as "v5e:2x2,v5p:2x2x1".

    Raises:
        UsageError: a slice does not exist, or is listed twice.
    """
    slices = [find_slice(name.strip()) for name in names.split(",")]
    for i, slice_ in enumerate(slices):
        if slice_ in slices[:i]:
            raise UsageError(f"--topology names {slice_.name} twice: name it once.")
    return slices


def find_slice(name: str) -> TpuSlice:
    """Finds a slice by a name such as v5e:2x2.

    Raises:
        UsageError: the slice does not exist; the message lists those that do.
    """
    generation_name, colon, shape = name.lower().partition(":")
    generation_name = _OTHER_NAMES.get(generation_name, generation_name)
    generation = GENERATIONS.get(generation_name)
    if generation is None or not colon:
        raise UsageError(
            f"--topology is {name!r}: write GENERATION:CHIPS, such as {DEFAULT}; the generations are "
            f"{', '.join(GENERATIONS)}."
        )
    if shape not in generation.shapes:
        hint = errors.did_you_mean(shape, generation.shapes)
        raise UsageError(f"There is no {generation.name} slice of {shape or 'no'} chips{hint}")
    return _make_slice(generation, shape)


def _make_slice(generation: Generation, shape: str) -> TpuSlice:
    sides = [int(side) for side in shape.split("x")]
    chips = math.prod(sides)
    host = _host_chips(sides)
    return TpuSlice(
        name=f"{generation.name}:{shape}",
        cores=chips * generation.cores,
        hosts=chips // math.prod(host),
        hbm_bytes=int(generation.hbm_gib * GIB),
        compiler_name=f"{generation.compiler_name or generation.name}:{shape}",
        host_chips=host,
    )


def _host_chips(sides: Sequence[int]) -> tuple[int, int, int]:
    """Returns the chips of one machine: four, except in one-machine slices of one or eight chips."""
    if list(sides) in ([1, 1], [2, 4]):
        return (sides[0], sides[1], 1)
    return (2, 2, 1)
