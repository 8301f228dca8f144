"""Plots of results: what they show, and that nothing of it is cut off."""

import json

import pytest
from drawings import assert_nothing_touches_the_border, texts

from tca_jax.lab import plots
from tca_jax.lab.plots import results
from tca_jax.loading import checkpoint_folder

LAYER = {"model": "llama3.1-8b", "tokens": 4096, "attention": "TCA 0.155", "backend": "mosaic", "kept": 0.181}
LAYER |= {"full ms": 10.0, "total ms": 3.0, "selection ms": 0.6, "attention ms": 2.5}
MODEL = {"model": "llama3.1-8b", "tokens": 4096, "attention": "TCA 18%", "kept": 0.182, "TTFT s": 0.5, "ms/token": 5.0}
FULL = {**MODEL, "attention": "full", "kept": 1.0, "TTFT s": 0.9}


def test_bars_of_a_layer_are_its_selection_and_the_rest_of_one_program():
    bars = results.latency_bars({"a.json": {"rows": [LAYER, {**LAYER, "tokens": 1024}]}})
    full, tca = bars.values()
    assert full == {"attention": 0.01}
    assert tca == pytest.approx({"selection": 0.0006, "attention": 0.0024})


def test_bars_of_models_are_in_parts_where_their_layer_was_timed():
    records = {"a": {"rows": [LAYER]}, "b": {"rows": [FULL, MODEL, {**MODEL, "attention": "TCA 39%", "kept": 0.39}]}}
    full, tca, other = results.latency_bars(records, new_tokens=100).values()
    assert full == pytest.approx({"attention": 0.32, results.REST: 0.58, "decoding 100 tokens": 0.5})
    expected = {"selection": 32 * 0.0006, "attention": 32 * 0.0024, results.REST: 0.5 - 32 * 0.003}
    assert tca == pytest.approx({**expected, "decoding 100 tokens": 0.5})
    assert other == pytest.approx({"reading the prompt": 0.5, "decoding 100 tokens": 0.5})


def test_bars_of_a_call_are_reading_and_decoding():
    stats = {"new_tokens": [3, 10], "prefill_seconds": 2.0, "seconds_per_token": 0.1}
    assert results.latency_bars({"x.json": {"stats": stats}}) == {
        "x.json": {"reading the prompt": 2.0, "decoding": pytest.approx(1.0)}
    }


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({"x.json": {"rows": [{"tokens": 1}]}}, "x.json: must be a result of `tca-jax bench attention`"),
        ({"x.json": {"rows": [LAYER]}}, "tokens = 7: none of these results is of that prompt length"),
    ],
)
def test_other_results_are_no_bars(records, message):
    with pytest.raises(ValueError, match=message):
        results.latency_bars(records, tokens=7)


def test_a_plot_of_latency_has_a_bar_a_stage_and_says_all_figures(figures):
    bars = {"full": {"attention": 2.0, "rest": 1.0}, "tca": {"selection": 0.01, "attention": 0.5, "rest": 1.0}}
    plots.plot_latency(bars, "title", "unused.png")
    axes = figures[0].axes[0]
    widths = {drawn.get_label(): [bar.get_width() for bar in drawn] for drawn in axes.containers}
    assert widths == {"selection": [0, 0.01], "attention": [2, 0.5], "rest": [1, 1]}
    assert list(widths) == ["selection", "attention", "rest"]
    assert texts(axes)[-2:] == [" 3 s", " 1.51 s (selection 0.01)"]
    assert axes.get_xlabel() == "s"


def test_a_plot_of_latency_takes_the_unit_of_its_longest_bar(figures, tmp_path):
    plots.plot_latency({"a": {"x": 0.004}, "b": {"x": 0.0005}}, "title", "unused.png")
    assert figures[0].axes[0].get_xlabel() == "ms"
    assert texts(figures[0].axes[0])[-2:] == [" 4 ms", " 0.5 ms"]


@pytest.mark.parametrize("bars", [{}, {"a": {}}, {"a": {"x": -1.0}}, {"a": {"x": float("nan")}}])
def test_bars_without_times_are_refused(tmp_path, bars):
    with pytest.raises(ValueError, match="bars"):
        plots.plot_latency(bars, "title", tmp_path / "l.png")


