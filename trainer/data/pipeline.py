"""Describes the pipeline of a `tf.data.Dataset`: its operations and their options, to compare with a checkpoint's."""

import zlib

import numpy as np
import tensorflow as tf

_SAMPLE = 65_536  # elements of an array that a checksum looks at


def describe(dataset):
    """[[operation, {option: value}]] from the last operation to the first, as JSON gives it back.

    Options are whole numbers and booleans (batch size, seeds, buffer sizes), the shapes and a checksum of arrays; the
    functions of `map` and the contents of files are not compared.
    """
    found, todo = [], [dataset]
    while todo:
        part = todo.pop()
        todo += reversed(getattr(part, "_inputs", tuple)())
        kind = type(part).__name__.strip("_").removesuffix("Dataset")
        if kind != "Options":
            found.append([kind, _options(part)])
    return found


def _options(part):
    options = {}
    for name, value in vars(part).items():
        if isinstance(value, tf.Tensor) and value.shape.rank == 0 and (value.dtype.is_integer or value.dtype.is_bool):
            options[name.strip("_")] = value.numpy().item()
    shapes = [[*map(int, tensor.shape), tensor.dtype.name] for tensor in getattr(part, "_tensors", ())]
    if shapes:
        plain = [tensor for tensor in part._tensors if tensor.dtype != tf.variant]  # ragged and sparse ones
        options |= {"arrays": shapes, "contents": [checksum(tensor) for tensor in plain]}
    return options


def checksum(array):
    """A number that changes with an array; of large ones a sample of elements at equal distances is looked at."""
    if isinstance(array, tf.RaggedTensor | tf.SparseTensor):
        return 0
    flat = np.ravel(array.numpy() if isinstance(array, tf.Tensor) and tf.executing_eagerly() else np.asarray(array))
    if flat.dtype == object:  # texts
        flat = np.array([str(text) for text in flat[:: max(flat.size // 1000, 1)]])
    return zlib.crc32(np.ascontiguousarray(flat[:: max(flat.size // _SAMPLE, 1)]).tobytes())


def checksum_of_all(array):
    """A number that changes with any element of an array that can be written to; 0 for tensors, which cannot."""
    if not isinstance(array, np.ndarray):
        return 0
    if array.dtype == object:
        return checksum(array)
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def operations(description):
    """The names of the operations, first to last, as a text."""
    return " → ".join(kind for kind, _ in reversed(description))


def same_operations(before, now):
    return [kind for kind, _ in before] == [kind for kind, _ in now]


def changes(before, now):
    """["batch_size of Batch: 32 → 16", …]: options that differ, of pipelines with the same operations."""
    return [
        f"{option} of {kind}: {old.get(option)} → {value}"
        for (_, old), (kind, new) in zip(before, now, strict=True)
        for option, value in new.items()
        if old.get(option, value if option == "contents" else None) != value
    ]
