"""What a batch holds: inputs, targets and sample weights, and how many examples."""

import tensorflow as tf

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

    With fewer examples than replicas the last ones get none. Scalars go to all.
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
