"""Plots: what they show, and that nothing of it is cut off."""

import subprocess
import sys

import numpy as np
import pytest
from drawings import assert_nothing_touches_the_border, texts
from matplotlib.image import imread

from tca_jax.lab import plots
from tca_jax.lab.plots.attention import cumulative_shares, mean_attention
from tca_jax.lab.plots.selected import lay_out

NEEDLE_RGB = np.array([0xD5, 0x5E, 0x00]) / 255


def make_share(layers: int = 6, heads: int = 2) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.02, 1, (layers, heads))


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (6, 2), (32, 8), (80, 8)])
def test_the_heat_map_is_a_png_with_nothing_cut_off(tmp_path, layers, heads):
    name = "somebody/a-model-with_a_long_$name$-and-what-it-was-tuned-for-" * 2
    path = plots.plot_kept_share(make_share(layers, heads), 4096, name, tmp_path / "new" / "map.png")
    assert path == tmp_path / "new" / "map.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert_nothing_touches_the_border(path)


def test_the_heat_map_shows_the_kept_share_of_every_head(figures):
    share = make_share()
    plots.plot_kept_share(share, 4096, "tiny", "unused.png")
    axes, bar = figures[0].axes
    np.testing.assert_array_equal(axes.images[0].get_array(), share.T)
    assert axes.images[0].get_clim() == (0, 1)
    labels = {text.get_position(): text.get_text() for text in axes.texts}
    assert labels == {(i, j): f"{100 * share[i, j]:.0f}%" for i, j in np.ndindex(6, 2)}
    assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == ("layer", "KV head", "tokens kept")
    assert axes.get_title() == f"KV cache kept after 4,096 tokens: {share.mean():.1%} on average (tiny)"


def test_the_heat_map_of_what_a_prompt_attends_to_stands_beneath_that_of_the_cache(figures, tmp_path):
    share = make_share()
    plots.plot_kept_share(share, 4096, "tiny", "unused.png", prefill_share=share / 2)
    cache, prefill, *bars = figures[0].axes
    assert len(bars) == 2
    np.testing.assert_array_equal(cache.images[0].get_array(), share.T)
    np.testing.assert_array_equal(prefill.images[0].get_array(), share.T / 2)
    assert cache.get_title() == f"KV cache kept after 4,096 tokens: {share.mean():.1%} on average (tiny)"
    assert prefill.get_title() == f"Attended to while such a prompt is read: {share.mean() / 2:.1%} on average"
    assert cache.get_position().y0 > prefill.get_position().y0


def test_the_heat_map_of_worth_is_logarithmic_and_outlines_the_chosen_heads(figures):
    share, nats, chosen = (
        make_share(3, 2),
        np.array([[2.0, 0.0], [0.02, np.nan], [0.0005, 1e-6]]),
        np.zeros((3, 2), bool),
    )
    chosen[0, 0] = chosen[1, 1] = True
    worth = [plots.WorthMap("worth", nats, chosen), plots.WorthMap("unmeasured", nats * np.nan, chosen)]
    plots.plot_kept_share(share, 4096, "tiny", "unused.png", worth=worth)
    cache, worths, *bars = figures[0].axes
    assert (len(bars), worths.get_title(), bars[1].get_ylabel()) == (2, "worth", "nats")
    (image,) = worths.images
    scale = image.norm
    assert (scale.vmin, scale.vmax) == (2e-4, 2.0)
    np.testing.assert_allclose(np.diff(scale([0.02, 0.2, 2.0])), 1 / 4)
    shown = image.get_array()
    assert shown.mask.T.tolist() == [[False, False], [False, True], [False, False]]
    np.testing.assert_allclose(shown.compressed(), [2, 0.02, 0.0005, 2e-4, 2e-4])
    assert [patch.get_xy() for patch in worths.patches] == [pytest.approx(at) for at in ((-0.44, -0.42), (0.56, 0.58))]
    labels = {text.get_position(): text.get_text() for text in worths.texts}
    assert labels == {(0, 0): "2", (1, 0): "0.02", (2, 0): "5e-4"}
    assert not cache.patches


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), pytest.param(32, 8, marks=pytest.mark.integration)])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0])
def test_heat_maps_of_worth_are_a_png_with_nothing_cut_off(tmp_path, layers, heads, scale):
    share = make_share(layers, heads)
    nats = (share * scale).astype(np.float32)
    worth = [plots.WorthMap("Worth of reading blocks", nats, share > 0.5)] * 2
    path = plots.plot_kept_share(share, 4096, "tiny", tmp_path / "m.png", prefill_share=share, worth=worth)
    assert_nothing_touches_the_border(path)


