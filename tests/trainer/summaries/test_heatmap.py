"""The heat map as an image: later training steps above earlier ones, as in the tab."""

import numpy as np

from looptape.trainer.summaries import heatmap


def test_training_steps_go_up_and_time_steps_to_the_right():
    history = heatmap.History([10, 20], [np.array([1e-4, 1.0], np.float32), np.array([1e-4, 1e-4], np.float32)])
    pixels = heatmap.draw(history, "rnn: state gradient")
    left, top, width, height = heatmap._LEFT, heatmap._TOP, heatmap._WIDTH, heatmap._HEIGHT
    cells = pixels[top : top + height, left : left + width].astype(int)
    later, earlier = cells[height // 4], cells[3 * height // 4]
    dark, bright = heatmap._COLOURS[0], heatmap._COLOURS[-1]
    assert np.abs(earlier[3 * width // 4] - bright).max() <= 2, "the first row, at the bottom"
    assert np.abs(earlier[width // 4] - dark).max() <= 2
    assert np.abs(later - dark).max() <= 2


def test_labels_are_at_least_nine_pixels_high_at_the_size_tensorboard_shows():
    """A card of TensorBoard's Images tab is about 460 pixels wide; wider pictures are scaled down."""
    pixels = heatmap.draw(heatmap.History([1], [np.ones(4, np.float32)]), "rnn")
    assert pixels.shape[1] <= 470
    below = pixels[heatmap._TOP + heatmap._HEIGHT + 6 :, heatmap._LEFT :, 0]
    ink = np.flatnonzero((below < 128).any(axis=1))
    first = ink[: np.flatnonzero(np.diff(ink) > 1)[0] + 1] if (np.diff(ink) > 1).any() else ink
    assert len(first) >= 9, "the labels of the time steps"
