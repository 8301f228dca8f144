"""DuoAttention: which heads are retrieval heads, and what they and the others see from prompt to answer."""

import numpy as np
import pytest
from tiny import masked_greedy, random_prompt, tiny_lm

import tca_jax
from tca_jax import methods
from tca_jax.lab.rivals.duoattention import load_gates

B, W = 8, 16
GATES = [[0.9, 0.1], [0.2, 0.8]]


def rule(layer, head, position):
    """Retrieval heads see everything, the others 3 sinks and the window."""
    if GATES[layer][head] > 0.5:
        return set(range(position + 1))
    return set(range(max(0, position // B * B - W), position + 1)) | set(range(min(3, position + 1)))


@pytest.mark.parametrize("prompt", [5, 71])
def test_heads_see_what_their_kind_sees(prompt):
    lm, ids = tiny_lm(), random_prompt(prompt, prompt)
    model = lm.with_method("duoattention", gates=GATES, sinks=3, block_size=B, window=W)
    out = tca_jax.generate(model, ids, max_new_tokens=30, stop_token_ids=())
    assert out.tokens == [masked_greedy(lm, ids, 30, rule)]
    seen = [len(rule(layer, head, prompt + 28)) for layer in range(2) for head in range(2)]
    assert out.stats.kept_share == pytest.approx(np.mean(seen) / (prompt + 29))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.72, 1.0])
def test_the_highest_gates_are_retrieval_heads(share):
    gates = np.random.default_rng(0).uniform(-0.1, 1.1, (5, 8))
    retrieval = np.array(methods.get("duoattention", gates=gates, share=share).cache.retrieval)
    assert retrieval.sum() == round(share * 40)
    clipped = np.clip(gates, 0, 1)
    assert clipped[retrieval].min() >= clipped[~retrieval].max(initial=0)
    tied = methods.get("duoattention", gates=[[1, 1, 0], [2, 1, 1]], share=0.5).cache
    assert tied.retrieval == ((True, True, False), (True, False, False))


def test_published_gates_load(tmp_path):
    gates = np.random.default_rng(1).uniform(-1e-4, 1, (4, 2))
    path = tmp_path / "full_attention_heads.tsv"
    np.savetxt(path, gates, delimiter="\t")
    np.testing.assert_array_equal(load_gates(path), gates)
    assert methods.get("duoattention", gates=path) == methods.get("duoattention", gates=gates)
    for text in ("1\t2\nx\t3\n", "1\t2\n3\n", "\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"heads\.tsv: must hold rows of one length, of numbers with tabs between"):
            load_gates(path)


def test_capacities_of_streaming_heads_are_the_sinks():
    cache = methods.get("duoattention", gates=GATES).cache
    assert cache.capacities(0, 4096) == (4096 - 256, 128)
    assert cache.growth(1, 4096, 256) == (128, 256)
    assert cache.growth(0, 100, 100) == (0, 0)