def test_numbers_are_left_out_where_they_would_not_fit(figures):
    plots.plot_kept_share(make_share(80, 8), 4096, "tiny", "unused.png")
    assert texts(figures[0].axes[0]) == []


def make_kept(layers: int, heads: int, num_tokens: int, *preferring: tuple[int, int], at: range) -> np.ndarray:
    """Each head holds every tenth token and its window, the `preferring` ones hold the tokens `at` too."""
    kept = np.zeros((layers, heads, num_tokens), bool)
    kept[..., ::10] = True
    kept[..., (num_tokens // 16 - 64 // 16) * 16 :] = True
    for head in preferring:
        kept[head][list(at)] = True
    return kept


def test_a_plot_of_kept_tokens_is_a_png_with_the_needle_marked_and_nothing_cut_off(tmp_path):
    tokens = ("The code of the harbor is 482913.\n$x$\t日" * 20)[:500]
    kept = make_kept(6, 2, 500, (1, 1), at=range(78, 111))
    path = plots.plot_kept_tokens(
        kept, tokens, (78, 111), "$a$ harbor", "a-model-" * 20, tmp_path / "new" / "demo.png", window_start=432
    )
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert_nothing_touches_the_border(path)
    marked = (np.abs(imread(path)[..., :3] - NEEDLE_RGB) < 0.01).all(axis=-1)
    assert marked.sum() > 500


def test_a_plot_of_kept_tokens_shows_what_heads_keep_of_the_prompt_and_of_the_needle(figures):
    kept = make_kept(2, 2, 500, (1, 0), at=range(100, 120))
    plots.plot_kept_tokens(kept, "x" * 500, (100, 120), "harbor", "tiny", "unused.png", block_size=16, window_start=432)
    heat_map, strip, zoom = figures[0].axes[:3]
    assert "'harbor'" in figures[0].get_suptitle()
    np.testing.assert_array_equal(heat_map.images[0].get_array(), kept.mean(axis=-1).T)
    shown = [kept[1, 0], kept[0, 0], kept[0, 1], kept[1, 1]]
    blocks = np.array([[row[i : i + 16].mean() for i in range(0, 500, 16)] for row in shown])
    np.testing.assert_allclose(strip.collections[0].get_array(), blocks)
    left, right = np.ceil(zoom.get_xlim()).astype(int)
    assert left < 100 < 120 < right
    np.testing.assert_array_equal(zoom.collections[0].get_array(), np.stack(shown)[:, left:right])
    (outline,) = zoom.patches
    assert (outline.get_x(), outline.get_width()) == (99.5, 20)
    assert texts(strip) == ["needle", "local window"]


def test_the_heads_that_prefer_the_needle_are_shown_and_the_one_that_does_least(figures):
    kept = make_kept(8, 1, 500, (7, 0), (2, 0), at=range(100, 120))
    kept[3, 0, 100:120] = False
    kept[5, 0, 101:105] = True
    plots.plot_kept_tokens(kept, "x" * 500, (100, 120), "harbor", "tiny", "unused.png", block_size=16, window_start=432)
    for axes in figures[0].axes[1:3]:
        rows = [label.get_text() for label in axes.get_yticklabels()]
        assert rows == [f"layer {i}, head 0" for i in (2, 7, 5, 0, 3)]


def test_the_text_of_the_needle_stands_under_its_tokens(figures):
    tokens = [*"x" * 200, *"key\n= 日7", "a-very-long-token", *"y" * 291]
    kept = make_kept(6, 2, 500, at=range(0))
    plots.plot_kept_tokens(kept, tokens, (200, 209), "key", "tiny", "unused.png", block_size=16, window_start=432)
    zoom = figures[0].axes[2]
    labels = {round(p): t.get_text() for p, t in zip(zoom.get_xticks(), zoom.get_xticklabels(), strict=True)}
    assert "".join(labels[p] for p in range(200, 208)) == "key↵=·□7"
    assert labels[208] == "a-very-long…"


def test_positions_stand_under_a_needle_too_long_for_its_text(figures):
    kept = make_kept(6, 2, 500, at=range(0))
    plots.plot_kept_tokens(kept, "x" * 500, (100, 300), "key", "tiny", "unused.png", block_size=16, window_start=432)
    assert figures[0].axes[2].get_xlabel() == "token position"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"needle_span": (10, 10)}, r"needle_span = \(10, 10\): must be a range inside the 500 tokens"),
        ({"needle_span": (490, 501)}, r"needle_span = \(490, 501\)"),
        ({"tokens": "x" * 499}, r"tokens has 499 entries: must have one for each of the 500 in kept"),
    ],
)
def test_a_plot_of_kept_tokens_of_wrong_arguments_is_refused(tmp_path, changes, message):
    kept = np.zeros((6, 2, 500), bool)
    arguments = {"tokens": "x" * 500, "needle_span": (10, 20), "needle_name": "key", "name": "tiny", **changes}
    with pytest.raises(ValueError, match=message):
        plots.plot_kept_tokens(kept, path=tmp_path / "demo.png", **arguments)
    assert not (tmp_path / "demo.png").exists()


