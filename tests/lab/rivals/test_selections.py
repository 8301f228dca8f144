"""Rivals on the shipped model: what they keep of a document and their answers, as before they moved to the lab."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import tca_jax
from tca_jax.lab import plots
from tca_jax.lab.recall import build_document

EXPECTED = json.loads((Path(__file__).parent / "selections.json").read_text())
GEOMETRY = {"block_size": 64, "window": 256}
SHARE = {"share": 0.3, **GEOMETRY}
READ_SPARSELY = ("flexprefill", "minference", "quest", "xattention")  # they keep every token


OWN = {
    "kvzip": {"chunk": 512, **SHARE},
    "quest": {"budget": 512},
    "uniform": {"candidate": 4, "config": tca_jax.TCAConfig(**GEOMETRY)},
    "minference": {"blocks": 4, "dense_tokens": 256, "scale": 0.05},
    "flexprefill": {"min_budget": 256, "gamma": 0.8},
    "xattention": {"threshold": 0.8, "dense_tokens": 256},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_selections_are_as_before(name):
    lm, rng = tca_jax.load("recall-tiny", profile=None), np.random.default_rng(1)
    shape = lm.config.num_layers, lm.config.num_kv_heads
    measured = {
        "cake": {"preferences": rng.random(shape[0]).tolist(), **SHARE},
        "duoattention": {"gates": rng.random(shape).tolist(), **GEOMETRY},
        "kvzip-heads": {"head_scores": rng.random(shape).tolist(), **GEOMETRY},
    }
    text = build_document(np.random.default_rng(0), 1800, ("digits", "words")).text
    ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"][:1800]
    model, found = lm.with_method(name, **(OWN | measured).get(name, SHARE)), {"kept": None}
    if name not in READ_SPARSELY:
        kept = np.asarray(plots.kept_tokens(model, ids))
        found["kept"] = hashlib.sha1(np.packbits(kept).tobytes()).hexdigest()
    out = tca_jax.generate(model, [ids], max_new_tokens=6, stop_token_ids=())
    found |= {"tokens": out.tokens[0], "attended_share": round(out.stats.attended_share, 6)}
    assert found == EXPECTED[name]
