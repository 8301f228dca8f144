"""Tables of results: means, marks and missing values."""

from tca_jax.lab.evaluation.tables import table

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


def test_means_are_over_common_tasks():
    text = table(CONFIG, RECORDS)
    assert "## ruler, 4,096 tokens, late\n" in text
    assert "| method | vt | fwe | mean of 1 | KV bytes | kept | attended | prefill (s) |" in text
    assert "| full‡ | 100.0 | - | 100.0 | 100.0% | 100.0% | 100.0% | 1.5 | 0.25 | 12 | 4 |\n" in text
    assert "| tca | 90.0 | 50.0 | 90.0 | 25.0% | 20.0% | 12.5% | 1.5 | 0.25 | 12 | 4 |\n" in text


def test_notes_explain_marks_and_skipped_tasks():
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


def test_each_protocol_length_and_suite_has_a_table():
    records = [record("full", "vt", 1.0, length=n, protocol=p) for n in (8192, 4096) for p in ("prefix", "late")]
    records += [record("full", "lcc", 25.0, suite="longbench", groups={"0-4k": 20.0, "8k+": 30.0}), loss("full", [1.0])]
    text = table(CONFIG, records)
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        *("All, 4,096 tokens", "ruler, 4,096 tokens, prefix", "ruler, 4,096 tokens, late"),
        *("longbench, 4,096 tokens, late", "loss, 4,096 tokens"),
        *("All, 8,192 tokens", "ruler, 8,192 tokens, prefix", "ruler, 8,192 tokens, late"),
    ]
    assert "| method | ruler, prefix | ruler, late | longbench, late | loss inside | loss behind | KV bytes |" in text
    assert "| `full` | 1.0 | 1.0 | 25.0 | +0.00% | +0.00% | 100.0% |" in text
    assert "25.0 (20.0/30.0)" in text
    untimed = table({**CONFIG, "seconds": False}, records)
    assert "(s)" not in untimed
    assert "ms per token" not in untimed
    assert "| full | 1.5000 | 1.2500 | 100.0% | 100.0% | 100.0% | 1.5 |" in text


def test_older_results_show_no_attended_share():
    records = [*RECORDS, loss("tca", [1.0])]
    older = [{name: value for name, value in each.items() if name != "attended_share"} for each in records]
    text = table(CONFIG, older)
    assert "| tca | 90.0 | 50.0 | 90.0 | 25.0% | 20.0% | - | 1.5 |" in text
    assert "| tca | 1.5000 | 1.2500 | - | 25.0% | 20.0% | 1.5 |" in text