def spread_tokens(count: int = 3000) -> list[str]:
    return ["ab ", "c\n", "日", "$x$", "\t"] * (count // 5)


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (6, 4), (40, 8)])
def test_a_plot_of_selected_tokens_is_a_png_with_nothing_cut_off(tmp_path, layers, heads):
    tokens = spread_tokens()
    kept = make_kept(layers, heads, len(tokens), at=range(0))
    path = plots.plot_selected_tokens(kept, tokens, "a-model-" * 20, tmp_path / "new" / "s.png", window_start=2900)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert_nothing_touches_the_border(path)


def test_selected_tokens_are_shaded_by_the_heads_that_drop_something(figures):
    kept = make_kept(2, 2, 500, (1, 0), at=range(100, 120))
    kept[0, 0] = True  # dense: tells no token from another
    plots.plot_selected_tokens(kept, "x" * 500, "tiny", "unused.png", block_size=16, window_start=432)
    overview, page = figures[0].axes[:2]
    blocks = np.array([[row[i : i + 16].mean() for i in range(0, 500, 16)] for row in kept.reshape(4, 500)])
    np.testing.assert_allclose(overview.collections[0].get_array(), blocks)
    shades = page.collections[0].get_array().compressed()
    np.testing.assert_allclose(shades, kept.reshape(4, 500)[1:].mean(axis=0))
    assert "3 of 4 heads" in page.get_title()


def test_a_page_of_selected_tokens_begins_where_it_is_asked_to_and_shows_one_head(figures):
    kept = make_kept(2, 2, 500, (1, 0), at=range(100, 120))
    plots.plot_selected_tokens(kept, "x" * 500, "tiny", "unused.png", start=90, layer=1, head=0)
    page = figures[0].axes[1]
    np.testing.assert_allclose(page.collections[0].get_array().compressed(), kept[1, 0, 90:])
    assert "Tokens 90 to 499" in page.get_title()
    assert "layer 1, KV head 0" in page.get_title()


