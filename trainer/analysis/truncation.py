"""Advises on the window of truncated back-propagation, from measurements on a longer sequence."""

from typing import Any, NamedTuple

import numpy as np

from looptape.trainer.analysis import credit_matrix
from looptape.trainer.analysis.loss_jacobian import Passes, Request

_AT_LEAST = 8  # time steps: with fewer there is nothing to learn about lags


class Advice(NamedTuple):
    """How much gradient each window keeps, for one recurrent layer. `str` gives a sentence."""

    layer: str
    length: int  # time steps of the batch that was looked at
    by_lag: Any  # [time]: mean ‖∂l_s/∂s_{s-d}‖ over s, for each lag d
    kept: Any  # [time]: share of Σ by_lag that consecutive windows of 1, 2, … time steps keep
    reach: int  # lags that hold the share to be kept, if every loss could look back that far
    window: int  # the shortest window that keeps the share; 0 if none as long as the batch does
    keep: float  # the share asked for
    present: int  # the window asked about
    present_kept: float  # what it keeps
    error: float  # ‖truncated gradient − gradient‖ / ‖gradient‖ with it, measured on this batch
    cosine: float  # between the two

    def __str__(self):
        advice = (
            f"a window of {self.window} keeps {self.keep:.0%}"
            if self.window
            else f"no window of up to {self.length} time steps keeps {self.keep:.0%}: try a batch of longer sequences"
        )
        return (
            f"{self.layer}: consecutive windows of {self.present} time steps keep {self.present_kept:.0%} of the "
            f"gradient ({1 - self.present_kept:.0%} is cut off; the weights' gradient is off by {self.error:.0%}, "
            f"cosine {self.cosine:.3f}); {advice}; the loss of a time step reaches back {self.reach} time steps."
        )


def advise(owner, batch, window, keep, memory_limit_bytes):
    """{layer: Advice}; see `Trainer.window_advice`."""
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep < 1:
        raise ValueError(f"`keep` is {keep!r}; it must be a share between 0 and 1. Use e.g. 0.95.")
    matrices = credit_matrix.credit_matrix(owner, batch, "state", None, memory_limit_bytes, None)
    length = next(iter(matrices.values())).shape[0]
    present = length // 2 if window is None else window
    if isinstance(present, bool) or not isinstance(present, int) or not 1 <= present < length or length < _AT_LEAST:
        raise ValueError(
            f"`window` is {window!r} and the batch has {length} time steps; the batch must have at least {_AT_LEAST}, "
            "and more than the window, to show what the window cuts off. Pass a batch of longer sequences."
        )
    error, cosine = truncation_error(owner, batch, present)
    return {
        layer: advice_of(layer, matrix, present, keep, error, cosine)
        for layer, matrix in matrices.items()
        if matrix.shape[1] == length
    }


def advice_of(layer, matrix, present, keep, error=float("nan"), cosine=float("nan")):
    """Makes an `Advice` from a credit matrix [time, time]."""
    lags = by_lag(matrix)
    total = lags.sum()
    kept = kept_by_windows(lags)
    enough = np.nonzero(kept >= keep)[0]
    reach = int(np.searchsorted(np.cumsum(lags) / total, keep)) + 1 if total > 0 else 0
    return Advice(
        layer,
        len(lags),
        lags,
        kept,
        reach,
        int(enough[0]) + 1 if len(enough) else 0,
        keep,
        present,
        float(kept[present - 1]),
        error,
        cosine,
    )


def by_lag(matrix):
    """Returns [time]: the mean of M[s, s − d] over all s that have a loss, for each lag d."""
    matrix = np.nan_to_num(np.asarray(matrix, np.float64))
    has_loss = matrix.any(axis=1)
    length = len(matrix)
    lags = np.zeros(length)
    for lag in range(length):
        own = np.diagonal(matrix, -lag)[has_loss[lag:]]
        lags[lag] = own.mean() if own.size else 0.0
    return lags


def kept_by_windows(lags):
    """Returns [time]: the share of the gradient that consecutive windows of 1, 2, … time steps keep.

    The loss at position p of a window reaches back p time steps within it; all positions are equally frequent.
    """
    total = lags.sum()
    if not total > 0:
        return np.full(len(lags), np.nan)
    return np.cumsum(np.cumsum(lags)) / np.arange(1, len(lags) + 1) / total


def truncation_error(owner, batch, window):
    """Returns (‖g_window − g‖ / ‖g‖, cosine) of the gradients of all weights, truncated at every window."""
    variables = owner.trainable_variables
    flat = []
    for cut in (None, window):
        rows, _, _ = Passes(owner, batch, Request(variables, window=cut)).whole()
        flat.append(np.concatenate([np.ravel(row).astype(np.float64) for row in rows]))
    whole, truncated = flat
    norms = np.linalg.norm(whole), np.linalg.norm(truncated)
    return float(np.linalg.norm(truncated - whole) / norms[0]), float(whole @ truncated / (norms[0] * norms[1]))
