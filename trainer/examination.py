"""What a trainer tells about the time steps of one batch beyond `timestep_gradients`. Part of `Trainer`."""

from trainer import credit, jacobian, perloss, windows


class Examination:
    """Methods of `Trainer` for a notebook or a test. Nothing is trained by them, and no state moves."""

    def timestep_gradients_by_loss(self, batch):
        """({loss: what `timestep_gradients` returns for it alone, weighted}, {layer: {loss: its share [time]}}).

        The share of a loss is ⟨λᵏ_t, λ_t⟩ / ‖λ_t‖²; shares sum to 1 at every time step, and may be negative.

        >>> gradients, shares = trainer.timestep_gradients_by_loss(batch)
        >>> gradients["error"]["lstm"]["state"].shape, shares["lstm"]["error"].shape
        ((6,), (6,))
        """
        return perloss.timestep_gradients_by_loss(self, batch)

    def loss_jacobian(
        self, batch, *, variables=None, time_steps=None, norms_only=False, memory_limit_bytes=2 * 1024**3
    ):
        """The gradient of the loss *of each time step*, through every earlier use of the weights. Sums to dL/dW.

        Args:
            batch: as the dataset gives it. Losses are [batch, time]; one without time counts to the last time step.
            variables: those wanted, by path or by themselves; all trainable ones by default.
            time_steps: those wanted; all by default.
            norms_only: the norm of each gradient, [time], instead of the gradient.
            memory_limit_bytes: what this may take beyond what the process has; decides how many go back at once.

        Returns:
            {variable path: array `[time, *variable shape]`}.

        >>> rows = trainer.loss_jacobian(batch)
        >>> {path: rows[path].shape for path in sorted(rows) if "recurrent" in path}  # doctest: +ELLIPSIS
        {'.../lstm_cell/recurrent_kernel': (6, 3, 12)}
        """
        return jacobian.loss_jacobian(self, batch, variables, time_steps, norms_only, memory_limit_bytes)

    def credit_matrix(
        self, batch, *, with_respect_to="state", time_steps=None, memory_limit_bytes=2 * 1024**3, workdir=None
    ):
        """{layer: M [time, time]}: M[s, t] = ‖∂l_s/∂s_t‖, how much the loss at s depends on the state at t.

        Norms per example times the number of examples, averaged over those valid at t, as in `timestep_gradients`.
        `with_respect_to="input"`: on the input of the layer at t. With `workdir` it is logged for the dashboard.

        >>> credit = trainer.credit_matrix(batch)["lstm"]
        >>> credit.shape, credit[2, 3].item()  # a loss does not depend on a later state
        ((6, 6), 0.0)
        """
        return credit.credit_matrix(self, batch, with_respect_to, time_steps, memory_limit_bytes, workdir)

    def window_advice(self, batch, window=None, *, keep=0.95, memory_limit_bytes=2 * 1024**3):
        """A `windows.Advice`: what truncated back-propagation in windows of so many time steps cuts off.

        `batch` must be longer than the window, as it shows what the window does not; `keep` is the share of the
        gradient that the advised window has to keep.

        >>> longer = tf.concat([batch[0], batch[0]], axis=1)
        >>> advice = trainer.window_advice((longer, longer[:, :, :1]), window=4)["lstm"]
        """
        return windows.advise(self, batch, window, keep, memory_limit_bytes)
