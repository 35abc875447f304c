"""Pictures of a Fisher matrix: when a run draws one, and how.

Matplotlib would take 100 ms for such a picture, as long as 200 steps that are replayed on a GPU.
Pillow takes a fiftieth of that.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from catnat import CategoricalHead, CatnatHead
from catnat.tree import levels

MAX_PICTURE = 2**22  # entries of the largest matrix that is drawn
# The entries of a Fisher matrix of softmax, sigmoid, and natural with A = 2 pi are at most 1/4.
_USUAL_LIMIT = 0.25
_DECADES = 3  # of magnitudes that the colours tell apart

# All in pixels. The matrix is a square; the colour bar is as high and stands to its right.
_WIDTH, _HEIGHT, _SIDE = 460, 400, 294
_LEFT, _TOP, _BAR_LEFT, _BAR_WIDTH = 60, 62, 371, 15
_BLACK, _GREY = (0, 0, 0), (140, 140, 140)
# From -limit to limit: RdBu of ColorBrewer (colorbrewer2.org), blue over white to red.
_COLOURS = (
    "053061", "2166ac", "4393c3", "92c5de", "d1e5f0", "f7f7f7",
    "fddbc7", "f4a582", "d6604d", "b2182b", "67001f",
)  # fmt: skip


def is_drawn(count: int, every: int) -> bool:
    """Whether there is a picture at this count: 0, 10, 100, 1000 and so on, and each n-th.

    Args:
        count: of steps or rollouts, from 0.
        every: n; 0 for no pictures at all.
    """
    power_of_ten = count == 0 or (str(count).strip("0") == "1" and count > 1)
    return every > 0 and (power_of_ten or count % every == 0)


def limit_of(matrix: Tensor) -> float:
    """The end of the colour scale of a run, from the first matrix that it draws."""
    return max(_USUAL_LIMIT, float(matrix.abs().max()))


def fisher_picture(matrix: Tensor, head: CategoricalHead, limit: float, title: str) -> Tensor:
    """A Fisher matrix as an image (H, W, 3) of bytes, with axes, colour bar and tree levels.

    Args:
        matrix: (S, S), finite.
        head: the head that it belongs to.
        limit: the colours go from -limit to limit, in the logarithm of the magnitude.
        title: what is written above.
    """
    values = matrix.detach().float().cpu().numpy()
    tree = getattr(head, "head", head)  # the head of a distribution given a mask
    spans = list(levels(tree.num_categories)) if isinstance(tree, CatnatHead) else []
    pixels = np.full((_HEIGHT, _WIDTH, 3), 255, np.uint8)
    pixels[_TOP : _TOP + _SIDE, _LEFT : _LEFT + _SIDE] = _square(values, limit)
    image = Image.fromarray(pixels)
    draw = ImageDraw.Draw(image)
    _draw_levels(draw, spans, len(values))
    _draw_axes(image, draw, len(values))
    _draw_bar(image, draw, limit, beyond=bool(np.abs(values).max() > limit * (1 + 1e-6)))
    middle = _LEFT + _SIDE / 2
    draw.text((middle, 13 if spans else _TOP - 16), title, _BLACK, _font(16), anchor="mm")
    return torch.from_numpy(np.array(image))


def _square(values: np.ndarray, limit: float) -> np.ndarray:
    """The colours of a matrix, (S, S) -> (side, side, 3).

    Where there are more entries than pixels, a pixel shows the one of largest magnitude.
    """
    first = np.arange(_SIDE) * len(values) // _SIDE  # entry of each pixel
    if len(values) > _SIDE:
        highest = np.maximum.reduceat(np.maximum.reduceat(values, first, 0), first, 1)
        lowest = np.minimum.reduceat(np.minimum.reduceat(values, first, 0), first, 1)
        return _colours(np.where(highest >= -lowest, highest, lowest), limit)
    return _colours(values, limit)[first][:, first]


def _place(values: np.ndarray, limit: float) -> np.ndarray:
    """Places on the colour bar, from -1 to 1.

    The logarithm of the magnitude counts, but around 0, in the middle tenth, the value itself.
    """
    size = np.abs(values) * (10**_DECADES / limit)
    above = 0.1 + 0.9 / _DECADES * np.log10(np.maximum(size, 1))
    places: np.ndarray = np.sign(values) * np.minimum(np.where(size < 1, 0.1 * size, above), 1)
    return places


def _colours(values: np.ndarray, limit: float) -> np.ndarray:
    """Colours of values, (...) -> (..., 3)."""
    numbers = np.rint(128 + 128 * _place(values, limit)).astype(int)
    colours: np.ndarray = _colour_table()[numbers]
    return colours


@cache
def _colour_table() -> np.ndarray:
    """257 colours from blue to red, (257, 3); the one in the middle stands for 0."""
    given = np.array([list(bytes.fromhex(each)) for each in _COLOURS])
    places = np.linspace(0, len(given) - 1, 257)
    channels = [np.interp(places, range(len(given)), channel) for channel in given.T]
    return np.stack(channels, 1).round().astype(np.uint8)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _ticks(S: int) -> list[int]:
    """Numbers of scores to write at an axis: all of a few, else about eight round ones."""
    if S <= 10:
        return list(range(1, S + 1))
    every = next(n for n in (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if S / n <= 9)
    return list(range(every, S + 1, every))


def _draw_axes(image: Image.Image, draw: ImageDraw.ImageDraw, S: int) -> None:
    """The frame of the matrix, numbers of scores below and to the left, and what they number."""
    right, bottom = _LEFT + _SIDE, _TOP + _SIDE
    draw.rectangle((_LEFT - 1, _TOP - 1, right, bottom), outline=_BLACK)
    for number in _ticks(S):
        along = (number - 0.5) * _SIDE / S
        x, y = int(_LEFT + along), int(_TOP + along)
        draw.line((x, bottom + 1, x, bottom + 4), _BLACK)
        draw.line((_LEFT - 5, y, _LEFT - 2, y), _BLACK)
        draw.text((x, bottom + 7), str(number), _BLACK, _font(13), anchor="mt")
        draw.text((_LEFT - 8, y), str(number), _BLACK, _font(13), anchor="rm")
    draw.text((_LEFT + _SIDE / 2, _HEIGHT - 12), "score  j", _BLACK, _font(14), anchor="mm")
    label = Image.new("RGB", (_SIDE, 18), "white")
    ImageDraw.Draw(label).text((_SIDE / 2, 9), "score  i", _BLACK, _font(14), anchor="mm")
    image.paste(label.transpose(Image.Transpose.ROTATE_90), (1, _TOP))


def _draw_bar(image: Image.Image, draw: ImageDraw.ImageDraw, limit: float, beyond: bool) -> None:
    """The colour bar; with a tip at each end where an entry of the matrix is beyond the limit."""
    right, bottom, middle = _BAR_LEFT + _BAR_WIDTH, _TOP + _SIDE, _TOP + _SIDE / 2
    shades = _colour_table()[np.linspace(256, 0, _SIDE).round().astype(int)]
    bar = np.repeat(shades[:, None], _BAR_WIDTH, 1)
    image.paste(Image.fromarray(bar), (_BAR_LEFT, _TOP))
    draw.rectangle((_BAR_LEFT - 1, _TOP - 1, right, bottom), outline=_BLACK)
    if beyond:
        for end, tip, colour in ((_TOP - 1, -13, shades[0]), (bottom, 13, shades[-1])):
            corners = [(_BAR_LEFT - 1, end), (right, end), (_BAR_LEFT + _BAR_WIDTH / 2, end + tip)]
            draw.polygon(corners, tuple(colour.tolist()), outline=_BLACK)
    above = [limit / 10**n for n in range(_DECADES + 1)]
    values = np.array([-each for each in above] + [0.0] + above)
    for value, place in zip(values.tolist(), _place(values, limit).tolist(), strict=True):
        y = int(middle - _SIDE / 2 * place)
        draw.line((right + 1, y, right + 4, y), _BLACK)
        draw.text((right + 8, y), f"{value:.3g}", _BLACK, _font(13), anchor="lm")


def _draw_levels(draw: ImageDraw.ImageDraw, spans: list[tuple[int, int]], S: int) -> None:
    """Lines between the levels of the tree, and the number of each level above the matrix."""
    for (_, end), _ in pairwise(spans):
        along = -(-(end - 1) * _SIDE // S)  # where the first pixel of the next level is
        draw.line((_LEFT + along, _TOP, _LEFT + along, _TOP + _SIDE), _GREY)
        draw.line((_LEFT, _TOP + along, _LEFT + _SIDE, _TOP + along), _GREY)
    for number, (begin, end) in enumerate(spans, 1):
        if end - begin >= S / 16:
            x = _LEFT + (begin + end - 2) / 2 * _SIDE / S
            draw.text((x, _TOP - 12), str(number), _BLACK, _font(13), anchor="mm")
    if spans:
        middle = (_LEFT + _SIDE / 2, _TOP - 30)
        draw.text(middle, "level of the tree", _BLACK, _font(14), anchor="mm")
