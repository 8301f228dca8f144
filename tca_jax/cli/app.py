"""The program: its commands, their setup, and their common exit."""

from __future__ import annotations

import io
import os
import sys
import warnings
from importlib.metadata import entry_points
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from tca_jax.cli.calibrate import calibrate
from tca_jax.cli.chat import chat
from tca_jax.cli.errors import UsageError, users_message
from tca_jax.cli.generate import generate
from tca_jax.cli.profiles import app as profile_app
from tca_jax.cli.serve import serve
from tca_jax.files import naming


class _Commands(TyperGroup):
    """The commands, with one way out: known errors are one line on standard error and exit code 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
            with naming("standard output"):
                sys.stdout.flush()  # a reader that has gone is noticed here, not in the interpreter's shutdown
        except (KeyboardInterrupt, typer.Abort):
            print("interrupted", file=sys.stderr)
            code = 130
        except BrokenPipeError:
            _flush_or_abandon_stdout()
            code = 1
        except UsageError as error:
            code = _fail(error.format_message())
        except Exception as error:
            message = users_message(error)
            if message is None or os.environ.get("TCA_JAX_TRACEBACK"):
                raise
            code = _fail(message)
            _flush_or_abandon_stdout()
        sys.exit(code)


def _flush_or_abandon_stdout() -> None:
    """Flushes standard output, or drops it, so that the interpreter's shutdown does not try again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> int:
    line = Text.assemble(("error:", "bold red"), " ", " ".join(message.split()))
    Console(stderr=True).print(line, soft_wrap=True)
    return 2


app = typer.Typer(name="tca-jax", cls=_Commands, pretty_exceptions_enable=False, rich_markup_mode="rich")
for _command in (generate, chat, serve, calibrate):
    app.command()(_command)
app.add_typer(profile_app, name="profile")
for _entry in entry_points(group="tca_jax.commands"):  # the lab's, and anybody's
    _entry.load()(app)


def run() -> None:
    """Runs the command that the arguments of the process name, and exits."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding lacks
    # Warnings of this package are one line each; those that libraries make among themselves are not shown.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    if not sys.warnoptions:  # `-W` and PYTHONWARNINGS say what else to show
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"tca_jax(\.|$)")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # PyTorch, which nothing here needs
    app()


def _print_version(wanted: bool) -> bool:
    if wanted:
        import tca_jax

        print(f"tca-jax {tca_jax.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def overview(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Training-free context-adaptive attention: long prompts, faster and smaller than full attention.

    Example: [bold]tca-jax demo[/]

    With TCA_JAX_TRACEBACK=1 in the environment, errors show where they were raised.
    """
