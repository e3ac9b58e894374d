"""The equations of a cell, cut where the hoisted loops need it: before, inside and after the loop."""

import abc

import tensorflow as tf


class Recurrence(abc.ABC):
    """A cell as pure functions of tensors. `both_ways.run` puts the loops around them.

    Shapes: [batch, …] inside the loops; [time, batch, …] in `factors` and `deltas`, which see all time steps at once.
    The first state is the output. Masks are the loops' business: a cell never sees one.
    """

    states: int  # how many
    kept: tuple[int, ...]  # widths of what `step` keeps, in units
    extra: tuple[int, ...]  # widths of what `backward_step` keeps beside the adjoints, in units

    def operands(self, weights):
        """(kernel, bias of the projection or None, tensors that the forward loop needs) of `(kernel, recurrent kernel,
        bias or None)`.
        """
        kernel, recurrent, bias = weights
        return kernel, bias, (recurrent,)

    def transposed(self, recurrent):
        """The tensors that the backward loop needs, made once per update from those of the forward loop."""
        return tuple(tf.transpose(one) for one in recurrent)

    @abc.abstractmethod
    def step(self, projected, states, recurrent):
        """One time step: (new states, tensors [batch, width * units] that `factors` needs). Both are tuples."""

    @abc.abstractmethod
    def factors(self, kept, before, after):
        """The factors of the adjoint for all time steps: a tuple of tensors. No matrix products.

        Args:
            kept: what `step` returned beside the states.
            before, after: the states at the start and the end of each time step.
        """

    @abc.abstractmethod
    def backward_step(self, adjoints, factors, transposed):
        """(dL/d(states before), tensors [batch, width * units] that `deltas` needs) from dL/d(states after)."""

    @abc.abstractmethod
    def deltas(self, adjoints, extra, factors):
        """(deltas, operands): tuples of tensors for `weight_gradients`; the first is dL/d(projected inputs)."""

    @abc.abstractmethod
    def weight_gradients(self, deltas, operands, times_hidden):
        """Gradients of the recurrent kernel and the bias.

        Args:
            deltas, operands: as from `deltas`, with time and batch as one axis.
            times_hidden: function of a delta: the sum over time steps and examples of (hidden state before) ⊗ delta.
        """

    def factorised(self, inputs, before, deltas, operands):
        """Contributions of the time steps to (kernel, recurrent kernel, bias): lists of factors (left, delta).

        The part of time step t is left_tᵀ delta_t, or the sum of delta_t over the examples where `left` is None. Parts
        of a kernel lie side by side, those of a bias one above the other.

        Args:
            inputs: of the layer.
            before: hidden state at the start of each time step, as (that of the first, those after each).
            deltas, operands: as from `deltas`.
        """
        return [(inputs, deltas[0])], [(before, deltas[-1])], [(None, delta) for delta in deltas]
