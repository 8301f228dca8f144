"""Tables and pictures: what they compare, and what they mark."""

import numpy as np
import pytest

from tca_jax.lab.evaluation import pictures
from tca_jax.lab.evaluation.conclusions import conclusions
from tca_jax.lab.evaluation.pictures import draw_pictures
from tca_jax.lab.evaluation.tables import table
from tca_jax.lab.recall.protocols import EVALUATION_PROTOCOLS

CONFIG = {"model": "m", "samples": 2, "seed": 0, "dtype": "float32", "kv_share": 0.25}


def record(method, task, score, *, length=4096, protocol="late", **fields):
    depths, hits = [0.05, 0.95], [True, score > 50]
    samples = [{"depths": depths, "hits": hits}, {"depths": depths, "hits": hits}]
    return {
        "method": method,
        "task": task,
        "suite": "ruler",
        "length": length,
        "protocol": protocol,
        "score": score,
        "groups": {},
        "kv_cache_bytes": 250.0 if method != "full" else 1000.0,
        "full_kv_cache_bytes": 1000.0,
        "attended_share": 0.125 if method != "full" else 1.0,
        "kept_share": 0.2 if method != "full" else 1.0,
        "prefill_seconds": 1.5,
        "question_seconds": 0.25,
        "seconds_per_token": 0.012,
        "batch": 4,
        "budget": "",
        "own_budget": False,
        "substitutes": {},
        "finished": "1",
        "samples": samples,
        **fields,
    }


def loss(method, values, *, length=4096):
    figures = {
        "values": {"loss": 1.5, "loss_inside": 1.25},
        "samples": [{"by_position": values, "loss": 1.5, "loss_inside": 1.25}],
        "suite": "text",
    }
    return record(method, "loss", 1.5, length=length, protocol="text", **figures)


RECORDS = [
    record("tca", "vt", 90.0),
    record("tca", "fwe", 50.0),
    record("full", "vt", 100.0, own_budget=True, budget="no knob"),
]


def test_means_are_of_the_tasks_that_every_method_has():
    text = table(CONFIG, RECORDS)
    assert "## ruler, 4,096 tokens, late\n" in text
    assert "| method | vt | fwe |\n| --- | ---: | ---: |\n| full | 100.0 | - |\n| tca | 90.0 | 50.0 |\n" in text
    costs = "| full‡ | 100.0 | 100.0% | 100.0% | 100.0% | 1.5 | 0.25 | 12 | 4 |\n| tca | 90.0 | 25.0% | 20.0% | 12.5% |"
    assert costs in text
    panel = pictures._against_time(pictures._comparable(RECORDS)).axes[0]
    lines = {line.get_label(): line.get_xydata().tolist() for line in panel.lines}
    assert lines == {"full": [[1.0, 100]], "tca": [[1.0, 90]]}  # 4 prompts of 0.25 s


def test_what_is_marked_is_explained_and_what_is_left_out_is_said():
    records = [*RECORDS, record("tca", "cwe", 10.0, substitutes={"words": "our own"})]
    text = table(CONFIG, records, ["qa_1: needs --squad FILE"])
    assert "| cwe † |" in text
    assert "\n† Not made from what the task's authors use" in text
    assert "\n- words: our own\n" in text
    assert "\n‡ Not at the bytes of the others:\n\n- full, 4,096 tokens: no knob\n" in text
    assert text.endswith("Left out:\n\n- qa_1: needs --squad FILE\n")
    plain = table({**CONFIG, "kv_share": None}, [record("tca", "vt", 1.0)])
    assert "†" not in plain
    assert "‡" not in plain
    assert "as each method has them" in plain


def test_protocols_lengths_and_suites_have_tables_of_their_own():
    records = [record("full", "vt", 1.0, length=n, protocol=p) for n in (8192, 4096) for p in ("prefix", "late")]
    records += [record("full", "lcc", 25.0, suite="longbench", groups={"0-4k": 20.0, "8k+": 30.0}), loss("full", [1.0])]
    text = table(CONFIG, records)
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        *("All, 4,096 tokens", "All, 8,192 tokens"),
        *("ruler, 4,096 tokens, prefix", "ruler, 4,096 tokens, late", "longbench, 4,096 tokens, late"),
        *("loss, 4,096 tokens", "ruler, 8,192 tokens, prefix", "ruler, 8,192 tokens, late"),
    ]
    assert "| method | ruler, prefix | ruler, late | longbench, late | loss inside | loss behind | KV bytes |" in text
    assert "| `full` | 1.0 | 1.0 | 25.0 | +0.00% | +0.00% | 100.0% |" in text
    assert "25.0 (20.0/30.0)" in text
    untimed = table({**CONFIG, "seconds": False}, records)
    assert "(s)" not in untimed
    assert "ms per token" not in untimed
    assert "| full | 1.5000 | 1.2500 | 100.0% | 100.0% | 100.0% | 1.5 |" in text


