"""`Config`: the options that every experiment has. An experiment's own config inherits from it."""

import dataclasses

from experiments import building
from experiments.options import Checked, option


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    """The common options. A subclass adds its own and gives other defaults, e.g. `steps: int = 500`.

    >>> Config(steps=10, optimizer="adamx")
    Traceback (most recent call last):
    ValueError: …
    """

    workdir: str | None = option(
        None, "directory of checkpoints, TensorBoard runs and results; resumed if it exists", resume="ignore"
    )
    steps: int = option(1000, "updates in all, those before a resume included", least=1, resume="accept")
    batch_size: int = option(32, "examples per micro-batch", least=1)
    seed: int = option(0, "seed of the weights and the data", least=0, most=2**31 - 1)

    # The update.
    optimizer: str = option("adam", "how gradients become updates", choices=building.OPTIMIZERS)
    learning_rate: float = option(1e-3, "learning rate, or its peak", above=0, resume="accept")
    learning_rate_schedule: str = option(
        "constant",
        "constant, a cosine down to a hundredth at the last step, or a tenth less every 1,000 steps",
        choices=building.SCHEDULES,
    )
    warmup_steps: int = option(0, "updates over which the learning rate rises from 0", least=0)
    accumulation_steps: int = option(1, "micro-batches per update", least=1)
    clip_norm: float | None = option(None, "largest global gradient norm", above=0, resume="accept")
    ema_decay: float | None = option(None, "decay of averaged weights", above=0, below=1)
    evaluate_averaged: bool = option(False, "evaluate with the averaged weights", resume="accept")
    loss_weights: str = option(
        "",
        "weights of the losses, e.g. error=1,penalty=0.1; those left out are as the experiment has them",
        parse=building.pairs,
        resume="accept",
    )
    combiner: str = option(
        "weighted_sum", "how several losses become one update, e.g. uncertainty", parse=building.check_combiner
    )
    combiner_args: str = option("", "arguments of the combiner, e.g. alpha=1.5,update_every=10", parse=building.pairs)

    # The machine.
    precision: str = option("float32", "dtype policy of the model", choices=building.PRECISIONS)
    jit_compile: bool = option(False, "compile the update by XLA", resume="accept")
    strategy: str = option(
        "none",
        "none, mirrored (all GPUs), mirrored:N (N GPUs, or N logical CPU devices), or multi_worker (TF_CONFIG)",
        parse=building.replica_count,
        resume="accept",
    )
    deterministic: bool = option(False, "deterministic operations, slower on GPUs", resume="accept")

    # What is written, and when.
    log_every: int = option(100, "updates between rows in TensorBoard", least=1, resume="accept")
    eval_every: int | None = option(
        None, "updates between evaluations; at the end only if none", least=1, resume="accept"
    )
    checkpoint_every: int | None = option(
        None, "updates between checkpoints; one at the end in any case", least=1, resume="accept"
    )
    checkpoint_every_seconds: float | None = option(
        600.0, "seconds between checkpoints, beside checkpoint_every", above=0, resume="accept"
    )
    keep_checkpoints: int = option(3, "newest checkpoints to keep", least=1, resume="accept")
    probe_every: int = option(0, "updates between gradients per time step; 0 for never", least=0, resume="accept")
    init_from: str | None = option(
        None, "start from these weights: a work directory, *.weights.h5 or *.keras; a resume does without"
    )

    # To debug.
    fast_dev_run: bool = option(
        False, "a few updates of everything in a temporary directory, to see that it works", resume="ignore"
    )
    overfit_batches: int = option(0, "train and evaluate on these first batches only; 0 for all", least=0)
    limit_eval_batches: int | None = option(None, "batches per evaluation", least=1, resume="accept")
    run_eagerly: bool = option(False, "run without tracing, to debug", resume="accept")
    profile: str = option(
        "", "profile these updates, e.g. 20-30, for TensorBoard", parse=building.step_range, resume="ignore"
    )
    print_config: bool = option(False, "print all flags and stop", resume="ignore")
    verify_resume: bool = option(
        False, "train a little, kill it, resume, and compare every bit with a run that was not killed", resume="ignore"
    )
    accept_changes: bool = option(
        False, "resume although flags that change the model or the data are not the same", resume="ignore"
    )

    def __post_init__(self):
        super().__post_init__()
        building.check_together(self)
