"""Pictures of gradients over time steps, for papers and notebooks. Needs matplotlib: `pip install looptape[pictures]`.

Each function draws the result of a `Trainer` method into `axes`, or into a new figure, and returns the axes.

    plots.norms(trainer.timestep_gradients(batch, per_example=True)["lstm"]["state"])
    plots.gains(trainer.timestep_gradients(batch)["lstm"]["gain"])
    plots.over_training(steps, rows)
    plots.spread({"lstm": looptape.analysis.together(runs, "loss/error")})
    plots.credit(trainer.credit_matrix(batch)["lstm"])
    plots.shares(trainer.timestep_gradients_by_loss(batch)[1]["lstm"])
"""

import numpy as np

# Safe for the colour-blind (Okabe and Ito), dark enough on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_QUANTILES = (0.1, 0.25, 0.75, 0.9)


def norms(values, axes=None, *, label=None, colour=COLOURS[0]):
    """Plots log10 ‖λ_t‖ over t: the median over the examples, with the middle 50 % and 80 % shaded.

    Args:
        values: [batch, time] or {name: [batch, time]}, from `timestep_gradients(..., per_example=True)`; or [time],
            drawn as a single line.
        axes: matplotlib axes.
        label: label in the legend.
        colour: colour of the line.

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
    """Plots the gain γ_t over t, with a line at 1. Going back in time, the gradient shrinks below it and grows above.

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


def spread(curves, axes=None, *, label=None):
    """Plots curves over training steps: the mean of several runs, with one standard deviation shaded.

    Args:
        curves: {name: (steps [rows], values [runs, rows])}, with values from `looptape.analysis.together`.
        axes: matplotlib axes.
        label: label of the vertical axis.

    >>> spread({"lstm": ([0, 10, 20], np.ones([3, 3]))}, label="loss").get_ylabel()
    'loss'
    """
    if not isinstance(curves, dict) or not curves:
        given = "empty" if isinstance(curves, dict) else f"a {type(curves).__name__}"
        raise ValueError(
            f"There are no curves to draw: `curves` is {given}. Pass {{name: looptape.analysis.together(runs, tag)}}."
        )
    axes = _axes(axes)
    for (name, (steps, values)), colour in zip(curves.items(), _colours(len(curves)), strict=True):
        values = np.asarray(values, float)
        if values.ndim != 2 or values.shape[1] != len(steps):
            raise ValueError(
                f"The curve {name!r} has values of shape {values.shape} for {len(steps)} steps; they must be [runs, "
                "steps]. Use looptape.analysis.together(runs, tag)."
            )
        mean, deviation = values.mean(axis=0), values.std(axis=0, ddof=1 if len(values) > 1 else 0)
        axes.fill_between(steps, mean - deviation, mean + deviation, color=colour, alpha=0.2, linewidth=0)
        axes.plot(steps, mean, color=colour, label=f"{name} ({len(values)} runs)")
    _label(axes, "training step", label or "value")
    _legend(axes)
    return axes


def rate_search(rates, losses, smoothed, suggestion=None, axes=None):
    """Plots the loss over the learning rate, from `Trainer.find_learning_rate`.

    Args:
        rates: [updates].
        losses: [updates].
        smoothed: [updates].
        suggestion: a rate to mark, or None.
        axes: matplotlib axes.

    >>> rate_search([0.1, 1.0], [2.0, 1.0], [2.0, 1.5], 0.1).get_xlabel()
    'learning rate'
    """
    axes = _axes(axes)
    axes.plot(rates, losses, color=COLOURS[0], alpha=0.3)
    axes.plot(rates, smoothed, color=COLOURS[0])
    axes.set_xscale("log")
    if suggestion is not None:
        axes.axvline(suggestion, color=COLOURS[1], linestyle="--", label=f"steepest at {suggestion:.2g}")
        _legend(axes)
    _label(axes, "learning rate", "loss")
    return axes


def over_training(steps, rows, axes=None):
    """Draws a heat map of training step against time step, with log10 of the norm as colour.

    Args:
        steps: [rows], increasing training steps; they set the positions of the rows and may be unevenly spaced.
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
    """Draws log10 M[s, t] as a triangular map: the loss at s (vertical) against the state at t. Zeros stay white.

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
    """Draws the share of each loss in the state gradient, {loss: [time]}, as stacked areas that sum to 1.

    Negative shares (a loss that pulls against the others) are stacked below 0.

    >>> shares({'error': np.full(20, 0.7), 'size': np.full(20, 0.3)}).get_xlabel()
    'time step t'
    """
    if not isinstance(values, dict) or not values:
        raise ValueError(
            f"`values` is {values!r}; it must be {{loss: [time]}}. Pass one layer of the second result of "
            "`timestep_gradients_by_loss`."
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
    """Returns log10, with NaN for zeros, which plots leave blank."""
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
