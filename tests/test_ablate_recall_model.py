"""The ablation script: what it varies, that nothing is measured twice, and the files it writes."""

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tca_jax.recall import PROTOCOLS, TASKS

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("ablate_recall_model")


def test_every_line_differs_from_the_shipped_one_in_what_its_table_varies_alone(script):
    lines, base = script.variants(script.PLAN), script.PLAN.config
    for field, values in script.VALUES.items():
        of_field = [line for line in lines if line.group == field]
        assert len(of_field) == len(values)
        for line, value in zip(of_field, values, strict=True):
            changed = {name for name, one in vars(line.config).items() if one != getattr(base, name)}
            assert changed == (set() if value is None else {field})
            assert ("(shipped)" in line.name) == (value is None)
    presets = {line.name: line.config for line in lines if line.group == "preset"}
    assert {config.window for config in presets.values()} == {base.window}
    assert presets["paper()"].criterion == "column_mean"
    assert presets["paper(), tau 0.95"].tau == 0.95
    texts = [line for line in lines if line.group == "calibration text"]
    assert [line.text for line in texts] == list(script.TEXTS)
    assert {line.config for line in texts} == {base}


def test_a_line_that_stands_in_several_tables_is_measured_once(script, tmp_path, monkeypatch):
    measured = []

    def measure(folder, plan, line):
        measured.append((line.config, line.text))
        right = {protocol: dict.fromkeys(TASKS, 1.0) for protocol in PROTOCOLS}
        right["late"]["hex"] = 0.25
        shares = {"kv_cache_share": 0.2, "prefill_share": 0.1, "dense_heads": 2}
        return {"group": line.group, "name": line.name, "text": line.text, "right": right, **shares}

    monkeypatch.setattr(script, "measure", measure)
    out = tmp_path / "new" / "ablations.json"
    result = CliRunner().invoke(script.app, [str(tmp_path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    lines = script.variants(script.PLAN)
    assert len(measured) == len(set(measured)) == len({(line.config, line.text) for line in lines})
    written = json.loads(out.read_text())
    assert [(one["group"], one["name"]) for one in written["results"]] == [(line.group, line.name) for line in lines]
    assert written["plan"]["questions"] == script.PLAN.questions
    table = out.with_suffix(".md").read_text()
    assert "| paper() | 100.0% | 100.0% | 100.0% | 100.0% | 90.6% | 25.0% | 20.0% | 10.0% |" in table
    assert table.count("###") == len(script.VALUES) + 2


def test_plain_source_is_the_document_without_its_facts(script):
    (document,) = script.calibration_documents(script.PLAN, 0)[:1]
    plain = script._plain(document, script.PLAN)
    facts = [fact for question in document.questions for fact in question.facts]
    assert facts
    assert all(fact.line in document.text and fact.line not in plain for fact in facts)
