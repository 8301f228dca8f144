"""Shared test setup: run-time shape checks on every signature of the package, and small caches."""

from jaxtyping import install_import_hook

# Must run before anything imports the package: every jaxtyping annotation is then checked by beartype.
_hook = install_import_hook("tca_jax", "typecheck.check")
_hook.__enter__()
