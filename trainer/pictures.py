"""Pictures of gradients over time steps, for papers and notebooks. Needs matplotlib: `pip install looptape[pictures]`.

Each function draws what a method of `Trainer` returned into `axes` (or into a figure of its own) and returns the axes.

    pictures.norms(trainer.timestep_gradients(batch, per_example=True)["lstm"]["state"])
    pictures.gains(trainer.timestep_gradients(batch)["lstm"]["gain"])
    pictures.over_training(steps, rows)
    pictures.credit(trainer.credit_matrix(batch)["lstm"])
    pictures.shares(trainer.timestep_gradients_by_loss(batch)[1]["lstm"])
"""

import numpy as np

# Safe for the colour-blind (Okabe and Ito), dark enough on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_QUANTILES = (0.1, 0.25, 0.75, 0.9)


def norms(values, axes=None, *, label=None, colour=COLOURS[0]):
    """log10 of ‖λ_t‖ by t: the median over the examples, with the middle half and the middle 80 % shaded.

    Args:
        values: [batch, time] or {name: [batch, time]}, from `timestep_gradients(..., per_example=True)`; or [time],
            drawn as a line alone.
        axes: matplotlib axes.
        label: for the legend.
        colour: of the line.

    >>> norms(np.exp(-np.arange(20.0)).reshape(1, 20)).get_xlabel()
    'time step t'
    """
    axes = _axes(axes)
    if isinstance(values, dict):
        for (name, own), each in zip(values.items(), _colours(len(values)), strict=True):
            norms(own, axes, label=name, colour=each)
        return axes
    logs = _log10(values)
    times = np.arange(logs.shape[-1])
    if logs.ndim == 2:
        low, lower, upper, high = np.nanquantile(logs, _QUANTILES, axis=0)
        axes.fill_between(times, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.fill_between(times, lower, upper, color=colour, alpha=0.25, linewidth=0)
        logs = np.nanmedian(logs, axis=0)
    axes.plot(times, logs, color=colour, label=label)
    _label(axes, "time step t", "log10 ‖∂L/∂s_t‖")
    if label is not None:
        _legend(axes)
    return axes


def gains(values, axes=None, *, label=None, colour=COLOURS[0]):
    """The gain γ_t by t, with a line at 1: below it the gradient shrinks on its way back, above it grows.

    `values`: [time] or {name: [time]}.

    >>> gains({'gru': np.full(20, 0.9)}).get_xlabel()
    'time step t'
    """
    axes = _axes(axes)
    if not axes.lines:
        axes.axhline(1.0, color="0.5", linewidth=1, linestyle="--")
    if isinstance(values, dict):
        for (name, own), each in zip(values.items(), _colours(len(values)), strict=True):
            gains(own, axes, label=name, colour=each)
        return axes
    values = np.asarray(values, float)
    axes.plot(np.arange(len(values)), values, color=colour, label=label)
    _label(axes, "time step t", "gain ‖r_t‖ / ‖λ_t‖")
    if label is not None:
        _legend(axes)
    return axes


def over_training(steps, rows, axes=None):
    """A heat map: training step by time step, log10 of the norm as colour.

    Args:
        steps: [rows], the training steps, rising. Rows are placed by them, also where they are not evenly spaced.
        rows: [rows, time].

    >>> over_training([0, 10, 20], np.ones([3, 20])).get_ylabel()
    'training step'
    """
    steps, logs = np.asarray(steps, float), _log10(rows)
    if logs.ndim != 2 or len(steps) != len(logs) or len(steps) < 2:
        raise ValueError(
            f"`steps` has shape {steps.shape} and `rows` {logs.shape}; there must be one row [time] for each step, and "
            "at least two. Collect `timestep_gradients` during training."
        )
    axes = _axes(axes)
    middles = (steps[1:] + steps[:-1]) / 2
    edges = np.concatenate([[steps[0]], middles, [steps[-1]]])
    return _mesh(axes, np.arange(logs.shape[1] + 1) - 0.5, edges, logs, "time step t", "training step", "log10 norm")


def credit(matrix, axes=None):
    """The triangular map of M[s, t], log10: the loss at s (upwards) by the state at t. Zeros are left white.

    Time steps before the first and after the last loss are not shown.

    >>> credit(np.tril(np.ones([9, 9]))).get_ylabel()
    'loss at time step s'
    """
    logs = _log10(matrix)
    if logs.ndim != 2:
        raise ValueError(
            f"The credit matrix has shape {logs.shape}; it must be [time, time]. Pass one layer of `credit_matrix`."
        )
    axes = _axes(axes)
    edges = [np.arange(size + 1) - 0.5 for size in logs.shape]
    label = "log10 ‖∂l_s/∂s_t‖"
    _mesh(axes, edges[1], edges[0], logs, "state at time step t", "loss at time step s", label)
    with_loss = np.nonzero(np.isfinite(logs).any(axis=1))[0]
    if with_loss.size:
        axes.set_ylim(with_loss[0] - 0.5, with_loss[-1] + 0.5)
    return axes


def shares(values, axes=None):
    """The share of each loss in the state gradient, {loss: [time]}, as stacked areas; they sum to 1.

    Negative shares (a loss that pulls against the others) are stacked below 0.

    >>> shares({'error': np.full(20, 0.7), 'size': np.full(20, 0.3)}).get_xlabel()
    'time step t'
    """
    if not isinstance(values, dict) or not values:
        raise ValueError(
            f"`values` is {values!r}; it must be {{loss: [time]}}. Pass one layer of what `timestep_gradients_by_loss` "
            "returns second."
        )
    axes = _axes(axes)
    above = below = np.zeros(len(next(iter(values.values()))))
    times = np.arange(len(above))
    for (name, own), colour in zip(values.items(), _colours(len(values)), strict=True):
        own = np.nan_to_num(np.asarray(own, float))
        top, bottom = above + np.maximum(own, 0), below + np.minimum(own, 0)
        axes.fill_between(times, above, top, color=colour, label=name, linewidth=0)
        axes.fill_between(times, below, bottom, color=colour, linewidth=0)
        above, below = top, bottom
    axes.axhline(0.0, color="0.3", linewidth=0.8)
    _label(axes, "time step t", "share of the state gradient")
    _legend(axes)
    return axes


def _axes(axes):
    if axes is not None:
        return axes
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "Pictures need matplotlib, which is not installed. Run `pip install looptape[pictures]`."
        ) from None
    # Without pyplot: nothing is kept alive, and no window opens. A notebook shows `axes.figure`.
    figure = Figure(figsize=(5.0, 3.2), dpi=150, layout="constrained")
    return figure.subplots()


def _colours(count):
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _log10(values):
    """Zeros have no logarithm and become NaN, which is left blank."""
    values = np.asarray(values, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(values)
    return np.where(np.isfinite(logs), logs, np.nan)


def _mesh(axes, x, y, logs, x_label, y_label, label):
    finite = logs[np.isfinite(logs)]
    low, high = np.percentile(finite, [1, 99]) if finite.size else (0.0, 1.0)
    mesh = axes.pcolormesh(x, y, logs, cmap="viridis", vmin=low, vmax=max(high, low + 1e-9), rasterized=True)
    axes.figure.colorbar(mesh, ax=axes, label=label)
    _label(axes, x_label, y_label)
    return axes


def _legend(axes):
    axes.legend(framealpha=0.85, edgecolor="none", fontsize=8)


def _label(axes, x_label, y_label):
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
