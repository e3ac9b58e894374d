"""A heat map of training step × time step, drawn with Pillow, which TensorBoard brings along."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_ROWS = 200  # training steps shown; older ones are thinned out when there are more
# About the size at which TensorBoard shows it: a larger picture is scaled down there, and its labels with it.
_LEFT, _TOP, _RIGHT, _BOTTOM = 70, 36, 92, 48
_WIDTH, _HEIGHT, _FONT = 300, 216, 15
_INK, _PAPER, _NAN, _PADDING, _VANISHED = (40,) * 3, (255,) * 3, (214, 39, 40), (235,) * 3, (150,) * 3
_LOW = -6.0  # log10 of what still has a colour, relative to the row's largest value
# Viridis at nine points: readable for the colour-blind, and in grey.
_COLOURS = np.array(
    [
        (68, 1, 84),
        (71, 44, 122),
        (59, 81, 139),
        (44, 113, 142),
        (33, 144, 141),
        (39, 173, 129),
        (92, 200, 99),
        (170, 220, 50),
        (253, 231, 37),
    ],
    float,
)


class History:
    """The rows of one heat map: kept to a number, by leaving out every second of the older ones."""

    def __init__(self, steps=(), rows=()):
        self.steps, self.rows = list(steps), list(rows)
        self.drawn = 0  # number of rows logged when it was drawn last

    def add(self, step, row):
        self.steps.append(int(step))
        self.rows.append(np.array(row, np.float32))
        if len(self.rows) > _ROWS:
            self.steps, self.rows = self.steps[::2], self.rows[::2]


def draw(history, title):
    """[height, width, 3] pixels: time step to the right, training step up, colour by the share of the row's largest."""
    length = max(len(row) for row in history.rows)
    values = np.full((len(history.rows), length), np.nan)
    for index, row in enumerate(history.rows):
        values[index, : len(row)] = row
    image = Image.new("RGB", (_LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + _BOTTOM), _PAPER)
    cells = Image.fromarray(_paint(values)[::-1]).resize((_WIDTH, _HEIGHT), Image.Resampling.NEAREST)
    image.paste(cells, (_LEFT, _TOP))
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(_FONT)
    pen.text((_LEFT, 10), title, _INK, font)
    pen.rectangle((_LEFT - 1, _TOP - 1, _LEFT + _WIDTH, _TOP + _HEIGHT), outline=_INK)
    _axes(pen, font, history.steps, length)
    _colour_bar(image, pen, font)
    return np.asarray(image)


def _relative(values):
    """log10 of each row relative to its largest value, as in the tab; -inf at 0."""
    finite = np.where(np.isfinite(values), values, 0.0)
    largest = finite.max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.log10(finite / np.where(largest > 0, largest, 1.0))


def _paint(values):
    logs = _relative(values)
    colours = _colour((np.maximum(logs, _LOW) - _LOW) / -_LOW)
    colours[logs < _LOW] = _VANISHED
    colours[np.isnan(values)] = _PADDING
    colours[np.isinf(values)] = _NAN
    return colours.astype(np.uint8)


def _colour(share):
    position = np.clip(share, 0, 1) * (len(_COLOURS) - 1)
    lower = np.minimum(position.astype(int), len(_COLOURS) - 2)
    part = (position - lower)[..., np.newaxis]
    return _COLOURS[lower] * (1 - part) + _COLOURS[lower + 1] * part


def _axes(pen, font, steps, length):
    bottom = _TOP + _HEIGHT
    for t in sorted({round(t) for t in np.linspace(0, length - 1, min(length, 5))}):
        x = _LEFT + (t + 0.5) * _WIDTH / length
        pen.line((x, bottom, x, bottom + 4), _INK)
        pen.text((x, bottom + 6), str(t), _INK, font, anchor="ma")
    pen.text((_LEFT + _WIDTH / 2, bottom + 26), "time step", _INK, font, anchor="ma")
    for row in sorted({round(r) for r in np.linspace(0, len(steps) - 1, min(len(steps), 6))}):
        y = _TOP + _HEIGHT - (row + 0.5) * _HEIGHT / len(steps)
        pen.line((_LEFT - 5, y, _LEFT - 1, y), _INK)
        pen.text((_LEFT - 8, y), f"{steps[row]:,}", _INK, font, anchor="rm")
    pen.text((6, 10), "step", _INK, font)


def _colour_bar(image, pen, font):
    left, width = _LEFT + _WIDTH + 12, 14
    bar = np.repeat(_colour(np.linspace(1, 0, _HEIGHT))[:, np.newaxis], width, axis=1).astype(np.uint8)
    image.paste(Image.fromarray(bar), (left, _TOP))
    for share in np.linspace(0, 1, 4):
        y = _TOP + (1 - share) * (_HEIGHT - 1)
        pen.text((left + width + 5, y), f"{10 ** (_LOW * (1 - share)):g}", _INK, font, anchor="lm")
