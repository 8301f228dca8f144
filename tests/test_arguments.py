"""What public functions refuse before any work: wrong types and values, named, as a `UserError`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import unchecked
from tiny import tiny_lm

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.engine.contexts import Context
from tca_jax.errors import UserTypeError, least_share

CONFIG = tca_jax.TCAConfig(block_size=8, window=16)
Q, K = np.zeros((1, 32, 2, 8), np.float32), np.zeros((1, 32, 1, 8), np.float32)
ROWS, LENGTHS = np.array([0]), np.array([32])


@functools.cache
def lm():
    return tiny_lm()


def attend(q=Q, k=K, v=K, config=CONFIG):
    return unchecked(tca_jax.attend)(q, k, v, ROWS, LENGTHS, config)


def select(q=Q[:, -1], k=K, config=CONFIG):
    return unchecked(tca_jax.select)(q, k, ROWS, LENGTHS, config)


def tokens(**options):
    prompt = {"tokens": jnp.ones((1, 4), int), "lengths": jnp.array([4]), "key": jax.random.key(0)}
    return unchecked(tca_jax.generate_tokens)(**{"lm": lm(), **prompt, "max_new_tokens": 2, **options})


WRONG_TYPES = [
    (lambda: attend(q=Q.astype(np.int32)), "q has dtype int32: must be floating point"),
    (lambda: attend(v=K.astype(jnp.bfloat16)), "dtypes differ: q float32, k float32, v bfloat16"),
    (lambda: attend(k=None), "k is of type NoneType: must be a JAX or NumPy array"),
    (lambda: attend(config={}), "config is of type dict: must be a TCAConfig"),
    (lambda: select(q=[[0.0]]), "q_last is of type list: must be a JAX or NumPy array"),
    (lambda: select(config=None), "config is of type NoneType"),
    (lambda: unchecked(tca_jax.candidate_budgets)(None, 3), "config is of type NoneType: must be a TCAConfig"),
    (lambda: unchecked(tca_jax.generate)(None, "x"), "lm is of type NoneType: must be an LM, from tca_jax.load"),
    (lambda: unchecked(tca_jax.prefill)("recall-tiny", "x"), "lm is of type str"),
    (lambda: unchecked(tca_jax.score)([], "x"), "lm is of type list"),
    (lambda: unchecked(tca_jax.calibrate)(None, "x"), "lm is of type NoneType"),
    (lambda: unchecked(tca_jax.calibrate)(lm(), "x", {}), "config is of type dict: must be a TCAConfig"),
    (lambda: tokens(sampling=0.7), "sampling is of type float: must be a Sampling"),
    (lambda: tokens(lm=None), "lm is of type NoneType"),
    (lambda: unchecked(tca_jax.load)(b"recall-tiny"), "name_or_path is of type bytes: must be a string or a path"),
    (lambda: unchecked(tca_jax.load)("recall-tiny", profile=5), "profile is of type int: must be a Profile, a folder"),
    (lambda: unchecked(Profile.load.__func__)(Profile, None), "directory is of type NoneType"),
]
WRONG_VALUES = [
    (lambda: unchecked(tca_jax.candidate_budgets)(CONFIG, 2.5), "num_blocks = 2.5: must be an integer of at least 0"),
    (lambda: tca_jax.TCAConfig(num_candidates=10**9), r"num_candidates = 1000000000: must lie in \[2, 1024\]"),
    (lambda: tca_jax.TCAConfig(seed=-1), "TCAConfig.seed = -1: must be an integer of at least 0"),
    (lambda: tca_jax.TCAConfig(window=2**31), r"TCAConfig.window = 2147483648: must be an integer, at most 2\^31 - 1"),
    (lambda: tca_jax.load("x" * 3000), "name_or_path has 3,000 characters: must have at most 1,024"),
    (lambda: tca_jax.load("recall-tiny", revision="main"), "revision = 'main' goes with a model of the Hub"),
    (lambda: tca_jax.load(".", revision="main"), "revision = 'main' goes with a model of the Hub"),
    (lambda: Context.load(""), "directory = '': must name a folder"),
    (lambda: Profile.uniform(CONFIG, 2, 2, 0).save(""), "directory = '': must name a folder"),
]


@pytest.mark.parametrize(("call", "message"), WRONG_TYPES, ids=lambda each: None)
def test_wrong_type_is_named(call, message):
    with pytest.raises(UserTypeError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), WRONG_VALUES, ids=lambda each: None)
def test_wrong_value_is_named(call, message):
    with pytest.raises(tca_jax.UserError, match=message):
        call()


def test_least_share_is_rounded_up():
    assert [least_share(share) for share in (0.1, 0.12341, 0.12349, 0.0)] == ["0.1000", "0.1235", "0.1235", "0.0000"]
    shares = np.random.default_rng(0).uniform(0, 1, 1000)
    shares = np.concatenate([shares, shares.round(4), np.nextafter(shares.round(4), 1)])
    shown = np.array([float(least_share(share)) for share in shares])
    assert np.all((shares <= shown) & (shown < shares + 1e-4 + 1e-12))