PANELS = {"prefix": [("full", 1.0, 0.9), ("tca", 0.3, 0.8), ("tca", 0.1, 0.5)], "late": [("tca", 0.3, 0.7)]}


def test_a_plot_of_accuracy_joins_the_points_of_a_method_by_their_bytes(figures):
    plots.plot_accuracy(PANELS, "title", "unused.png")
    prefix, late = figures[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in prefix.lines}
    assert lines["tca"] == [[0.1, 0.5], [0.3, 0.8]]
    assert lines["full"] == [[1.0, 0.9]]
    assert [line.get_xydata().tolist() for line in late.lines] == [[[0.3, 0.7]]]
    assert (prefix.get_title(), late.get_title()) == ("prefix", "late")
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["full", "tca"]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_plots_of_accuracy_and_latency_are_pngs_with_nothing_cut_off(tmp_path, count):
    panels = {f"panel {i}": [(f"method {j}", j / 20, j / 20) for j in range(1, 15)] for i in range(count)}
    assert_nothing_touches_the_border(plots.plot_accuracy(panels, "title", tmp_path / "a.png"))
    bars = {f"a-model-of-a-long-name-{i}, 131,072 tokens": {"attention": 1.0, "$rest$": i / 50} for i in range(count)}
    assert_nothing_touches_the_border(plots.plot_latency(bars, "title", tmp_path / "l.png"))


@pytest.mark.parametrize("panels", [{}, {"a": []}, {"a": [("tca", -0.1, 0.5)]}, {"a": [("tca", 0.1, 50.0)]}])
def test_points_that_are_no_shares_are_refused(tmp_path, panels):
    with pytest.raises(ValueError, match="panels"):
        plots.plot_accuracy(panels, "title", tmp_path / "a.png")


def point(method, share=0.2, inside=0.55, late=0.5):
    measured = {"attended_share": share, "inside": inside, "inside_full": 0.5, "kv_share": share, "late": late}
    return {"method": method, "knob": "k=1", **measured}


MODELS = {
    "one": {"tokens": 8192, "points": [point("full", 1.0, 0.5, 1.0), point("tca", 0.4, 0.51), point("tca", late=None)]},
    "two": {"points": [point("tca"), point("streaming", inside=None), point("streaming", 0.1, 1.0, 0.0)]},
}


def test_a_plot_of_reading_joins_the_points_of_a_method_by_the_attended_share(figures):
    plots.plot_reading(MODELS, "unused.png")
    one, two = figures[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in one.lines}
    assert lines["tca"] == [[0.2, pytest.approx(0.1)], [0.4, pytest.approx(0.02)]]
    assert lines["full"] == [[1.0, 0.0]]
    assert two.lines[1].get_xydata().tolist() == [[0.1, 1.0]]
    assert (one.get_title(), two.get_title()) == ("one, 8,192 tokens", "two")
    assert (one.get_xscale(), one.get_yscale()) == ("log", "symlog")
    assert one.get_ylim()[0] < 0 < 1 < one.get_ylim()[1]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["full", "tca", "streaming"]
    figures[0].draw_without_rendering()
    assert "+10%" in [label.get_text() for label in one.get_yticklabels()]
    assert [label.get_text() for label in two.get_xticklabels()] == ["10%", "20%", "50%", "100%"]


def test_a_plot_of_keeping_joins_the_points_of_a_method_by_their_bytes(figures):
    plots.plot_keeping(MODELS, "unused.png")
    one, two = figures[0].axes
    assert {line.get_label(): line.get_xydata().tolist() for line in one.lines} == {
        "full": [[1.0, 1.0]],
        "tca": [[0.4, 0.5]],
    }
    assert {line.get_label(): line.get_xydata().tolist() for line in two.lines} == {
        "tca": [[0.2, 0.5]],
        "streaming": [[0.1, 0.0], [0.2, 0.5]],
    }
    assert not any(line.get_clip_on() for line in two.lines)  # a marker at 0% is drawn whole