def test_of_results_without_an_attended_share_the_tables_have_none():
    records = [*RECORDS, loss("tca", [1.0])]
    older = [{name: value for name, value in each.items() if name != "attended_share"} for each in records]
    text = table(CONFIG, older)
    assert "| tca | 90.0 | 25.0% | 20.0% | - | 1.5 |" in text
    assert "| tca | 1.5000 | 1.2500 | - | 25.0% | 20.0% | 1.5 |" in text


def test_there_is_a_picture_of_all_that_the_results_are_enough_for(tmp_path):
    assert draw_pictures([], tmp_path) == []
    assert {path.name for path in draw_pictures(RECORDS, tmp_path)} == {"methods.png", "first-token.png", "depth.png"}
    more = [*RECORDS, record("tca", "vt", 80.0, length=8192), loss("tca", [1.0, 2.0])]
    drawn = draw_pictures(more, tmp_path)
    assert {path.name for path in drawn} == {f"{n}.png" for n in ("methods", "first-token", "depth", "length", "loss")}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_every_protocol_has_its_scores_by_method():
    records = [record("tca", "vt", 10.0 * n, protocol=name) for n, name in enumerate(EVALUATION_PROTOCOLS)]
    (panel,) = pictures._by_method(records).axes
    found = {line.get_label(): line.get_xdata().tolist() for line in panel.lines}
    assert found == {name: [10.0 * n] for n, name in enumerate(EVALUATION_PROTOCOLS)}


def test_facts_are_counted_by_the_depth_at_which_they_stand():
    panel = pictures._against_depth([record("tca", "vt", 10.0)]).axes[0]
    np.testing.assert_allclose(panel.lines[0].get_xydata(), [(0.05, 100), (0.95, 0)])


@pytest.mark.parametrize("compared", [True, False])
def test_losses_are_less_full_attentions_where_that_is_known(compared):
    records = [loss("tca", [3.0, 5.0])] + ([loss("full", [1.0, 4.0])] if compared else [])
    panel = pictures._loss_by_position(records).axes[0]
    np.testing.assert_allclose(panel.lines[0].get_ydata(), [2.0, 1.0] if compared else [3.0, 5.0])


def test_conclusions_say_who_is_better_than_tca_and_at_what_cost():
    def asked(method, scores, held, attended):
        samples = [{"score": score, "depths": [0.5], "hits": [bool(score)]} for score in scores]
        costs = {"kv_cache_bytes": held, "full_kv_cache_bytes": 100, "attended_share": attended}
        return record(method, "vt", 100 * sum(scores) / len(scores), samples=samples, **costs)

    records = [
        asked("full", [1] * 8, 100, 1.0),
        asked("tca", [1, 1, 0, 0, 0, 0, 0, 0], 30, 0.2),
        asked("cheaper", [1, 1, 1, 1, 1, 1, 0, 1], 30, 0.1),
        asked("dearer", [1] * 8, 60, 0.2),
        asked("alike", [1, 0, 1, 0, 0, 0, 0, 0], 30, 0.2),
        asked("lost", [0, 0, 0, 0, 0, 0, 0, 0], 30, 0.2),
    ]
    (said,) = conclusions(records, {"dearer": "another (tuned)"})
    assert "`tca` has a score of 25%, with 30.0% of the bytes, 20.0% of the pairs. TCA is not the best" in said
    assert "As many bytes or fewer; better: `cheaper` (by 62.5%); as good: `alike`, `lost`. More bytes; better:" in said
    assert said.endswith("More bytes; better: `another (tuned)` (by 75%, 60%).")
    assert conclusions(records[:2]) == conclusions(records[2:]) == []
