"""Options that several benchmarks share; importing them loads no JAX."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeVar

import typer

_T = TypeVar("_T")
LAUNCH_ORDER = "CUDA_DEVICE_MAX_CONNECTIONS"  # "1": GPUs start kernels in the order of their launch

#: Not lab/results, whose tables are written with `--out` alone.
RESULTS = Path("out") / "bench"


def launched_in_order(mesh: _T) -> _T:
    """Of an option that names a mesh: GPUs start kernels in the order of their launch, unless the environment differs.

    A sum over devices then starts before the product that is to run beside it, which would take all of a GPU first:
    docs/multiple-gpus.md has what that gains. CUDA reads it when JAX first looks for a device: later than this.
    """
    if mesh:
        os.environ.setdefault(LAUNCH_ORDER, "1")
    return mesh


LengthsOption = Annotated[list[int] | None, typer.Option(help="Tokens of context.")]
ModelsOption = Annotated[
    list[str] | None, typer.Option(help="llama3.1-8b, qwen2.5-7b, llama3.1-70b, llama-d256 (a layer) or tiny.")
]
BackendOption = Annotated[str, typer.Option(help="Kernel backend.")]
WindowOption = Annotated[int, typer.Option(help="Local tokens that every query keeps.")]
RepeatsOption = Annotated[int, typer.Option(help="Timed runs of each call.", min=1)]
CopyBytesOption = Annotated[int, typer.Option(help="Bytes of the array that the device copies.", min=2**20)]
MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="Devices that share the model: those on data x those on model.",
        show_default="one device",
        callback=launched_in_order,
    ),
]
NameOption = Annotated[str, typer.Option(help="Name of the result files.")]
OutOption = Annotated[Path, typer.Option(help="Folder of the results.")]
