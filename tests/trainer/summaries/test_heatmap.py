"""The heat map as an image: later training steps above earlier ones, as in the tab."""

import numpy as np

from looptape.trainer.summaries import heatmap


def test_training_steps_go_up_time_steps_to_the_right_and_colours_are_relative_to_the_row():
    """As in the tab: the largest norm of each row is bright, a millionth dark, and what is below has vanished: grey."""
    rows = [[1.01e-6, 1.0, 1e-3, 9e-7], [5e-9, 1e-9, 0.0, np.nan]]
    pixels = heatmap.draw(heatmap.History([10, 20], [np.array(row, np.float32) for row in rows]), "rnn: state gradient")
    left, top, width, height = heatmap._LEFT, heatmap._TOP, heatmap._WIDTH, heatmap._HEIGHT
    cells = pixels[top : top + height, left : left + width].astype(int)
    later, earlier = (cells[row, width // 8 :: width // 4] for row in (height // 4, 3 * height // 4))
    dark, middle, bright = heatmap._COLOURS[[0, 4, 8]]
    grey = np.array(heatmap._VANISHED)
    assert np.abs(earlier - np.stack([dark, bright, middle, grey])).max() <= 2, "the first row, at the bottom"
    assert np.abs(later[[0, 2, 3]] - np.stack([bright, grey, np.array(heatmap._PADDING)])).max() <= 2


def test_labels_are_at_least_nine_pixels_high_at_the_size_tensorboard_shows():
    """A card of TensorBoard's Images tab is about 460 pixels wide; wider pictures are scaled down."""
    pixels = heatmap.draw(heatmap.History([1], [np.ones(4, np.float32)]), "rnn")
    assert pixels.shape[1] <= 470
    below = pixels[heatmap._TOP + heatmap._HEIGHT + 6 :, heatmap._LEFT :, 0]
    ink = np.flatnonzero((below < 128).any(axis=1))
    first = ink[: np.flatnonzero(np.diff(ink) > 1)[0] + 1] if (np.diff(ink) > 1).any() else ink
    assert len(first) >= 9, "the labels of the time steps"
