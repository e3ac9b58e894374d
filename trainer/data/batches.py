"""The parts of a batch: inputs, targets and sample weights, and the number of examples."""

import contextlib
import re

import keras
import tensorflow as tf

_RAGGED = (
    "are ragged, and the model failed on them; layers of Keras take dense tensors. Pad the sequences, "
    "dataset.map(lambda x, y: (x.to_tensor(), y)), and begin the model with a Masking layer or an Embedding with "
    "mask_zero=True."
)
_DICT_KEYS = (("inputs", "targets"), ("x", "y"))


def unpack(batch):
    """Splits a batch into `(inputs, targets, sample_weight)`; what is not there is None.

    A tuple is read as `(x,)`, `(x, y)` or `(x, y, sample_weight)`. A dict with the keys `inputs` and `targets` (or
    `x` and `y`) and, if wanted, `sample_weight` is read by these names; any other dict is both the inputs and the
    targets, so that losses find their targets in it by name. Anything else is inputs without targets.

    Example:

    >>> unpack({"x": 1, "y": 2})
    (1, 2, None)
    """
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        if not 1 <= len(batch) <= 3:
            raise ValueError(
                f"A batch is a tuple of {len(batch)} parts; it must be (x,), (x, y) or (x, y, sample_weight). "
                "For several inputs put them in a dict or a tuple of their own: ((x1, x2), y)."
            )
        return tuple(batch) + (None,) * (3 - len(batch))
    if isinstance(batch, dict):
        for inputs, targets in _DICT_KEYS:
            if inputs in batch and targets in batch:
                return batch[inputs], batch[targets], batch.get("sample_weight")
        return batch, batch, batch.get("sample_weight")
    return batch, None, None


@contextlib.contextmanager
def explaining(model, inputs):
    """Says what to do about a model without a `call`, and about one that fails on ragged inputs."""
    try:
        yield
    except NotImplementedError as error:
        if type(model).call is not keras.Model.call:
            raise
        raise NotImplementedError(
            f"The model {type(model).__name__} has no `call`, which the default losses, `predict` and the default "
            "`eval_step` need. Override `compute_losses`, or `eval_step` beside `train_step`, and call its networks "
            "there; or give the model a `call`."
        ) from error
    except Exception as error:
        if _are_single_examples(model, inputs):
            raise ValueError(
                f"The inputs have the shape {tf.nest.flatten(inputs)[0].shape}, the model takes "
                f"{tuple(model.inputs[0].shape)}: the dataset gives single examples. Batch it: dataset.batch(32)."
            ) from error
        ragged = [leaf for leaf in tf.nest.flatten(inputs) if isinstance(leaf, tf.RaggedTensor)]
        if not ragged:
            raise
        raise ValueError(f"The inputs, of shape {ragged[0].shape}, {_RAGGED} The model's own error: {error}") from error


def _are_single_examples(model, inputs):
    """Whether the inputs have one axis less than a model with known inputs takes, and the same others."""
    wanted, given = getattr(model, "inputs", None), tf.nest.flatten(inputs)
    if not wanted or len(wanted) != len(given) or not all(isinstance(leaf, tf.Tensor) for leaf in given):
        return False
    return all(tf.TensorShape(w.shape[1:]).is_compatible_with(g.shape) for w, g in zip(wanted, given, strict=True))


def explain_inputs(error):
    """Raises a `ValueError` for an error of TensorFlow about ragged or unequal batches that comes when it runs."""
    found = re.search(r"`generator` yielded an element of (shape|type|structure) .* was expected", error.message)
    if found:
        raise ValueError(
            f"The batches differ: {found[0]} by the first batch. Give all of them the same structure, types and shapes "
            "but for the number of examples: pad them, or pass a tf.data.Dataset."
        ) from None
    found = re.search(r"assertion failed: \[([^\]]*ragged[^\]]*)\]", error.message)
    if found:
        raise ValueError(f"The inputs {_RAGGED} The model's own error: {found[1]}") from None


