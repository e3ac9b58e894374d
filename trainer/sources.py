"""Where batches come from: a dataset, its iterator, and the position in it."""

import os
import re
import shutil
import tempfile
import warnings
import weakref

import tensorflow as tf

from trainer import arguments, workers


class Source:
    """A dataset with an iterator that is kept between calls of `fit`.

    Args:
        data: what the user passed; kept, so that its id stays its own.
        dataset: a `tf.data.Dataset` of batches made from it.
    """

    def __init__(self, data, dataset):
        self.data, self.dataset = data, dataset
        self.iterator = iter(self.dataset)
        cardinality = int(self.dataset.cardinality())
        self.length = cardinality if cardinality >= 0 else None
        self.infinite = cardinality == tf.data.INFINITE_CARDINALITY
        if self.length == 0:
            raise ValueError("The dataset is empty: it has no batch. Check the files or the filter it is made from.")
        self.position = 0  # batches used in this pass
        self.passes = 0  # that are over
        self.anchor = None  # (a position in this pass, TensorFlow's name of a checkpoint of the iterator there)
        self._checkpointable = self._obstacle = self._directory = None
        self._examined = False

    def remaining(self):
        """Batches left in this pass, or None if that is not known."""
        return None if self.length is None else max(self.length - self.position, 0)

    def advance(self, batches):
        self.position += batches

    def checkpointable(self, warn=True):
        """Whether the iterator's position can be saved; tried once, by serializing it.

        Warns once, before the first step, if it cannot, and if a resumed run gets other batches although it can.
        """
        if self._checkpointable is None:
            try:
                # Not a second iterator: it would draw from the seed generator that shuffles share.
                self._mark()
                self._checkpointable = True
            except (tf.errors.OpError, NotImplementedError, ValueError) as error:
                self._checkpointable = False
                reason = re.search(r"(\S+ is stateful|op \S+ .*?stateful)", str(error))
                self._obstacle = reason.group(0) if reason else str(error).splitlines()[0]
        if warn and self._obstacle is not None:
            warnings.warn(
                f"The position in this dataset cannot be saved ({self._obstacle}). A resumed run makes the dataset "
                "anew and skips what was used, which is exact only if the dataset gives the same batches each time: "
                "seed its shuffles, use `stateless` random operations.",
                stacklevel=2,
            )
            self._obstacle = None  # said once
        if warn and not self._examined:
            self._examined = True
            found = loose_ends(self.dataset)
            if found:
                warnings.warn(
                    f"A resumed run will not get the same batches as one that is not interrupted: {'; '.join(found)}. "
                    "Leave these options out where the bits matter.",
                    stacklevel=2,
                )
        return self._checkpointable

    def _mark(self):
        """Notes the present position, so that batches after it can be fetched once more."""
        if self._directory is None:
            self._directory = tempfile.mkdtemp()
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        prefix = os.path.join(self._directory, "iterator")
        self.anchor = self.position, tf.train.Checkpoint(iterator=self.iterator).write(prefix)

    def refetch(self, count):
        """The last `count` batches before the position once more, or None where that is not possible."""
        if self.anchor is None or self.position - count < self.anchor[0]:
            return None
        position, prefix = self.anchor
        iterator = iter(self.dataset)
        tf.train.Checkpoint(iterator=iterator).read(prefix).expect_partial()
        for _ in range(self.position - count - position):
            next(iterator, None)
        return [batch for _, batch in zip(range(count), iterator, strict=False)] or None

    def peek(self):
        """The contents of the next batch as bytes, to be compared between workers; nothing if it cannot be put back."""
        if not self.checkpointable(warn=False):
            return b""
        self._mark()
        batch = next(self.iterator, None)
        tf.train.Checkpoint(iterator=self.iterator).read(self.anchor[1])
        return workers.bytes_of(batch)

    def skip_to(self, position, passes=0):
        """Goes to a position of the pass after `passes` whole ones. Only for a source that is new.

        By the iterators that were used before: a shuffle draws the order of a pass when that begins.
        """
        for _ in range(passes):
            next(self.iterator, None)
            self.iterator = iter(self.dataset)
        for _ in range(position):
            next(self.iterator, None)

    def restart(self):
        """Begins the next pass over the data."""
        self.iterator = iter(self.dataset)
        self.position = 0
        self.passes += 1
        if self.anchor is not None:
            self._mark()


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


# Operations with a state or a source of their own beside the iterator. Those called Stateless… have none.
_UNSAVED = re.compile(
    r"Random(?!Dataset).*|Stateful(Uniform|StandardNormal|TruncatedNormal|Random).*|(Parameterized)?TruncatedNormal|"
    r"Multinomial|SampleDistortedBoundingBox.*|Rng.*|(Eager)?PyFunc"
)


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


def timed(fetch):
    """(what `fetch` returns, seconds it took as a float32 scalar). Traced or eager.

    With `tf.config.experimental.enable_op_determinism` the seconds are 0.
    """
    if not has_clock():
        return fetch(), tf.zeros([])
    start = tf.timestamp()
    with tf.control_dependencies([start]):
        batch = fetch()
    # A variant (an optional) cannot be waited for by its value, but by its operation.
    leaves = [x for x in tf.nest.flatten(batch) if tf.is_tensor(x)] if not hasattr(batch, "has_value") else []
    with tf.control_dependencies(leaves or [batch.has_value()]):
        return batch, tf.cast(tf.timestamp() - start, tf.float32)


def check_totals(steps, epochs):
    """Exactly one of the two, as lifetime totals."""
    if (steps is None) == (epochs is None):
        received = "both are given" if steps is not None else "neither is given"
        raise ValueError(
            f"`fit` takes exactly one of `steps` and `epochs`; {received}. Both count over the trainer's lifetime: "
            "steps=1000 trains until 1,000 updates were made in all."
        )
    if steps is not None:
        return arguments.check_integer("steps", steps, 1, "It is the lifetime total of updates."), None
    return None, arguments.check_integer("epochs", epochs, 1, "It is the lifetime total of passes over the data.")
