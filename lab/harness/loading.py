"""From lm_eval's model arguments to a model under its attention method."""

from __future__ import annotations

from typing import Any

from tca_jax.calibration.profile import budgets_of
from tca_jax.engine.lm import LM
from tca_jax.engine.sampling import Sampling
from tca_jax.errors import UserError
from tca_jax.loading import check_dtype, check_eight_bits, checkpoint_folder, open_checkpoint
from tca_jax.methods.registry import with_known
from tca_jax.models.json_object import read_json_object


def load_model(
    pretrained: Any,
    profile: Any,
    method: str | None,
    options: dict[str, Any],
    *,
    dtype: Any = None,
    weights: str | None = None,
    kv: str | None = None,
    revision: str | None = None,
) -> LM:
    """The model that `pretrained`, `profile` and `method` name.

    Args:
        pretrained: As the first argument of `tca_jax.load`, or an LM, which is taken with its method.
        profile: As for `tca_jax.load`.
        method: A registered name or a pair of them; None for that of the profile. With a profile, one of its parts
            must be the profile's method: "tca", "streaming+tca". Budgets are those of the profile.
        options: Options of the method.
        dtype: As for `tca_jax.load`.
        weights: As for `tca_jax.load`.
        kv: As for `tca_jax.load`.
        revision: As for `tca_jax.load`.

    Raises:
        ValueError: as for `tca_jax.load` and `lm.with_method`, or these do not go together.
        TypeError: an argument is of a wrong type.
    """
    if method is None and options:
        raise UserError(f"model arguments {sorted(options)}: unknown, and options of a method need method=")
    if isinstance(pretrained, LM):
        if any(value is not None for value in (profile, dtype, weights, kv, revision)):
            raise UserError(
                "pretrained is a loaded model: profile, dtype, weights, kv and revision are those it was loaded with"
            )
        return pretrained if method is None else pretrained.with_method(method, **options)
    check_dtype(dtype)
    check_eight_bits(weights, kv)
    checkpoint = open_checkpoint(pretrained, revision)
    found = checkpoint.read_profile(profile)
    if found is not None and method is not None:
        calibrated = found.config.method_name
        if calibrated not in method.split("+"):
            raise UserError(
                f"method = {method!r} with a profile: the profile's method, {calibrated!r}, must be one of its parts"
            )
        options = with_known(method, budgets_of(found), options)
    lm = checkpoint.load(found, dtype=dtype, weights=weights, kv=kv)
    return lm if method is None else lm.with_method(method, **options)


def stored_repetition_penalty(pretrained: Any, revision: str | None) -> float | None:
    """The repetition penalty of a checkpoint's generation_config.json; None where it names none, or for an LM."""
    if isinstance(pretrained, LM):
        return None
    path = checkpoint_folder(pretrained, revision) / "generation_config.json"
    found = read_json_object(path).get("repetition_penalty") if path.exists() else None
    try:
        Sampling(repetition_penalty=found)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return found
