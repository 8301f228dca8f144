"""The lab's commands of `tca-jax`, which an entry point of the package registers."""

import typer

from tca_jax.lab.commands.bench import app as bench_app
from tca_jax.lab.commands.demo import demo
from tca_jax.lab.commands.evaluate import evaluate
from tca_jax.lab.commands.harness import lm_eval
from tca_jax.lab.commands.plots import app as plot_app


def register(app: typer.Typer) -> None:
    """Adds the commands to the program."""
    app.command()(demo)
    app.command("eval")(evaluate)
    app.command("lm-eval", context_settings={"ignore_unknown_options": True})(lm_eval)
    app.add_typer(bench_app, name="bench")
    app.add_typer(plot_app, name="plot")
