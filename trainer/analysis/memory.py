"""Estimates the memory of a chunk of the loss Jacobian from the shapes in a traced forward pass."""

from typing import NamedTuple

from looptape.trainer.variables import raw

# What the first chunk takes apart from its tensors: the traced functions and the threads' own memory, as measured.
_TRACE = 120 * 2**20
# More losses at once than this do not make it faster.
_LARGEST = 32
# Tensors of a time step that are alive at once on the way back, in units of its widest one.
_ALIVE = 12


class Needs(NamedTuple):
    """Bytes."""

    fixed: int  # however small the chunk
    per_loss: int  # for each loss of it


def estimate(graph, loops, request):
    """Returns the `Needs` of a chunk.

    Args:
        graph: graph of a forward pass over the whole batch.
        loops: the loops recorded in it.
        request: `jacobian.Request`.
    """
    around = _bytes_of(graph)
    weights = sum(_bytes(raw(variable)) for variable in request.variables)
    fixed = _TRACE + 2 * around
    # Around the loops each tensor has an adjoint, and few of them live at the same time. Half is safe by measurement:
    # an LSTM took a sixth.
    per_loss = around // 2 + 3 * weights
    for loop in loops:
        widest = max(_width(loop), 1)
        states = sum(_bytes(state) for state in loop.entering)
        fixed += _ALIVE * loop.block * loop.batch * widest * loop.inputs.dtype.size
        per_loss += _bytes(loop.outputs) + states * loop.block // loop.length
        per_loss += 2 * _ALIVE * loop.batch * widest * loop.inputs.dtype.size
    return Needs(fixed, per_loss)


def chunk_size(needs, time_steps, result_bytes, limit):
    """Returns the number of losses per backward pass."""
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ValueError(f"`memory_limit_bytes` is {limit!r}; it must be a positive number. Use e.g. 2 * 1024**3.")
    room = limit - needs.fixed - result_bytes
    if room < needs.per_loss:
        least = (needs.fixed + needs.per_loss + result_bytes) / 2**20
        raise ValueError(
            f"`memory_limit_bytes` is {limit / 2**20:.0f} MiB; about {least:.0f} MiB are needed even for one time step "
            f"after the other, {result_bytes / 2**20:.0f} MiB of them for the result. Raise the limit, use a smaller "
            "batch, norms_only=True, or ask for fewer variables or time steps."
        )
    most = min(int(room // needs.per_loss), time_steps, _LARGEST)
    rounds = -(-time_steps // most)
    return -(-time_steps // rounds)


def _width(loop):
    """Returns the size per example of the widest tensor of a time step: the gates of a cell."""
    return max([int(weight.shape[-1]) for weight in loop.weights if weight.shape.rank] + [loop.inputs.shape[-1]])


def _bytes_of(graph):
    """Returns the bytes of all floating-point tensors in a graph."""
    total = 0
    for operation in graph.get_operations():
        total += sum(_bytes(output) for output in operation.outputs if output.dtype.is_floating)
    return total


def _bytes(tensor):
    return _size(tensor.shape) * tensor.dtype.size


def _size(shape):
    size = 1
    for length in shape or ():
        size *= length or 1
    return size