def count_examples(batch):
    """The number of examples: the first dimension of the first tensor that has one. A float32 scalar."""
    for leaf in tf.nest.flatten(batch, expand_composites=False):
        if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
            return tf.cast(leaf.shape[0] or tf.shape(leaf, out_type=tf.int64)[0], tf.float32)
        leaf = tf.convert_to_tensor(leaf)
        if leaf.shape.rank != 0:
            static = leaf.shape[0] if leaf.shape.rank is not None else None
            return tf.constant(float(static)) if static is not None else tf.cast(tf.shape(leaf)[0], tf.float32)
    return tf.ones([])


def named_outputs(model, outputs):
    """Outputs as {name: tensor} when there are several, else the only one as it is."""
    if isinstance(outputs, dict):
        return outputs if len(outputs) > 1 else next(iter(outputs.values()))
    if isinstance(outputs, list | tuple):
        if len(outputs) == 1:
            return outputs[0]
        names = getattr(model, "output_names", None)
        if not names or len(names) != len(outputs):
            names = [str(index) for index in range(len(outputs))]
        return dict(zip(names, outputs, strict=True))
    return outputs


def select(structure, name, names, kind, what):
    """The part of targets, outputs or sample weights that belongs to `name`.

    Args:
        structure: a dict, a sequence in the order of `names`, or the only one.
        name: of the loss or metric.
        names: the model's output names when it has several, else None.
        kind: "loss" or "metric", for the error.
        what: "output", "target" or "sample weight", for the error.
    """
    if isinstance(structure, list | tuple) and names and len(structure) == len(names):
        structure = dict(zip(names, structure, strict=True))
    if not isinstance(structure, dict):
        return structure
    if name in structure:
        return structure[name]
    # One part for whatever asks, unless it is that of another output.
    if len(structure) == 1 and not (names and len(names) > 1 and next(iter(structure)) in names):
        return next(iter(structure.values()))
    if what == "sample weight":
        return None
    if what == "target" and not names:
        return structure
    raise ValueError(
        f"The {kind} {name!r} has no {what} of its name among {sorted(structure)}. With several, name each {kind} "
        f"after the {what} it takes, or override `compute_losses` and combine them as you like."
    )


def output_of(metric, names):
    """The name of the output that a metric is about: its own, or the longest one that its name begins with.

    >>> output_of("label_accuracy", ["label", "price"])
    'label'
    """
    begun = [name for name in names or () if metric == name or metric.startswith((f"{name}_", f"{name}/"))]
    return max(begun, key=len, default=metric)


