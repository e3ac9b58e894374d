"""Turns datasets, arrays, loaders, generators and indexed data into a `tf.data.Dataset` of batches."""

import inspect
import itertools

import keras
import numpy as np
import tensorflow as tf

from looptape.trainer.data.by_worker.indexed_data import IndexedData

SECOND_PASS = (
    "An iterator can be passed over once, and this is the second pass. Pass the function that makes it, without "
    "calling it."
)


def as_dataset(data, batch_size=32, *, training=False, repeat=False, workers=None, trial=False):
    """A `tf.data.Dataset` of batches.

    Args:
        data: a `tf.data.Dataset` of batches, taken as it is; arrays or tensors in the structure of a batch, such as
            `(x, y)`, also ragged and sparse ones, those of PyTorch, pandas and SciPy; an `IndexedData`; a
            `keras.utils.PyDataset`; a loader, which gives batches each time it is iterated over (a PyTorch
            `DataLoader`, Grain); a function that returns an iterator of batches; or an iterator, good for one pass.
        batch_size: how many examples make a batch, if the data are arrays.
        training: shuffle arrays, anew in each pass.
        repeat: begin again at the end, where that is possible (not for datasets and iterators: they say themselves).
        trial: do not tell a `PyDataset` that a pass has ended, so that its own state stays as it is.
        workers: who divides an `IndexedData`, so that each gets its own rows; by default the batches are whole.
    """
    if isinstance(data, tf.data.Dataset):
        return data
    if isinstance(data, IndexedData):
        own = {} if workers is None else {"rank": workers.rank, "workers": workers.count}
        return data.dataset(repeat=repeat, **own)
    if isinstance(data, keras.utils.PyDataset):
        dataset = _from_batches(lambda: _passes(data, trial), data[0])
    elif is_examples(data):
        dataset = _from_arrays(data, batch_size, training)
    elif _is_function(data):
        dataset = _from_function(data)
    elif hasattr(data, "__next__"):
        return _from_iterator(data)
    elif _is_loader(data):
        dataset = _from_function(lambda: iter(data))
    else:
        raise TypeError(_unknown(data))
    return dataset.repeat() if repeat else dataset


def check_data(data):
    """Refuses what `as_dataset` refuses, as far as that is known without making a batch."""
    if isinstance(data, tf.data.Dataset | IndexedData | keras.utils.PyDataset):
        return
    if is_examples(data):
        _count(tf.nest.flatten(tf.nest.map_structure(converted, _without_lists(data))))
    elif not (_is_function(data) or hasattr(data, "__next__") or _is_loader(data)):
        raise TypeError(_unknown(data))


def _is_function(data):
    return inspect.isgeneratorfunction(data) or (callable(data) and not hasattr(data, "__iter__"))


def _is_loader(data):
    other = isinstance(data, tuple | list | dict | set | str | bytes)
    return is_batches(data) or (hasattr(data, "__iter__") and not other)


def _unknown(data):
    return (
        f"The dataset is {_kind(data)}; it must be a tf.data.Dataset of batches, arrays like (x, y), a "
        "looptape.IndexedData, a keras.utils.PyDataset, a loader or a list of batches, or a function that "
        "returns an iterator of batches. Use e.g. tf.data.Dataset.from_tensor_slices((x, y)).batch(32), or "
        "np.asarray on lists."
    )


def as_inputs(data, model):
    """For `predict`: arrays (a, b) for a model with two inputs are its inputs, not inputs and targets."""
    count = len(getattr(model, "inputs", None) or ())
    if isinstance(data, tuple | list) and count == len(data) > 1 and all(map(is_array, data)):
        return (tuple(data),)
    return data


def _kind(data):
    """Describes the kind of data, including the members of a tuple that holds no arrays."""
    if not isinstance(data, tuple | list | dict) or not data:
        return f"a {type(data).__name__}"
    members = data.values() if isinstance(data, dict) else data
    return f"a {type(data).__name__} of {', '.join(sorted({type(member).__name__ for member in members}))}"


def is_array(data):
    """Whether this is one array or tensor, dense, ragged or sparse."""
    return isinstance(converted(data), np.ndarray | tf.Tensor | tf.RaggedTensor | tf.SparseTensor)


def converted(data):
    """Arrays of PyTorch, pandas and SciPy as those of NumPy and TensorFlow; anything else as it is. No copies."""
    package = type(data).__module__.partition(".")[0]
    if package == "torch" and hasattr(data, "detach"):
        return data.detach().cpu().numpy()
    if package == "pandas" and hasattr(data, "to_numpy"):
        return data.to_numpy()
    if package == "scipy" and hasattr(data, "tocoo"):
        entries = data.tocoo()
        indices = np.stack([entries.row, entries.col], axis=1).astype(np.int64)
        return tf.sparse.reorder(tf.SparseTensor(indices, entries.data, entries.shape))
    return data


def is_arrays(data):
    """Whether the data are arrays or tensors, or a structure of nothing else."""
    leaves = tf.nest.flatten(data) if isinstance(data, tuple | list | dict) or is_array(data) else []
    return bool(leaves) and all(map(is_array, leaves))


