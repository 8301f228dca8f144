"""The command line in this process, at 80 columns."""

from __future__ import annotations

from typer.testing import CliRunner

from tca_jax.cli.app import app


def run(*args: object, stdin: str | None = None, **environment: str):
    """Runs `tca-jax` with arguments."""
    columns = {"COLUMNS": "80", "TERM": "xterm"}
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, env={**columns, **environment})


def error(*args: object, **environment: str) -> str:
    """The message of a command that must fail as every user error does: with one line on standard error alone."""
    result = run(*args, **environment)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("error: ").strip()