def slice_for_replica(batch, replica, replicas):
    """The part of a global batch that one replica trains on: equal parts, the first ones larger by at most one.

    With fewer examples than replicas some get none. Scalars go to all.
    """

    def part(leaf):
        if leaf.shape.rank == 0:
            return leaf
        size = _rows(leaf)
        start = (size * replica + replicas - 1) // replicas
        stop = (size * (replica + 1) + replicas - 1) // replicas
        if isinstance(leaf, tf.SparseTensor):
            rest = leaf.dense_shape[1:]
            begin = tf.concat([[start], tf.zeros_like(rest)], axis=0)
            return tf.sparse.slice(leaf, begin, tf.concat([[stop - start], rest], axis=0))
        share = leaf[start:stop]
        static = leaf.shape[0]
        if static is not None and static % replicas == 0 and not isinstance(leaf, tf.RaggedTensor):
            share.set_shape([static // replicas, *leaf.shape[1:]])
        return share

    return tf.nest.map_structure(part, batch)


def most_parts(batch, count):
    """`count`, or the number of examples if there are fewer: so many parts have an example each. Traced or eager."""
    rows = count_examples(batch)
    known = tf.get_static_value(rows)
    if known is not None:
        return max(min(count, int(known)), 1)
    return tf.maximum(tf.minimum(tf.cast(rows, tf.int32), count), 1)


def share_of_replica(batch, replica, owner, own_rows):
    """The rows of a batch that one replica trains on. Traced, in a replica context.

    Args:
        batch: the global one, or, with `own_rows`, that of this worker.
        replica: its number among all replicas.
        owner: has the number of all `replicas`, and the `workers`.
        own_rows: whether the batch has the rows of this worker only.
    """
    if not own_rows:
        return slice_for_replica(batch, replica, owner.replicas)
    each = owner.replicas // owner.workers.count
    return slice_for_replica(batch, replica - owner.workers.rank * each, each)


def with_all_rows(batch, workers, own_rows):
    """A batch with as many rows as all workers have: the same rows for each. For a trace outside replicas.

    A stateful layer has a state for each row of the global batch, and takes no other number of rows.

    Args:
        batch: the global one, which stays as it is, or, with `own_rows`, that of this worker.
        workers: their number.
        own_rows: whether the batch has the rows of this worker only.
    """

    def part(leaf):
        if leaf.shape.rank == 0 or not own_rows:
            return leaf
        copies = [leaf] * workers
        return tf.sparse.concat(0, copies) if isinstance(leaf, tf.SparseTensor) else tf.concat(copies, axis=0)

    return tf.nest.map_structure(part, batch)


# Elements of each part of a batch that go into its checksum.
_SUMMED = 65_536


def checksum(batch):
    """A number, int64, that differs between batches of other contents, order or shapes. Traced or eager.

    Of large parts only a sample of elements is looked at, at equal distances.
    """
    total = tf.zeros([], tf.int64)
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        size = tf.size(leaf, out_type=tf.int64)
        flat = tf.reshape(leaf, [-1])[:: tf.maximum(size // _SUMMED, 1)]
        for part in (tf.shape(leaf, out_type=tf.int64), flat):
            factors = tf.range(1, tf.size(part, out_type=tf.int64) + 1) * 2_654_435_761 + 1
            total = total * 1_000_003 + tf.reduce_sum(_as_integers(part) * factors)
    return total


def _as_integers(flat):
    """The bits of a vector as int64."""
    if flat.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(flat, 2**62)
    if flat.dtype.is_complex:
        return _as_integers(tf.math.real(flat)) + 3 * _as_integers(tf.math.imag(flat))
    if flat.dtype.is_floating:
        flat = tf.bitcast(flat, {2: tf.int16, 4: tf.int32, 8: tf.int64}.get(flat.dtype.size, tf.int8))
    return tf.cast(flat, tf.int64)


def _rows(leaf):
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return leaf.nrows(tf.int32) if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf)[0]


def check_divisible(batch, replicas):
    """Refuses a batch that cannot be divided by its rows: they must be the examples in every part of it. Traced."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf.shape.rank != 0]
    sizes = {leaf.shape[0] for leaf in leaves if leaf.shape.rank} - {None}
    message = (
        f"it is divided among {replicas} replicas by its rows, which must be the examples in every part. Repeat what "
        "belongs to the batch as a whole for each example, pass it as a scalar, or keep it outside the batch."
    )
    if len(sizes) > 1:
        raise ValueError(f"The parts of a batch have {sorted(sizes)} rows; {message}")
    if not leaves:
        raise ValueError(f"A batch has nothing but scalars; {message}")
    counts = [tf.cast(_rows(leaf), tf.int32) for leaf in leaves]
    if not sizes and len(counts) > 1:
        same = tf.reduce_all([tf.equal(count, counts[0]) for count in counts[1:]])
        tf.debugging.Assert(same, [f"The parts of a batch have different numbers of rows; {message}", *counts])


def again(parts, spec):
    """An iterator of batches that were taken from one of the given specification: no new trace."""
    return iter(tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=spec))


def take(iterator, count, first):
    """`count` batches as a list, of which the first is taken already.

    Those past the end of the data have no rows, or are left out if eager.
    """
    parts = [first]
    while len(parts) < count:
        if tf.executing_eagerly():
            batch = next(iterator, None)
            if batch is None:
                break
            parts.append(batch)
        else:
            optional = iterator.get_next_as_optional()
            parts.append(tf.cond(optional.has_value(), optional.get_value, lambda: _empty(parts[0])))
    return parts


def _empty(batch):
    return tf.nest.map_structure(lambda leaf: leaf if leaf.shape.rank == 0 else leaf[:0], batch)


def concatenate(parts):
    """One batch from several. Scalars are taken from the first."""
    if len(parts) == 1:
        return parts[0]
    return tf.nest.map_structure(
        lambda *leaves: leaves[0] if leaves[0].shape.rank == 0 else tf.concat(leaves, 0), *parts
    )
