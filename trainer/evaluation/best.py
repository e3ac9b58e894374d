"""The best evaluation so far, by which a checkpoint and `best.weights.h5` are kept."""

import math
import warnings


class Best:
    """The best evaluation so far, by one of its results. A result that is NaN never is the best.

    Args:
        name: of the result, with a minus where larger is better; or None.
        evaluating: whether there is an evaluation.
    """

    def __init__(self, name, evaluating):
        if name is not None and not evaluating:
            raise ValueError(
                f"`keep_best` is {name!r} without `eval_dataset`; without an evaluation there is no best checkpoint. "
                "Pass both."
            )
        self.wanted = name is not None
        self._name = (name or "").removeprefix("-").removeprefix("val_")
        self._sign = -1.0 if (name or "").startswith("-") else 1.0
        self._step = self._latest = self._best = None
        self._is_new = False

    @property
    def name(self):
        """The result that counts, with a minus where larger is better."""
        return f"{'-' if self._sign < 0 else ''}{self._name or 'loss'}"

    def see(self, step, results):
        """Notes an evaluation. Returns how good it is, smaller is better: by the loss if nothing else is asked for."""
        if not self.wanted:
            return results["loss"]
        if self._name not in results:
            raise ValueError(f"`keep_best` is {self._name!r}; the evaluation gives {sorted(results)}. Use one of them.")
        self._step, self._latest = step, self._sign * results[self._name]
        self._is_new = not math.isnan(self._latest) and (self._best is None or self._latest < self._best)
        self._best = self._latest if self._is_new else self._best
        return self._latest

    def score(self, step, new=False):
        """How good the model of this step is, smaller is better; None if not evaluated, NaN, or not a `new` best."""
        known = self._step == step and (self._is_new or not new) and not math.isnan(self._latest)
        return self._latest if known else None

    def state(self):
        return [self._step, self._latest, self._best]

    def restore(self, state, name=None):
        """Puts back what `state` gave. Returns False if it is about another result, and is therefore forgotten.

        Args:
            state: from a checkpoint.
            name: the result that counted in the run that wrote it; None if that is not known.
        """
        if name not in (None, self.name):
            if self.wanted:
                warnings.warn(
                    f"`keep_best` was {name!r} and is {self.name!r} now. The best evaluation so far is forgotten: "
                    "from now on the evaluations of this `fit` count.",
                    stacklevel=2,
                )
            return False
        self._step, self._latest, self._best = state
        if self._best is not None and math.isnan(self._best):  # a checkpoint of 0.1
            self._best = None
        return True
