"""Methods of `Trainer` that examine one batch or the run so far, and an update on one batch."""

from typing import Any

from looptape.dashboard.report import Report
from looptape.trainer.analysis import credit_matrix, loss_jacobian, timestep_gradients, truncation
from looptape.trainer.arguments import explained_methods
from looptape.trainer.debug import on_batch, rate_search
from looptape.trainer.loop.signals import interruptible


@explained_methods
class Examination:
    """Methods of `Trainer` for a loop of your own, a notebook or a test. Only `train_on_batch` trains."""

    _engine: Any  # set by `Trainer`

    @interruptible
    def train_on_batch(self, batch: Any) -> dict[str, float]:
        """Makes one update on a batch of arrays or tensors, for environments and other data made in Python.

        The update is the same as in `fit`, and the step counts. The batch is split into `accumulation_steps`
        micro-batches. Nothing is written, probed or evaluated. To write checkpoints, use `fit` with a `workdir`.

        Args:
            batch: one batch, such as `(inputs, targets)`. Batches may differ in their number of examples; other changes
                of shape cost a trace.

        Returns:
            {name: number} of this update: `loss`, each loss, values that hooks logged, the metrics. A non-finite
            update is not applied, and its losses are left out.

        >>> sorted(trainer.train_on_batch(batch))
        ['error', 'loss']
        """
        return on_batch.train_on_batch(self._engine, batch)

    def diagnose(self):
        """Findings about the run so far, worst first, each with `.text`, `.layer` and `.value`.

        They concern layers that forget (needs `probe_every`), variables that do not learn (needs `health_every`),
        losses in conflict (needs both and several losses) and the noise of the gradient. The closing table of a run and
        the Gradient Flow tab show the same.

        >>> trainer.diagnose()  # nothing was probed yet
        []
        """
        return self._engine.health_log.findings()

    def variable_health(self):
        """{minimizer: {quantity: {variable: value}}} of the latest update with health; "" is the trainer's own.

        Quantities: `gradient`, `weight`, `ratio`, `zeros`; with `health=…` also `dead` and `positions`, by layer.

        >>> trainer.variable_health()  # `health_every` is 0
        {}
        """
        return {name: dict(quantities) for name, quantities in self._engine.health_log.latest.items()}

    def noise_scale(self, name=""):
        """{"total": gradient noise scale in examples, loss: …}, smoothed over the updates with health.

        Includes each loss whose own gradient is known: with a combiner that computes it, or in probed updates.

        Args:
            name: name of the minimizer.

        Raises:
            ValueError: nothing was measured; the message says what to set.

        >>> parts = Trainer(trainer.model, "adam", {"error": "mse"}, accumulation_steps=2, health_every=1)
        >>> history = parts.fit(data.repeat(), steps=2, progress=False)
        >>> list(parts.noise_scale())
        ['total']
        """
        return self._engine.health_log.noise_scales(name)

    def timestep_gradients_by_loss(self, batch):
        """({loss: `timestep_gradients` of this weighted loss alone}, {layer: {loss: its share [time]}}).

        The share of a loss is ⟨λᵏ_t, λ_t⟩ / ‖λ_t‖²; shares sum to 1 at every time step, and may be negative.

        >>> gradients, shares = trainer.timestep_gradients_by_loss(batch)
        >>> gradients["error"]["lstm"]["state"].shape, shares["lstm"]["error"].shape
        ((6,), (6,))
        """
        return timestep_gradients.timestep_gradients_by_loss(self._engine, batch)

    def loss_jacobian(
        self, batch, *, variables=None, time_steps=None, norms_only=False, memory_limit_bytes=2 * 1024**3
    ):
        """The gradient of the loss *of each time step*, through every earlier use of the weights. Sums to dL/dW.

        Args:
            batch: one batch of the dataset. Losses are [batch, time]; one without time counts at the last time step.
            variables: variables or their paths; all trainable ones by default.
            time_steps: list of time steps of the loss; all by default.
            norms_only: return the norm of each gradient, [time], instead of the gradient.
            memory_limit_bytes: memory that the call may allocate; it decides how many losses share a backward pass.

        Returns:
            {variable path: array `[time, *variable shape]`}.

        >>> rows = trainer.loss_jacobian(batch)
        >>> {path: rows[path].shape for path in sorted(rows) if "recurrent" in path}  # doctest: +ELLIPSIS
        {'.../lstm_cell/recurrent_kernel': (6, 3, 12)}
        """
        return loss_jacobian.loss_jacobian(self._engine, batch, variables, time_steps, norms_only, memory_limit_bytes)

    def credit_matrix(
        self, batch, *, with_respect_to="state", time_steps=None, memory_limit_bytes=2 * 1024**3, workdir=None
    ):
        """{layer: M [time, time]}: M[s, t] = ‖∂l_s/∂s_t‖, how much the loss at s depends on the state at t.

        Entries are norms per example times the number of examples, averaged over the examples valid at t, as in
        `timestep_gradients`. With `with_respect_to="input"` they show how much the loss depends on the layer's input
        at t. With `workdir` the matrix is logged for the Gradient Flow tab.

        >>> credit = trainer.credit_matrix(batch)["lstm"]
        >>> credit.shape, credit[2, 3].item()  # a loss does not depend on a later state
        ((6, 6), 0.0)
        """
        examined = self._engine, batch, with_respect_to, time_steps, memory_limit_bytes, workdir
        return credit_matrix.credit_matrix(*examined)

    def window_advice(self, batch, window=None, *, keep=0.95, memory_limit_bytes=2 * 1024**3):
        """A `truncation.Advice`: how much truncated back-propagation with a window of this length cuts off.

        `batch` must be longer than the window; `keep` is the share of the gradient that the advised window must keep.

        >>> longer = tf.concat([batch[0], batch[0]], axis=1)
        >>> advice = trainer.window_advice((longer, longer[:, :, :1]), window=4)["lstm"]
        """
        return truncation.advise(self._engine, batch, window, keep, memory_limit_bytes)

    def report(self, *workdirs):
        """A page about one or more runs: verdicts, maps, curves, flags, results.

        Notebooks show it; `.save("report.html")` writes it to one file that opens offline, like `looptape report`. It
        reads the event files, so it also works during a run.

        Args:
            *workdirs: directories of runs; by default the directory of the latest `fit`.

        >>> history = trainer.fit(data.repeat(), steps=5, workdir="runs/reported", progress=False)
        >>> trainer.report().save("report.html").name
        'report.html'
        """
        if not workdirs and self._engine.workdir is None:
            raise ValueError(
                "No `fit` of this trainer had a `workdir`; a report is made from its files. Pass `fit(workdir=…)`, or "
                "the directories of other runs to `report`."
            )
        return Report(workdirs or [self._engine.workdir])

    @interruptible
    def find_learning_rate(
        self, dataset: Any, *, lowest: float = 1e-7, highest: float = 10.0, steps: int = 100, batch_size: int = 32
    ) -> rate_search.RateSearch:
        """Trains with a rising learning rate until the loss diverges, then restores everything.

        Returns the rates, the losses and a `suggestion`, the rate at which the loss falls most steeply; `draw()` plots
        them. `lowest` and `highest` are the first and the last rate of at most `steps` updates; `batch_size` is for
        arrays.

        >>> found = trainer.find_learning_rate(data.repeat(), steps=20)
        >>> len(found.rates) == len(found.losses) <= 20
        True
        """
        return rate_search.search(self._engine, dataset, lowest, highest, steps, batch_size)