def is_examples(data):
    """Whether the data are arrays of all examples, which are cut into batches here."""
    return is_arrays(data) and not is_batches(data)


def is_batches(data):
    """Whether this is a list of batches, such as [(x, y), (x, y)], and not [inputs, targets], each a tuple of arrays.

    Batches are alike: they have the same structure, ranks and types. Where they also have equally many examples, as
    inputs and targets do, their further axes must be equal.
    """
    if not isinstance(data, list) or not data or not all(isinstance(member, tuple | list | dict) for member in data):
        return False
    if not is_arrays(data):
        return False
    plain = [tf.nest.map_structure(converted, _without_lists(member)) for member in data]
    kinds = [tf.nest.map_structure(lambda leaf: f"{leaf.dtype} {len(leaf.shape)}", batch) for batch in plain]
    if any(kind != kinds[0] for kind in kinds):
        return False
    shapes = [[tuple(leaf.shape) for leaf in tf.nest.flatten(batch)] for batch in plain]
    counts = {shape[:1] for batch in shapes for shape in batch}
    return (
        len(data) > 3
        or len(counts) > 1
        or all([s[1:] for s in batch] == [s[1:] for s in shapes[0]] for batch in shapes)
    )


def _without_lists(arrays):
    """Lists as tuples, at every level: of a list, `tf.data` would make one tensor."""
    if isinstance(arrays, dict):
        return {name: _without_lists(value) for name, value in arrays.items()}
    if isinstance(arrays, list | tuple) and not hasattr(arrays, "_fields"):
        return tuple(_without_lists(value) for value in arrays)
    return arrays


def _from_arrays(arrays, batch_size, training):
    arrays = tf.nest.map_structure(converted, _without_lists(arrays))
    count = _count(tf.nest.flatten(arrays))
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    if training:
        dataset = dataset.shuffle(count, seed=0)
    return dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def _count(leaves):
    """The number of examples of arrays, the same in all."""
    sizes = sorted({int(leaf.shape[0]) for leaf in leaves if len(leaf.shape)})
    if len(sizes) != 1 or any(not len(leaf.shape) for leaf in leaves):
        raise ValueError(
            f"The arrays have {sizes} examples; all must have the same number. Check which array was cut or joined."
        )
    if sizes[0] == 0:
        raise ValueError(
            "The dataset is empty: the arrays have no example. Check the files or the filter they come from."
        )
    return sizes[0]


def _passes(data, trial):
    for index in range(data.num_batches):
        yield data[index]
    if not trial:
        data.on_epoch_end()


def _from_function(function):
    probe = function()
    if not hasattr(probe, "__iter__"):
        raise TypeError(
            f"The dataset is a function that returned a {type(probe).__name__}; it must return an iterator of batches. "
            "Write a generator: `def batches(): … yield inputs, targets`."
        )
    probe = iter(probe)
    first = next(probe, None)
    if first is None:
        raise ValueError("The dataset is empty: the generator gave no batch.")
    begun = [itertools.chain([first], probe)]  # the first pass; the function is called for the next one
    return _from_batches(lambda: begun.pop() if begun else function(), first)


def _from_iterator(iterator):
    first = next(iterator, None)
    if first is None:
        raise ValueError("The dataset is empty: the iterator has no batch.")
    used = []

    def once():
        if used:
            raise RuntimeError(SECOND_PASS)
        used.append(True)
        yield first
        yield from iterator

    return _from_batches(once, first)


def _from_batches(function, example):
    """A dataset whose batches have the shapes of the example but for their number of examples."""

    def spec(leaf):
        if isinstance(leaf, tf.RaggedTensor):
            options = {"ragged_rank": leaf.ragged_rank, "row_splits_dtype": leaf.row_splits.dtype}
            return tf.RaggedTensorSpec([None, *leaf.shape[1:]], leaf.dtype, **options)
        if isinstance(leaf, tf.SparseTensor):
            return tf.SparseTensorSpec([None, *leaf.shape[1:]], leaf.dtype)
        array = leaf if tf.is_tensor(leaf) else np.asarray(leaf)
        return tf.TensorSpec([None, *array.shape[1:]] if len(array.shape) else [], tf.as_dtype(array.dtype))

    signature = tf.nest.map_structure(spec, _plain_batch(example))
    dataset = tf.data.Dataset.from_generator(lambda: map(_plain_batch, function()), output_signature=signature)
    return dataset.prefetch(2)


def _plain_batch(batch):
    """A batch of NumPy and TensorFlow. tf.data takes a list for a tensor; a batch that is a list means a tuple."""
    return tf.nest.map_structure(converted, _tuples(batch, whole=True))


def _tuples(batch, whole=False):
    if isinstance(batch, dict):
        return {name: _tuples(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return tuple(map(_tuples, batch))
    # A list of numbers inside a batch is a tensor.
    return tuple(map(_tuples, batch)) if isinstance(batch, list) and (whole or any(map(is_array, batch))) else batch
