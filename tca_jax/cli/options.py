"""Options that several commands share, each declared once. Importing them loads no JAX."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from tca_jax.cli.errors import naming_options
from tca_jax.errors import require

_T = TypeVar("_T")
LARGEST = 2**31 - 1  # tokens: positions are 32-bit integers
LAUNCH_ORDER = "CUDA_DEVICE_MAX_CONNECTIONS"  # "1": GPUs start kernels in the order of their launch


def launched_in_order(mesh: _T) -> _T:
    """Of an option that names a mesh: GPUs start kernels in the order of their launch, unless the environment differs.

    A sum over devices then starts before the product that is to run beside it, which would take all of a GPU first:
    docs/multiple-gpus.md has what that gains. CUDA reads it when JAX first looks for a device: later than this.
    """
    if mesh:
        os.environ.setdefault(LAUNCH_ORDER, "1")
    return mesh


ModelArgument = Annotated[str, typer.Argument(help="Alias, Hugging Face Hub id or local folder.", show_default=False)]
ProfileOption = Annotated[
    str | None,
    typer.Option(help='Profile folder, or "shipped" for a shipped model.', show_default="full attention"),
]
KeptOption = Annotated[
    float | None,
    typer.Option(help="Share of the tokens that stays, under predicted worth.", show_default="that of the profile"),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16.", show_default="float32 on a CPU, else bfloat16"),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(help="Store projections and MLP in eight bits: fp8.", show_default="as the checkpoint does"),
]
KVOption = Annotated[
    str | None, typer.Option("--kv", help="Store the KV cache in eight bits: fp8.", show_default="in dtype")
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="Devices that share the model: those on data x those on model, such as 1x4.",
        show_default="one device",
        callback=launched_in_order,
    ),
]
BackendOption = Annotated[str, typer.Option(help="Kernels: auto, xla, triton or mosaic.")]
SeedOption = Annotated[int, typer.Option(help="Other seeds, other draws.", min=0, max=2**32 - 1)]
SystemOption = Annotated[str | None, typer.Option(help="System message; the chat template puts it first.")]
ContextOption = Annotated[
    Path | None, typer.Option(help="Folder of what was read before (chat --save-context).", show_default=False)
]
SavedProfileArgument = Annotated[
    str,
    typer.Argument(
        help='Folder that a profile was saved to; "shipped", or a shipped model\'s name.', show_default=False
    ),
]
ShareTokensOption = Annotated[
    int | None,
    typer.Option(help="Prompt length of the budgets' shares.", show_default="that of calibration", min=1, max=LARGEST),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Options that say under which method a model runs, and on what."""

    profile: ProfileOption = None
    kept: KeptOption = None
    method: Annotated[
        str | None,
        typer.Option(
            help='Registered name, options behind a colon, pairs by "+", such as streaming:window=512.',
            show_default="that of the profile",
        ),
    ] = None
    dtype: DtypeOption = None
    weights: WeightsOption = None
    kv: KVOption = None
    mesh: MeshOption = None
    backend: BackendOption = "auto"


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """Options that say how answers are drawn and where they end, by their names in `tca_jax.generate`."""

    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1, max=LARGEST)] = 256
    min_new_tokens: Annotated[int, typer.Option(help="No stop token comes before so many tokens.", min=0)] = 0
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_k: Annotated[int | None, typer.Option(help="Keep the k best tokens.", min=1, max=LARGEST)] = None
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set of this probability.")] = None
    min_p: Annotated[float | None, typer.Option(help="Keep tokens this close to the best.")] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 discourages repetition.")] = None
    seed: SeedOption = 0
    stop: Annotated[
        list[str] | None, typer.Option(help="String that ends an answer; may be repeated.", show_default=False)
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of `tca_jax.generate` and `tca_jax.stream`.

        Raises:
            ValueError: a number is not allowed; names the option.
        """
        from tca_jax.engine.sampling import Sampling

        given = {**dataclasses.asdict(self), "stop": tuple(self.stop or ())}
        sampling = {field.name: given[field.name] for field in dataclasses.fields(Sampling)}
        with naming_options(*sampling):
            Sampling(**sampling)
        allowed = f"must be at most --max-new-tokens {self.max_new_tokens}"
        require(self.min_new_tokens <= self.max_new_tokens, f"--min-new-tokens {self.min_new_tokens}: {allowed}")
        require(all(given["stop"]), "--stop '': must be a string that is not empty")
        return given


def with_options(command: Callable[..., _T]) -> Callable[..., _T]:
    """The command with the fields of the dataclasses that it takes, such as `AnswerOptions`, as options of its own."""
    declared = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: each.annotation for name, each in declared.items() if dataclasses.is_dataclass(each.annotation)
    }
    parameters = [each for name, one in declared.items() for each in (_fields_of(one) if name in groups else [one])]
    spread = inspect.Signature(parameters)

    @functools.wraps(command)
    def called(*args: Any, **options: Any) -> _T:
        bound = spread.bind(*args, **options)
        bound.apply_defaults()
        given = dict(bound.arguments)
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
        return command(**given)

    called.__signature__ = spread  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _fields_of(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Parameters in place of one that is annotated with a dataclass: its fields."""
    hints = get_type_hints(parameter.annotation, include_extras=True)
    return [
        parameter.replace(name=field.name, annotation=hints[field.name], default=field.default)
        for field in dataclasses.fields(parameter.annotation)
    ]
