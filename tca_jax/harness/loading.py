"""From lm_eval's model arguments to a model under its attention method."""

from __future__ import annotations

from typing import Any

from tca_jax import methods
from tca_jax.engine.lm import LM
from tca_jax.loading import load


def load_model(pretrained: Any, profile: Any, method: str | None, options: dict[str, Any], **loading: Any) -> LM:
    """The model that `pretrained`, `profile` and `method` name.

    Args:
        pretrained: As the first argument of `tca_jax.load`, or an LM, which is taken with its method.
        profile: As for `tca_jax.load`.
        method: A registered name or a pair of them; None for that of the profile. With a profile, one of its parts
            must be the profile's method, which takes its budgets from there: "tca", "streaming+tca".
        options: Options of the method.
        **loading: Further arguments of `tca_jax.load`.

    Raises:
        ValueError: as for `tca_jax.load` and `lm.with_method`, or these do not go together.
        TypeError: an argument is of a wrong type.
    """
    if method is None and options:
        raise ValueError(f"model arguments {sorted(options)}: unknown, and options of a method need method=")
    if isinstance(pretrained, LM):
        lm = pretrained
        if profile is not None or any(value is not None for value in loading.values()):
            raise ValueError("pretrained is a loaded model: profile, dtype and revision are those it was loaded with")
    else:
        lm = load(pretrained, profile, **loading)
    if method is None:
        return lm
    if profile is None:
        return lm.with_method(method, **options)
    return lm.with_method(_with_profile(method, lm.method, options))


def _with_profile(method: str, calibrated: methods.Method, options: dict[str, Any]) -> methods.Method:
    """A method by its name, of which one part is the profile's."""
    parts = method.split("+")
    if calibrated.name not in parts or len(parts) > 2:
        raise ValueError(
            f"method = {method!r} with a profile: the profile's method, {calibrated.name!r}, must be one of its parts"
        )
    others = [part for part in parts if part != calibrated.name]
    for name, given in options.items():
        if name not in others:
            raise ValueError(f"option {name!r} of method {method!r} with a profile: must be one of {others}")
        if not isinstance(given, dict):
            raise ValueError(f"{name} = {given!r}: options of a part of {method!r} must be a mapping")
    made = {part: methods.get(part, **options.get(part, {})) for part in others} | {calibrated.name: calibrated}
    return methods.Method(method, made[parts[0]].prefill, made[parts[-1]].cache)
