"""Methods as they are written on a command line."""

import pytest

from tca_jax.methods.written import joined, parse_parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("full", (("full", {}),)),
        ("streaming:window=512,sinks=8", (("streaming", {"window": 512, "sinks": 8}),)),
        ("full+random:share=0.25", (("full", {}), ("random", {"share": 0.25}))),
        ("snapkv:pooling=max,capacity=null", (("snapkv", {"pooling": "max", "capacity": None}),)),
        ("mine+full", (("mine", {}), ("full", {}))),
    ],
)
def test_parts_have_their_names_and_their_options_as_values(text, parts):
    assert parse_parts(text, "--method", ["mine"]) == parts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nosuch", r"^--method nosuch: 'nosuch' is not registered: must be one of \[.*'full'.*'mine'"),
        ("full+", r"^--method full\+: '' is not registered"),
        ("random:share", r"^--method random:share: 'share' must be written as option=value$"),
        ("random:bytes=1", r"^--method random:bytes=1: random has no option 'bytes': must be one of \[.*'share'"),
        ("mine:share=1", r"^--method mine:share=1: mine has no option 'share': must be one of \[\]$"),
    ],
)
def test_what_is_no_method_is_refused_with_what_was_written(text, message):
    with pytest.raises(ValueError, match=message):
        parse_parts(text, "--method", ["mine"])


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("random:share=0.5", "random", {"share": 0.5}),
        ("full+random:share=0.5", "full+random", {"random": {"share": 0.5}}),
        ("random:share=0.5+random:share=0.5", "random+random", {"random": {"share": 0.5}}),
    ],
)
def test_a_pair_has_its_options_by_the_names_of_its_parts(text, name, options):
    assert joined(parse_parts(text, "--method"), "--method") == (name, options)


def test_a_method_is_not_joined_with_itself_under_other_options():
    with pytest.raises(ValueError, match=r"^--method x: joins a method with itself under other options$"):
        joined(parse_parts("random:share=0.5+random:share=0.25", "--method"), "--method x")
