"""Options of all methods that are refused: the message names the option, its value and what is allowed."""

import numpy as np
import pytest
from tiny import tiny_lm

from tca_jax import methods

AT_LEAST = "must be an integer of at least"
KINDS = [["a_shape", 5, 40]] * 4
#: Method, its options (one of them is refused), and the message.
REFUSED = [
    ("nope", {}, r"method 'nope' is not registered: must be one of \['adakv', 'adakv-expected-attention', "),
    ("full+nope", {}, "method 'nope' is not registered"),
    ("full+full+full", {}, "at most two methods can be joined"),
    ("streaming", {"sink": 3}, r"options of method 'streaming': .*'sink'; it takes \(sinks: "),
    ("tca", {}, "options of method 'tca': missing a required argument: 'candidates'"),
    ("full+streaming", {"sinks": 3}, "has no part 'sinks'"),
    ("full+streaming", {"streaming": 3}, "streaming = 3: options of a part"),
    ("streaming", {"sinks": -1}, f"sinks = -1: {AT_LEAST} 0"),
    ("streaming", {"window": 100}, "window = 100: must be a positive multiple of block_size = 128"),
    ("streaming", {"block_size": 96}, "block_size = 96: must be a power of two"),
    ("random", {"share": True}, "share = True: must be a finite number"),
    ("random", {"seed": 2**32}, r"seed = 4294967296: must lie in \[0, 2\^32\)"),
    ("snapkv", {"capacity": 128}, "capacity = 128: must be more than window = 128, which counts in"),
    ("snapkv", {"capacity": 0}, f"capacity = 0: {AT_LEAST} 1"),
    ("snapkv", {"share": 1.5}, r"share = 1.5: must lie in \(0, 1\]"),
    ("snapkv", {"observation": 129}, "observation = 129: must be at most window = 128, whose"),
    ("snapkv", {"kernel": 4}, "kernel = 4: must be odd"),
    ("snapkv", {"pooling": "sum"}, r"pooling = 'sum': must be one of \['avg', 'max'\]"),
    ("adakv", {"safeguard": 1.5}, r"safeguard = 1.5: must lie in \[0, 1\]"),
    ("pyramidkv", {"beta": 0.5}, "beta = 0.5: must be a finite number of at least 1"),
    ("expected-attention", {"future": 0}, f"future = 0: {AT_LEAST} 1"),
    ("expected-attention", {"epsilon": -1}, "epsilon = -1: must be a finite number of at least 0"),
    ("uniform", {"candidate": 15}, r"candidates = 15: must lie in \[0, 14\]"),
    ("tca", {"candidates": [[0, 15]]}, r"candidates\[0\]\[1\] = 15: must lie in \[0, 14\]"),
    ("cake", {"preferences": np.ones((1, 1))}, r"preferences has shape \(1, 1\)"),
    ("cake", {"preferences": [1, -1]}, r"preferences = \[1, -1\]: must be finite, not negative, and not all 0"),
    ("cake", {"preferences": np.array(["a"])}, r"preferences has shape \(1,\), dtype <U1: must be numbers"),
    ("cake", {"preferences": [1], "observation": 1}, f"observation = 1: {AT_LEAST} 2"),
    ("cake", {"preferences": [1], "gamma": -2.0}, "gamma = -2.0: must be a finite number of at least 0"),
    ("duoattention", {"gates": np.array([1.0, 0.0])}, r"gates has shape \(2,\): must be \[layers, H_kv\]"),
    ("duoattention", {"gates": [[1.0], [0.0, 1.0]]}, r"gates: must be numbers \[layers, H_kv\]"),
    ("duoattention", {"gates": [[1.0]], "share": 0}, r"share = 0: must lie in \(0, 1\]"),
    ("kvzip", {"level": "head"}, r"level = 'head': must be one of \['pair', 'layer', 'uniform'\]"),
    ("kvzip", {"chunk": 7}, f"chunk = 7: {AT_LEAST} 8"),
    ("kvzip-heads", {"head_scores": [[np.inf]]}, r"head_scores\[0, 0\] = inf: must be finite"),
    ("quest", {"budget": 31}, r"budget = 31: must be at least window \+ block_size = 32"),
    ("quest", {"dense_layers": -1}, f"dense_layers = -1: {AT_LEAST} 0"),
    ("xattention", {"threshold": [[0.5, 1.5]]}, r"threshold\[0, 1\] = 1.5: must lie in \(0, 1\]"),
    (
        "xattention",
        {"threshold": np.array([0.5])},
        r"threshold has shape \(1,\): must be a number, or numbers",
    ),
    ("xattention", {"chunk": -1}, f"chunk = -1: {AT_LEAST} 0"),
    ("xattention", {"stride": 48}, "stride = 48: must divide block_size = 128"),
    ("flexprefill", {"gamma": 1.5}, r"gamma = 1.5: must lie in \(0, 1\]"),
    ("flexprefill", {"tau": -0.1}, "tau = -0.1: must be a finite number of at least 0"),
    ("minference", {"scale": 0}, "scale = 0: must lie in"),
    ("minference", {"patterns": []}, "patterns = .*: must be a list with the patterns of each layer"),
    ("minference", {"patterns": [[["spiral", 1, 2]]]}, r"patterns\[0\]\[0\] has kind 'spiral': must be one of"),
    ("minference", {"patterns": [[["a_shape", 1]]]}, r"\[0\]\[0\] = .*: must be \[kind, columns, diagonals\]"),
    ("minference", {"patterns": [[["a_shape", 1, -2]]]}, "has -2: columns and diagonals must be integers"),
    ("minference", {"patterns": [{"0": ["a_shape", 1, 2], "2": ["a_shape", 1, 2]}]}, "has no head 1"),
    ("minference", {"patterns": [KINDS, KINDS[:2]]}, r"patterns has layers of \[2, 4\] heads"),
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


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_an_option_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        methods.get(name, **options)


@pytest.mark.parametrize(("name", "options", "message"), UNFIT)
def test_another_models_table_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_lm().with_method(name, **options)
