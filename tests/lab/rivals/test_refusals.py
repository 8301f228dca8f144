"""Options of rivals that are refused: the message names the option, its value and what is allowed."""

import re

import numpy as np
import pytest
from cases import unchecked
from tiny import tiny_lm

from tca_jax import methods
from tca_jax.lab.rivals.cake import layer_preferences

KINDS = [["a_shape", 5, 40]] * 4
#: Values that are refused, each for itself, with "option = value: must".
VALUES = {
    "adakv": {"safeguard": [1.5, -0.1]},
    "cake": {"preferences": [[1, -1], [0, 0]], "observation": [1], "gamma": [-2.0]},
    "duoattention": {"share": [0]},
    "expected-attention": {"future": [0], "epsilon": [-1], "sinks": [-1]},
    "flexprefill": {"gamma": [1.5], "tau": [-0.1], "min_budget": [-1], "block_size": [0]},
    "kvzip": {"level": ["head"], "chunk": [7], "sinks": [-1]},
    "minference": {"scale": [0], "blocks": [0], "dense_tokens": [-1], "patterns": [[], 3, [3], [KINDS, KINDS[:2]]]},
    "pyramidkv": {"beta": [0.5, np.inf]},
    "quest": {"budget": [31, 0], "dense_layers": [-1]},
    "random": {"share": [True, 0], "seed": [2**32]},
    "snapkv": {"capacity": [0, 128], "share": [1.5], "observation": [129, 0], "kernel": [4], "pooling": ["sum"]},
    "streaming": {"sinks": [-1], "window": [100], "block_size": [96]},
    "xattention": {"threshold": [1.5], "chunk": [-1], "stride": [48], "dense_tokens": [-1]},
}
REQUIRED = {"cake": {"preferences": [1]}, "duoattention": {"gates": [[1.0]]}}
#: Method, its options (one of them is refused), and the message.
REFUSED = [
    ("uniform", {"candidate": 15}, r"candidates = 15: must lie in \[0, 14\]"),
    ("cake", {"preferences": np.ones((1, 1))}, r"preferences has shape \(1, 1\)"),
    ("cake", {"preferences": np.array(["a"])}, r"preferences has shape \(1,\), dtype <U1: must be numbers"),
    ("duoattention", {"gates": np.array([1.0, 0.0])}, r"gates has shape \(2,\): must be numbers \[layers, H_kv\]"),
    ("duoattention", {"gates": [[1.0], [0.0, 1.0]]}, r"gates: must be numbers \[layers, H_kv\]"),
    ("kvzip-heads", {"head_scores": [[np.inf]]}, r"head_scores\[0, 0\] = inf: must be a finite number"),
    ("xattention", {"threshold": [[0.5, 1.5]]}, r"threshold\[0, 1\] = 1.5: must lie in \(0, 1\]"),
    ("xattention", {"threshold": [0.5]}, r"threshold has shape \(1,\): must be a number, or numbers"),
    ("minference", {"patterns": [{"0": KINDS[0], "2": KINDS[0]}]}, r"patterns\[0\]\[1\] = None: must be"),
    *(
        ("minference", {"patterns": [[entry]]}, r"patterns\[0\]\[0\] = .*: must be \[kind, columns, diagonals\]")
        for entry in (["spiral", 1, 2], ["a_shape", 1], ["a_shape", 1, -2], "a_shape", None)
    ),
]
#: Tables that do not fit a model of 2 layers, 4 query heads and 2 KV heads.
UNFIT = [
    ("tca", {"candidates": [[0, 0]] * 3}, "candidates has 3 layers of 2 KV heads: must be 2 of 2"),
    ("duoattention", {"gates": [[1, 0]]}, "gates has 1 layers of 2 KV heads: must be 2 of 2"),
    ("kvzip-heads", {"head_scores": [[1.0, 0.5]]}, "head_scores has 1 layers of 2 KV heads: must be 2 of 2"),
    ("cake", {"preferences": [1.0]}, "preferences has 1 layers: must be 2"),
    ("minference", {"patterns": [KINDS]}, "patterns has 1 layers of 4 query heads: must be 2 of a multiple of 2"),
    ("xattention", {"threshold": [[0.5] * 3] * 2}, "threshold has 2 layers of 3 query heads: must be 2 of a multiple"),
]
#: Texts that CAKE's preferences cannot be measured on.
UNFIT_TEXTS = [
    ([[1] * 9], {"observation": 9}, r"texts\[0\] has 9 tokens: must have more than observation = 9"),
    ([[1] * 5000], {}, r"texts\[0\] has 5000 tokens: .* at most the 4096 positions"),
    ([[1] * 40], {"observation": 1}, "observation = 1: must be an integer of at least 2"),
    ([[1] * 40], {"tau1": 0}, r"tau1 = 0: must lie in \(0, 100\]"),
]


@pytest.mark.parametrize("name", VALUES)
def test_values_are_refused(name):
    for option, values in VALUES[name].items():
        for value in values:
            with pytest.raises(ValueError, match=re.escape(f"{option} = {value!r}: must")):
                methods.get(name, **{**REQUIRED.get(name, {}), option: value})


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        methods.get(name, **options)


@pytest.mark.parametrize(("name", "options", "message"), UNFIT)
def test_another_models_table_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_lm().with_method(name, **options)


@pytest.mark.parametrize(("text", "options", "message"), UNFIT_TEXTS)
def test_texts_to_measure_are_refused(text, options, message):
    with pytest.raises(ValueError, match=message):
        unchecked(layer_preferences)(tiny_lm(), text, **options)