def test_a_page_breaks_lines_where_the_text_does_and_at_its_width():
    pieces, shown = lay_out(["ab\n", "c", "d" * 110, "e"])
    assert [(piece.line, piece.column, piece.text) for piece in pieces] == [
        (0, 0, "ab↵"),
        (1, 0, "c"),
        (2, 0, "d" * 110),
        (3, 0, "e"),
    ]
    assert shown == 4


def test_a_page_ends_with_a_whole_token():
    pieces, shown = lay_out(["x\n"] * 35 + ["y\nz\n", "w"])
    assert shown == 35
    assert {piece.token for piece in pieces} == set(range(35))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": "x" * 499}, r"tokens has 499 entries: must have one for each of the 500 in kept"),
        ({"start": 500}, r"start = 500: must lie in \[0, 499\]"),
        ({"layer": 6}, r"layer = 6: must lie in \[0, 5\]"),
        ({"head": -1}, r"head = -1: must lie in \[0, 1\]"),
    ],
)
def test_a_plot_of_selected_tokens_of_wrong_arguments_is_refused(tmp_path, changes, message):
    arguments = {"tokens": "x" * 500, "name": "tiny", **changes}
    with pytest.raises(ValueError, match=message):
        plots.plot_selected_tokens(np.zeros((6, 2, 500), bool), path=tmp_path / "s.png", **arguments)
    assert not (tmp_path / "s.png").exists()


def make_received(layers: int = 6, heads: int = 2, num_tokens: int = 2000) -> np.ndarray:
    received = np.random.default_rng(1).exponential(size=(layers, heads, num_tokens)).astype(np.float32)
    return received / received.sum(axis=-1, keepdims=True) * num_tokens


@pytest.mark.parametrize(("layers", "heads", "num_tokens"), [(1, 1, 16), (6, 2, 2000), (40, 8, 600)])
def test_a_plot_of_attention_is_a_png_with_nothing_cut_off(tmp_path, layers, heads, num_tokens):
    path = plots.plot_attention(make_received(layers, heads, num_tokens), "a-model-" * 20, tmp_path / "a.png")
    assert_nothing_touches_the_border(path)


def test_attention_is_the_mean_of_the_queries_that_see_a_key_without_the_window(figures):
    received = make_received(2, 2, 400)
    plots.plot_attention(received, "tiny", "unused.png", window=100)
    heat_map, curves = figures[0].axes[:2]
    mean = received / np.arange(400, 0, -1)
    np.testing.assert_allclose(heat_map.collections[0].get_array(), mean.reshape(4, 400)[:, :300])
    assert len(curves.lines) == 4 + 2  # a line a head, and two shares of the mass
    np.testing.assert_allclose(mean_attention(received), mean)


def test_cumulative_shares_count_the_tokens_of_the_most_mass_first():
    shares = cumulative_shares(np.array([[[1.0, 6.0, 0.0, 3.0]]]))
    np.testing.assert_allclose(shares[0, 0], [0.6, 0.9, 1.0, 1.0])


@pytest.mark.parametrize(
    ("tokens", "window", "message"),
    [(8, None, "received has 8 tokens: must have at least 16"), (32, 32, r"window = 32: must lie in \[0, 31\]")],
)
def test_a_plot_of_attention_of_wrong_arguments_is_refused(tmp_path, tokens, window, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_attention(make_received(1, 1, tokens), "tiny", tmp_path / "a.png", window=window)


def test_plots_need_no_display_and_leave_pyplot_alone():
    code = "import sys; from tca_jax.lab import plots; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_picture_of_another_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"map.jpg: pictures are PNG files; the name must end in .png"):
        plots.plot_kept_share(make_share(), 4096, "tiny", tmp_path / "map.jpg")
    assert not list(tmp_path.iterdir())
