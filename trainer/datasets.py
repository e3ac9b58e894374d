"""From what people have to a `tf.data.Dataset` of batches: datasets, arrays, `PyDataset`s, generators."""

import inspect

import keras
import numpy as np
import tensorflow as tf


def as_dataset(data, batch_size=32, *, training=False, repeat=False):
    """A `tf.data.Dataset` of batches.

    Args:
        data: a `tf.data.Dataset` of batches, taken as it is; arrays or tensors in the structure of a batch, such as
            `(x, y)`; a `keras.utils.PyDataset`; a function that returns an iterator of batches; or an iterator, good
            for one pass.
        batch_size: of arrays.
        training: shuffle arrays, anew in each pass.
        repeat: begin again at the end, where that is possible (not for datasets and iterators: they say themselves).
    """
    if isinstance(data, tf.data.Dataset):
        return data
    if isinstance(data, keras.utils.PyDataset):
        dataset = _from_batches(lambda: _passes(data), data[0])
    elif _is_arrays(data):
        dataset = _from_arrays(data, batch_size, training)
    elif inspect.isgeneratorfunction(data) or (callable(data) and not hasattr(data, "__iter__")):
        dataset = _from_function(data)
    elif hasattr(data, "__next__"):
        return _from_iterator(data)
    else:
        raise TypeError(
            f"The dataset is {_kind(data)}; it must be a tf.data.Dataset of batches, arrays like (x, y), a "
            "keras.utils.PyDataset, or a function that returns an iterator of batches. "
            "Use e.g. tf.data.Dataset.from_tensor_slices((x, y)).batch(32), or np.asarray on lists."
        )
    return dataset.repeat() if repeat else dataset


def as_inputs(data, model):
    """For `predict`: arrays (a, b) for a model with two inputs are its inputs, not inputs and targets."""
    count = len(getattr(model, "inputs", None) or ())
    if isinstance(data, tuple | list) and count == len(data) > 1 and all(map(_is_array, data)):
        return (tuple(data),)
    return data


def _kind(data):
    """What the data are, in words: also what a tuple that holds no arrays holds."""
    if not isinstance(data, tuple | list | dict) or not data:
        return f"a {type(data).__name__}"
    members = data.values() if isinstance(data, dict) else data
    return f"a {type(data).__name__} of {', '.join(sorted({type(member).__name__ for member in members}))}"


def _is_array(data):
    return isinstance(data, np.ndarray | tf.Tensor)


def _is_arrays(data):
    leaves = tf.nest.flatten(data) if isinstance(data, tuple | list | dict | np.ndarray | tf.Tensor) else []
    return bool(leaves) and all(map(_is_array, leaves))


def _without_lists(arrays):
    """Lists as tuples, at every level: of a list, `tf.data` would make one tensor."""
    if isinstance(arrays, dict):
        return {name: _without_lists(value) for name, value in arrays.items()}
    if isinstance(arrays, list | tuple) and not hasattr(arrays, "_fields"):
        return tuple(_without_lists(value) for value in arrays)
    return arrays


def _from_arrays(arrays, batch_size, training):
    arrays = _without_lists(arrays)
    leaves = tf.nest.flatten(arrays)
    sizes = sorted({int(leaf.shape[0]) for leaf in leaves if len(leaf.shape)})
    if len(sizes) != 1 or any(not len(leaf.shape) for leaf in leaves):
        raise ValueError(
            f"The arrays have {sizes} examples; all must have the same number. Check which array was cut or joined."
        )
    if sizes[0] == 0:
        raise ValueError(
            "The dataset is empty: the arrays have no example. Check the files or the filter they come from."
        )
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    if training:
        dataset = dataset.shuffle(sizes[0], seed=0)
    return dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def _passes(data):
    for index in range(data.num_batches):
        yield data[index]
    data.on_epoch_end()


def _from_function(function):
    probe = function()
    if not hasattr(probe, "__next__"):
        probe = iter(probe)
    first = next(probe, None)
    if first is None:
        raise ValueError("The dataset is empty: the generator gave no batch.")
    return _from_batches(function, first)


def _from_iterator(iterator):
    first = next(iterator, None)
    if first is None:
        raise ValueError("The dataset is empty: the iterator has no batch.")
    used = []

    def once():
        if used:
            raise RuntimeError(
                "An iterator can be passed over once, and this is the second pass. Pass the function that makes it, "
                "without calling it."
            )
        used.append(True)
        yield first
        yield from iterator

    return _from_batches(once, first)


def _from_batches(function, example):
    """A dataset whose batches have the shapes of the example but for their number of examples."""

    def spec(leaf):
        array = leaf if tf.is_tensor(leaf) else np.asarray(leaf)
        return tf.TensorSpec([None, *array.shape[1:]] if len(array.shape) else [], tf.as_dtype(array.dtype))

    structure = _tuples(example)
    signature = tf.nest.map_structure(spec, structure)
    dataset = tf.data.Dataset.from_generator(lambda: map(_tuples, function()), output_signature=signature)
    return dataset.prefetch(2)


def _tuples(batch):
    """tf.data takes a list for a tensor; a batch that is a list means a tuple."""
    return tuple(batch) if isinstance(batch, list) else batch
