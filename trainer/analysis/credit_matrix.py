"""The credit matrix: which earlier state (or input) the loss of each time step depends on."""

import os

import numpy as np

from looptape.dashboard import metadata
from looptape.trainer.analysis import memory
from looptape.trainer.analysis.loss_jacobian import Passes, Request, choose_time_steps
from looptape.trainer.summaries import event_writer

WITH_RESPECT_TO = ("state", "input")


def credit_matrix(owner, batch, with_respect_to, time_steps, memory_limit_bytes, workdir):
    """{layer: [time, time]}; see `Trainer.credit_matrix`."""
    if with_respect_to not in WITH_RESPECT_TO:
        raise ValueError(
            f"`with_respect_to` is {with_respect_to!r}; it must be one of {list(WITH_RESPECT_TO)}. Use 'state' for the "
            "states that a loss depends on, 'input' for the inputs of the recurrent layer."
        )
    of_inputs = with_respect_to == "input"
    passes = Passes(owner, batch, Request([], norms=not of_inputs, input_norms=of_inputs))
    _check_layers(passes)
    steps = choose_time_steps(time_steps, passes.length)
    size = memory.chunk_size(passes.needs, len(steps), 4 * len(steps) * passes.length, memory_limit_bytes)
    matrices = {name: np.zeros([len(steps), valid.size], np.float32) for name, valid in passes.valid.items()}
    for first, last, (_, states, inputs) in passes.run(steps, size):
        for name, rows in (inputs if of_inputs else states).items():
            matrices[name][first:last] = rows
    for name, valid in passes.valid.items():
        matrices[name][:, ~valid] = np.nan
    if workdir is not None:
        _write(owner, workdir, matrices, passes.valid, time_steps, of_inputs)
    return matrices


def _check_layers(passes):
    if passes.left_out:
        raise ValueError(
            f"The credit matrix of {sorted(passes.left_out)} cannot be computed: their cells draw random numbers, mix "
            "the examples of a batch, read integers, or run inside another loop. Set their dropout to 0, or use "
            "`timestep_gradients` with the loss of one time step."
        )
    if not passes.valid:
        raise ValueError(
            "The model has no recurrent Keras layer, so there are no states to give credit to. Put your time step into "
            "a cell and run it with `models.LoopRNN`."
        )


def _write(owner, workdir, matrices, valid, time_steps, of_inputs):
    """Writes the matrices to the run's event files, for the dashboard."""
    if time_steps is not None or of_inputs:
        raise ValueError(
            "`workdir` was given together with `time_steps` or with_respect_to='input'; the log only takes the whole "
            "matrix of the states, as `timestep/<layer>/credit`. Leave the others out."
        )
    square = {name: matrix for name, matrix in matrices.items() if matrix.shape[0] == matrix.shape[1]}
    events = event_writer.EventWriter(os.path.join(workdir, "train"))
    values = [
        metadata.credit_summary(name, matrix, np.broadcast_to(valid[name], matrix.shape))
        for name, matrix in square.items()
    ]
    events.write(owner.counters.step, values)
    events.close()
