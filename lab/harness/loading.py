"""A model under its attention method from lm_eval's model arguments."""

from __future__ import annotations

from typing import Any

from tca_jax.calibration.profile import budgets_of
from tca_jax.engine.lm import LM
from tca_jax.errors import UserError
from tca_jax.loading import check_dtype, check_eight_bits, checkpoint_folder, open_checkpoint
from tca_jax.methods.registry import with_known
from tca_jax.models.json_object import read_json_object


def load_model(
    pretrained: Any, profile: Any, method: str | None, options: dict[str, Any], revision: str | None, **stored: Any
) -> LM:
    """The model that `pretrained`, `profile` and `method` name; `stored` are dtype, weights and kv of `tca_jax.load`.

    With a profile, one part of the method must be the profile's, as in "streaming+tca"; it takes the profile's budgets.
    """
    if method is None and options:
        raise UserError(f"model arguments {sorted(options)}: unknown, and options of a method need method=")
    if isinstance(pretrained, LM):
        if any(value is not None for value in (profile, revision, *stored.values())):
            raise UserError(
                "pretrained is a loaded model: profile, dtype, weights, kv and revision are those it was loaded with"
            )
        return pretrained if method is None else pretrained.with_method(method, **options)
    check_dtype(stored.get("dtype"))
    check_eight_bits(stored.get("weights"), stored.get("kv"))
    checkpoint = open_checkpoint(pretrained, revision)
    found = checkpoint.read_profile(profile)
    if found is not None and method is not None:
        calibrated = found.config.method_name
        if calibrated not in method.split("+"):
            raise UserError(
                f"method = {method!r} with a profile: the profile's method, {calibrated!r}, must be one of its parts"
            )
        options = with_known(method, budgets_of(found), options)
    lm = checkpoint.load(found, **stored)
    return lm if method is None else lm.with_method(method, **options)


def stored_repetition_penalty(pretrained: Any, revision: str | None) -> float | None:
    """The repetition penalty of a checkpoint's generation_config.json, if any."""
    if isinstance(pretrained, LM):
        return None
    path = checkpoint_folder(pretrained, revision) / "generation_config.json"
    return read_json_object(path).get("repetition_penalty") if path.exists() else None
