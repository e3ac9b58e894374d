"""Finds what makes a dataset give different batches after a resume."""

import re

import tensorflow as tf


def loose_ends(dataset):
    """[what makes a dataset give other batches after a resume, in words], as far as its options and operations tell.

    Empty with `tf.config.experimental.enable_op_determinism`, under which TensorFlow itself keeps the order.
    """
    if not has_clock():
        return []
    options, operations = dataset.options(), list(_operations(dataset))
    found = []
    free = {kind for kind, order in operations if order == "false"}
    if free:
        found.append(f"{_listed(free)} with `deterministic=False` gives elements in the order in which they get ready")
    by_options = {kind for kind, order in operations if order == "default"}
    if by_options and options.deterministic is False:
        found.append(f"{_listed(by_options)} does not keep the order, as `deterministic` is False in `tf.data.Options`")
    policy = options.experimental_external_state_policy
    stateful = {kind for kind, _ in operations if _UNSAVED.fullmatch(kind)}
    if stateful and policy is not None and policy != tf.data.experimental.ExternalStatePolicy.FAIL:
        found.append(f"the state of {_listed(stateful)} is not saved, as `experimental_external_state_policy` allows")
    return found


def moving_parts(dataset):
    """{operations with a state of their own or random numbers}, as far as they tell; Python code is not looked at."""
    kinds = {kind for kind, _ in _operations(dataset)}
    return {kind for kind in kinds if _WRITING.fullmatch(kind) or (_UNSAVED.fullmatch(kind) and "PyFunc" not in kind)}


def unseeded_shuffles(dataset):
    """Whether a dataset has a shuffle that draws another order in each process."""
    parts = [dataset]
    for part in parts:
        parts += getattr(part, "_inputs", tuple)()
    shuffles = [part for part in parts if hasattr(part, "_seed") and hasattr(part, "_seed2")]
    return any(int(part._seed) == int(part._seed2) == 0 for part in shuffles)


def runs_python(dataset):
    """Whether batches come out of Python, whose own state moves with every batch: a generator or a `PyDataset`."""
    return any(kind in ("GeneratorDataset", "PyFunc", "EagerPyFunc") for kind, _ in _operations(dataset))


# Operations with a state or a source of their own beside the iterator. Those called Stateless… have none.
_UNSAVED = re.compile(
    r"Random(?!Dataset|IndexShuffle).*|Stateful(Uniform|StandardNormal|TruncatedNormal|Random).*|(Parameterized)?TruncatedNormal|"
    r"Multinomial|SampleDistortedBoundingBox.*|Rng.*|(Eager)?PyFunc"
)


# Operations that change a variable.
_WRITING = re.compile(r"Assign(Add|Sub)?VariableOp|Resource(Scatter|Apply).*|Lookup.*Insert.*|(Stack|Queue).*Push.*")


def _operations(dataset):
    """(type, "true", "false" or "default" for what can keep an order or not, else None) of each operation.

    By the Python objects, which know their inputs and functions: `tf.raw_ops.DatasetToGraphV2` copies the arrays of
    `from_tensor_slices`, too, at ten seconds for a gigabyte.
    """
    seen, todo = set(), [dataset]
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        todo += getattr(part, "_inputs", tuple)()
        yield type(part).__name__.strip("_"), getattr(part, "_deterministic", None)
        for wrapper in getattr(part, "_functions", tuple)():
            yield from _nodes(wrapper.function.graph.as_graph_def())
        if type(part).__name__ == "_ParallelInterleaveDataset" and _array_bytes(part) <= _LARGEST_COPY_BYTES:
            # The only one that does not keep what it was given; it is mostly about file names.
            variant = tf.data.experimental.to_variant(part)
            graph = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=_IGNORE).numpy()
            yield from _nodes(tf.compat.v1.GraphDef.FromString(graph))


_LARGEST_COPY_BYTES = 10e6


_IGNORE = 1  # the policy by which the graph is written in any case


def _array_bytes(dataset):
    """Bytes of the arrays that a dataset is made from."""
    own = sum(int(tf.size(tensor)) * max(tensor.dtype.size, 1) for tensor in getattr(dataset, "_tensors", ()))
    return own + sum(map(_array_bytes, getattr(dataset, "_inputs", tuple)()))


def _nodes(graph):
    """As `_operations`, for a function that a dataset calls, and for those that it calls."""
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes:
            order = node.attr["deterministic"].s.decode() if "deterministic" in node.attr else None
            yield node.op, order or None


def _listed(kinds):
    return ", ".join(sorted(kinds))


def has_clock():
    """Whether operations may ask for the time: deterministic ones may not, and only trying tells."""
    with tf.init_scope():
        try:
            tf.timestamp()
        except tf.errors.FailedPreconditionError:
            return False
    return True
