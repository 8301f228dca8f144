"""Numbers in the messages of checks."""

import numpy as np
import pytest

from tca_jax.errors import least_share


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.1, "0.1000"), (0.0007, "0.0007"), (0.12341, "0.1235"), (0.12349, "0.1235"), (1.0, "1.0000"), (0.0, "0.0000")],
)
def test_the_least_share_is_rounded_up_to_what_is_allowed(share, shown):
    assert least_share(share) == shown


def test_what_is_shown_as_the_least_share_is_never_less():
    shares = np.random.default_rng(0).uniform(0, 1, 1000)
    shares = np.concatenate([shares, shares.round(4), np.nextafter(shares.round(4), 1)])
    shown = np.array([float(least_share(share)) for share in shares])
    assert np.all(shown >= shares)
    assert np.all(shown < shares + 1e-4 + 1e-12)
