"""`Config`: the options of every experiment. An experiment's own config inherits from it."""

import dataclasses

from looptape.experiments.launch import factories
from looptape.experiments.launch.options import Checked, option
from looptape.trainer.health.options import check_parts


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    """The options of every experiment. A subclass adds its own and changes defaults, e.g. `steps: int = 500`.

    >>> Config(steps=10, optimizer="adamx")
    Traceback (most recent call last):
    ValueError: …
    """

    workdir: str | None = option(
        None, "directory of checkpoints, TensorBoard runs and results; an existing run resumes", resume="ignore"
    )
    steps: int = option(1000, "total number of updates, including those before a resume", least=1, resume="accept")
    batch_size: int = option(32, "examples per micro-batch", least=1)
    seed: int = option(0, "seed of the weights and the data", least=0, most=2**31 - 1)

    # The update.
    optimizer: str = option("adam", "optimizer", choices=factories.OPTIMIZERS)
    learning_rate: float = option(1e-3, "learning rate, or its peak", above=0, resume="accept")
    learning_rate_schedule: str = option(
        "constant",
        "constant, cosine decay to 1 % at the last step, or 10 % less every 1,000 steps",
        choices=factories.SCHEDULES,
    )
    warmup_steps: int = option(0, "updates over which the learning rate rises from 0", least=0)
    accumulation_steps: int = option(1, "micro-batches per update", least=1)
    clip_norm: float | None = option(None, "largest global gradient norm", above=0, resume="accept")
    ema_decay: float | None = option(None, "decay of averaged weights", above=0, below=1)
    evaluate_averaged: bool = option(False, "evaluate with the averaged weights", resume="accept")
    loss_weights: str = option(
        "",
        "weights of the losses, e.g. error=1,penalty=0.1; the experiment sets the others",
        parse=factories.pairs,
        resume="accept",
    )
    combiner: str = option(
        "weighted_sum", "how several losses become one update, e.g. uncertainty", parse=factories.check_combiner
    )
    combiner_args: str = option("", "arguments of the combiner, e.g. alpha=1.5,update_every=10", parse=factories.pairs)

    # The gradient of recurrent layers on its way back through time.
    timestep_clip: float | None = option(
        None, "largest norm of an example's state gradient at a time step", above=0, resume="accept"
    )
    timestep_detach: float | None = option(
        None, "probability of stopping the state gradient at a time step", above=0, below=1, resume="accept"
    )
    timestep_cut: int | None = option(
        None, "stop the state gradient every so many time steps", least=1, resume="accept"
    )
    timestep_scale: float | None = option(
        None, "factor for the state gradient at every time step", least=0, resume="accept"
    )
    timestep_normalize: float | None = option(
        None, "norm that every example's state gradient gets at every time step", above=0, resume="accept"
    )
    bptt_window: int | None = option(None, "time steps of truncated back-propagation; none for all", least=1)
    recurrent: str = option(
        "auto",
        "loop of recurrent layers: auto, adjoint (the general one), or keras (Keras's own)",
        choices=("auto", "adjoint", "keras"),
        resume="accept",
    )
    recurrent_memory: str | None = option(
        None, "store fewer states for the backward pass: sqrt, or an amount such as 500MB", resume="accept"
    )

    # The machine.
    precision: str = option("float32", "dtype policy of the model", choices=factories.PRECISIONS)
    jit_compile: bool = option(False, "compile the update with XLA", resume="accept")
    strategy: str = option(
        "none",
        "none, mirrored (all GPUs), mirrored:N (N GPUs, or N logical CPU devices), or multi_worker (TF_CONFIG)",
        parse=factories.replica_count,
        resume="accept",
    )
    deterministic: bool = option(False, "deterministic operations, slower on GPUs", resume="accept")

    # What is written, and when.
    log_every: int = option(100, "updates between rows in TensorBoard", least=1, resume="accept")
    eval_every: int | None = option(
        None, "updates between evaluations; none for the end only", least=1, resume="accept"
    )
    checkpoint_every: int | None = option(
        None, "updates between checkpoints; the end always has one", least=1, resume="accept"
    )
    checkpoint_every_seconds: float | None = option(
        600.0, "seconds between checkpoints, in addition to checkpoint_every", above=0, resume="accept"
    )
    keep_checkpoints: int = option(3, "number of newest checkpoints to keep", least=1, resume="accept")
    probe_every: int = option(0, "updates between gradients per time step; 0 for never", least=0, resume="accept")
    health_every: int = option(0, "updates between norms of every variable; 0 for never", least=0, resume="accept")
    health: str = option(
        "",
        "in addition to norms: activations, histograms, positions; separated by commas",
        parse=check_parts,
        resume="accept",
    )
    loggers: str = option(
        "",
        "loggers in addition to TensorBoard: csv, jsonl, mlflow, wandb; separated by commas",
        parse=factories.logger_names,
        resume="accept",
    )
    init_from: str | None = option(
        None, "start from these weights: a work directory, *.weights.h5 or *.keras; ignored on resume"
    )

    # To debug.
    fast_dev_run: bool = option(
        False, "run a few updates of everything in a temporary directory, to check that it works", resume="ignore"
    )
    overfit_batches: int = option(0, "train and evaluate on only this many first batches; 0 for all", least=0)
    limit_eval_batches: int | None = option(None, "batches per evaluation", least=1, resume="accept")
    run_eagerly: bool = option(False, "run without tracing, to debug", resume="accept")
    profile: str = option(
        "", "updates to profile for TensorBoard, e.g. 20-30", parse=factories.step_range, resume="ignore"
    )
    print_config: bool = option(False, "print all flags and stop", resume="ignore")
    verify_resume: bool = option(
        False, "train briefly, kill, resume, and compare every bit with an uninterrupted run", resume="ignore"
    )
    accept_changes: bool = option(
        False, "resume even if flags that change the model or the data differ", resume="ignore"
    )

    def __post_init__(self):
        super().__post_init__()
        factories.check_together(self)