@pytest.mark.parametrize("count", [1, 2, 7])
def test_plots_of_reading_and_keeping_are_pngs_with_nothing_cut_off(tmp_path, count):
    points = [point(f"method {i}", share, 0.5 + 0.1 * i, i / 14) for i in range(14) for share in (0.1, 0.3)]
    models = {f"model {i}": {"tokens": 8192, "points": points} for i in range(count)}
    for plot in (plots.plot_reading, plots.plot_keeping):
        assert_nothing_touches_the_border(plot(models, tmp_path / "t.png"))


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({}, "models is empty"),
        ({"m": {"points": [point("tca", share=None)]}}, r"models\['m'\] has no point with (attended|kv)_share and"),
        ({"m": {"points": [point("tca", share=0.0)]}}, r"models\['m'\]: \w+_share = 0.0: must be a positive number"),
        ({"m": {"points": [point("tca", share="a")]}}, r"_share = 'a': must be a positive number"),
        ({"m": {"points": [point("tca", inside=float("nan"), late=50)]}}, r"inside = nan: must|late = 50: must lie in"),
    ],
)
@pytest.mark.parametrize("plot", [plots.plot_reading, plots.plot_keeping])
def test_points_that_cannot_be_drawn_are_refused(tmp_path, plot, models, message):
    with pytest.raises(ValueError, match=message):
        plot(models, tmp_path / "t.png")
    assert not (tmp_path / "t.png").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "holds no models"),
        ('{"models": {}}', "holds no models"),
        ('{"models": {"m": []}}', r"models\['m'\] must hold 'points'"),
        ('{"models": {"m": {"points": [{"knob": "x"}]}}}', r"models\['m'\] must hold 'points'"),
    ],
)
def test_models_are_read_from_a_file_that_has_them(tmp_path, text, message):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"models": MODELS}))
    assert results.model_points(path) == MODELS
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path}.*{message}"):
        results.model_points(path)


def test_accuracy_is_read_from_the_results_of_the_model_that_ships():
    panels = results.accuracy_panels(checkpoint_folder("recall-tiny") / "evaluation.json")
    assert list(panels) == ["prefix", "preamble", "late"]
    assert panels["late"][0][:2] == ("full", 1.0)
    assert all(0 <= right <= 1 for panel in panels.values() for *_, right in panel)


def test_accuracy_is_read_from_a_folder_of_results_over_the_tasks_that_all_methods_have(tmp_path):
    for method, task, length, score in [
        ("full", "a", 64, 90.0),
        ("full", "b", 64, 70.0),
        ("tca", "a", 64, 80.0),
        ("tca", "a", 128, 60.0),
    ]:
        path = tmp_path / "results" / method / f"{task}-{length}-late.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"method": method, "task": task, "length": length, "protocol": "late", "score": score}
        path.write_text(json.dumps({**record, "kv_cache_bytes": 10 * length, "full_kv_cache_bytes": 40 * length}))
    loss = {"method": "tca", "task": "loss", "length": 64, "protocol": "text", "score": 1.5}
    (tmp_path / "results" / "tca" / "loss-64-text.json").write_text(json.dumps(loss))
    (tmp_path / "results" / "tca" / ".b-64-late.1.json").write_text('{"method": ')  # of a run that was killed
    assert results.accuracy_panels(tmp_path) == {
        "late, 64 tokens": [("full", 0.25, 0.9), ("tca", 0.25, 0.8)],
        "late, 128 tokens": [("tca", 0.25, 0.6)],
    }


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[]", "holds a list"), ("{}", "no accuracy")]
)
def test_files_that_hold_no_results_are_named(tmp_path, text, message):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path}.*{message}"):
        results.accuracy_panels(path)


def test_a_plot_of_keeping_draws_the_answers_of_the_protocol_that_is_asked_for(figures):
    models = {"m": {"points": [{"method": "tca", "kv_share": 0.3, "late": 0.5, "prefix": 0.9}]}}
    plots.plot_keeping(models, "unused.png", protocol="prefix")
    (line,) = [line for line in figures[-1].axes[0].get_lines() if line.get_label() == "tca"]
    assert list(line.get_ydata()) == [0.9]
    with pytest.raises(ValueError, match="has no point with kv_share and preamble"):
        plots.plot_keeping(models, "unused.png", protocol="preamble")
    with pytest.raises(ValueError, match="protocol = 'first': must be one of"):
        plots.plot_keeping(models, "unused.png", protocol="first")
