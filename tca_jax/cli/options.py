"""Options that several commands share, each declared once. Importing them loads no JAX."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from typer import Argument, Option

from tca_jax.cli.errors import naming_options
from tca_jax.engine.generation_config import GenerationConfig, option_help

_T = TypeVar("_T")
LARGEST = 2**31 - 1  # tokens: positions are 32-bit integers
_NOT_COMMON = ("num_samples", "stop_token_ids", "logprobs")  # fields of `GenerationConfig`
LAUNCH_ORDER = "CUDA_DEVICE_MAX_CONNECTIONS"  # "1": GPUs start kernels in the order of their launch


def launched_in_order(mesh: _T) -> _T:
    """Callback of a mesh: GPUs start kernels in the order of their launch, unless the environment has another value."""
    # A sum over devices then starts before the product that is to run beside it (docs/multiple-gpus.md has the gain).
    # CUDA reads the variable when JAX first looks for a device: later than this.
    if mesh:
        os.environ.setdefault(LAUNCH_ORDER, "1")
    return mesh


ModelArgument = Annotated[str, Argument(help="Alias, Hub id, folder or GGUF file.", show_default=False)]
ProfileOption = Annotated[
    str | None, Option(help='Profile folder, or "shipped" for a shipped model.', show_default="full attention")
]
AttentionOption = Annotated[
    str | None, Option(help="Attention of prompts in eight bits: fp8 (Hopper GPUs).", show_default="in dtype")
]
DtypeOption = Annotated[
    str | None, Option(help="float32, bfloat16 or float16.", show_default="float32 on a CPU, else bfloat16")
]
WeightsOption = Annotated[
    str | None, Option(help="Store projections and MLP in eight bits: fp8.", show_default="as the checkpoint does")
]
KVOption = Annotated[str | None, Option("--kv", help="Store the KV cache in eight bits: fp8.", show_default="in dtype")]
MeshOption = Annotated[
    str | None,
    Option(
        "--mesh",
        help="Devices that share the model: those on data x those on model, such as 1x4.",
        show_default="one device",
        callback=launched_in_order,
    ),
]
BackendOption = Annotated[str, Option(help="Kernels: auto, xla, triton or mosaic.")]
SeedOption = Annotated[int, Option(help="Other seeds, other draws.", min=0, max=2**32 - 1)]
SystemOption = Annotated[str | None, Option(help="System message; the chat template puts it first.")]
ContextOption = Annotated[
    Path | None, Option(help="Folder of what was read before (chat --save-context).", show_default=False)
]
SavedProfileArgument = Annotated[
    str, Argument(help='Folder that a profile was saved to; "shipped", or a shipped model\'s name.', show_default=False)
]
ShareTokensOption = Annotated[
    int | None,
    Option(help="Prompt length of the budgets' shares.", show_default="that of calibration", min=1, max=LARGEST),
]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON object on standard output.")]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Options for a model's method, precision, mesh and backend."""

    profile: ProfileOption = None
    kept: Annotated[
        float | None,
        Option(help="Share of the tokens that stays, under predicted worth.", show_default="that of the profile"),
    ] = None
    method: Annotated[
        str | None,
        Option(
            help='Registered name, options behind a colon, pairs by "+", such as streaming:window=512.',
            show_default="that of the profile",
        ),
    ] = None
    dtype: DtypeOption = None
    weights: WeightsOption = None
    kv: KVOption = None
    attention: AttentionOption = None
    mesh: MeshOption = None
    backend: BackendOption = "auto"


def with_options(command: Callable[..., _T]) -> Callable[..., _T]:
    """The command with fields of the dataclasses that it takes, such as `GenerationConfig`, as options of its own."""
    declared = inspect.signature(command, eval_str=True).parameters
    groups = {name: _fields_of(each) for name, each in declared.items() if dataclasses.is_dataclass(each.annotation)}
    parameters = [field for name, each in declared.items() for field in groups.get(name, [each])]
    spread = inspect.Signature(parameters)

    @functools.wraps(command)
    def called(*args: Any, **options: Any) -> _T:
        bound = spread.bind(*args, **options)
        bound.apply_defaults()
        given = dict(bound.arguments)
        for name, fields in groups.items():
            own = {field.name: given.pop(field.name) for field in fields}
            with naming_options(*own):
                given[name] = declared[name].annotation(**own)
        return command(**given)

    called.__signature__ = spread  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _fields_of(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Parameters in place of one that is annotated with a dataclass: its fields."""
    kind = parameter.annotation
    hints = get_type_hints(kind, include_extras=True)
    if kind is GenerationConfig:  # what every command with answers has
        given, words = hints | {"stop": list[str]}, option_help()
        common = [name for name in given if name not in _NOT_COMMON]
        hints = {name: Annotated[given[name], Option(help=words.get(name))] for name in common}
    return [
        parameter.replace(name=field.name, annotation=hints[field.name], default=field.default)
        for field in dataclasses.fields(kind)
        if field.name in hints
    ]
