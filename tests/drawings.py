"""What tests of plots look at: a PNG's edges, and the texts of axes."""

from matplotlib.image import imread


def assert_nothing_touches_the_border(path) -> None:
    image = imread(path)[..., :3]
    for edge in (image[:2], image[-2:], image[:, :2], image[:, -2:]):
        assert edge.min() == 1.0


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]
