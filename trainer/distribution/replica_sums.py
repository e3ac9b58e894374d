"""Sums over replicas, in buckets that are sent while the backward pass still runs. Traced.

A large tensor travels by itself, without a copy; small ones travel together. Buckets are sent in the reverse order of
the variables, which is the order in which the backward pass gives their gradients, each as soon as it is there.
"""

import functools
import warnings

import tensorflow as tf

from looptape.trainer.distribution import exchange as exchanges
from looptape.trainer.variables import OWN_CALL, creating_variables

_LARGE = 1 << 20  # bytes of a tensor that is not worth a copy to be sent with others
_DTYPES = {"bfloat16": tf.bfloat16, "float16": tf.float16}
_COMMUNICATION = ("auto", "connections", "tensorflow")
_BUCKET = 4 << 20  # bytes after which a bucket of small ones is full
_SMALL = 1 << 18  # bytes that each worker sends whole, in one message to each other one instead of two


def all_reduce(tensors):
    """Sums a structure of tensors over the replicas by TensorFlow's collective operations. In a replica context."""
    context = tf.distribute.get_replica_context()
    flat = tf.nest.flatten(tensors)
    sums = {}
    for bucket in buckets(flat):
        found = context.all_reduce(tf.distribute.ReduceOp.SUM, [flat[index] for index in bucket])
        sums.update(zip(bucket, found, strict=True))
    return tf.nest.pack_sequence_as(tensors, [sums[index] for index in range(len(flat))])


def buckets(tensors):
    """[[index]]: which tensors travel together, in the order in which the last of each is there.

    >>> small, large = tf.zeros([10]), tf.zeros([1000, 1000])
    >>> buckets([small, large, small, large])
    [[3], [1], [0, 2]]
    """
    found, open_bytes = [], {}
    for index in reversed(range(len(tensors))):
        size = _bytes(tensors[index])
        key = tensors[index].dtype
        if size >= _LARGE:
            found.append([index])
        elif key in open_bytes and open_bytes[key][0] + size <= _BUCKET:
            open_bytes[key][0] += size
            open_bytes[key][1].insert(0, index)
        else:
            open_bytes[key] = [size, [index]]
            found.append(open_bytes[key][1])
    return sorted(found, key=min, reverse=True)


def _bytes(tensor):
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def between(workers, communication="auto", dtype=None):
    """The `ReplicaSums` of a trainer. A collective call.

    Workers with one CPU each connect to each other if they hear each other's heartbeats, which notice a worker that
    hangs: TensorFlow does so only for its own collective operations.

    Args:
        workers: the `Workers`.
        communication: "auto": connections of the workers' own where that is possible, else TensorFlow's collective
            operations; "connections" and "tensorflow": the one or the other. Ignored by a process that trains alone.
        dtype: of gradients between them, or None for their own. Only connections of their own can convert.
    """
    if dtype not in (None, *_DTYPES):
        raise ValueError(
            f"`communication_dtype` is {dtype!r}; it must be None or one of {list(_DTYPES)}. Use 'bfloat16', which "
            "has the range of float32."
        )
    if communication not in _COMMUNICATION:
        raise ValueError(
            f"`communication` is {communication!r}; it must be one of {list(_COMMUNICATION)}. Use 'auto', which "
            "chooses what the workers can do."
        )
    if workers.count == 1:
        return ReplicaSums()
    # All of them are asked, whatever this one wants: a worker that takes part in other collective calls would hang.
    asked = communication == "connections" or dtype is not None
    exchange, why = _connected(workers, communication, asked)
    if exchange is None and asked:
        setting = "communication" if dtype is None else "communication_dtype"
        raise ValueError(
            f"`{setting}` is {communication if dtype is None else dtype!r}, but {why}, so TensorFlow has to send the "
            "gradients. Leave it out, or use workers with one CPU each that can reach each other by TCP."
        )
    return ReplicaSums(exchange, None if dtype is None else _DTYPES[dtype])


def _connected(workers, communication, asked):
    """(the `Exchange` of a worker, None), or (None, the reason why there is none). A collective call."""
    able = workers.on_one_cpu_each and exchanges.possible()
    heard = asked or workers.heard()
    if not workers.share([able]).all():
        return None, "not all workers have one CPU each and the system calls for connections"
    if communication == "tensorflow":
        return None, "`communication` is 'tensorflow'"
    if not workers.share([heard]).all():
        return None, "not all workers hear each other's heartbeats"
    exchange = exchanges.Exchange(workers.rank, workers.hosts)
    succeeded = exchange.connect(workers.share_texts(exchange.card))
    if workers.share([succeeded]).all():
        return exchange, None
    exchange.close()
    warnings.warn(
        f"{workers.name}: not all workers could connect to each other by TCP, so gradients travel by TensorFlow's "
        "collective operations, which cost more of the processor. Open the ports between the workers, or set "
        "`communication = 'tensorflow'` in your subclass of `Trainer`.",
        stacklevel=2,
    )
    return None, "the workers could not connect to each other"


class ReplicaSums:
    """Sums of the replicas' results of an update.

    Args:
        exchange: the connections of this worker (`exchange.Exchange`), which has one replica; or None: then TensorFlow
            sends.
        dtype: of the gradients on the wire, or None for their own. They are added up in their own type.
    """

    def __init__(self, exchange=None, dtype=None):
        self._exchange, self._dtype = exchange, dtype
        self.token = None  # by which TensorFlow keeps the order of exchanges
        if exchange is not None:
            with creating_variables():
                self.token = tf.Variable(0, trainable=False, dtype=tf.int64, name="exchanges")

    @property
    def connected(self):
        """Whether gradients travel over connections of the workers' own."""
        return self._exchange is not None

    @property
    def variables(self):
        """Those that no checkpoint has to hold."""
        return [] if self.token is None else [self.token]

    def ahead(self, numbers):
        """Scalars of one type, summed over the workers as soon as they are there. Only if `connected`."""
        return tf.unstack(self._summed(tf.stack(numbers), None))

    def __call__(self, gradients, others, factors=None):
        """(gradients, others), two structures, summed over the replicas. In a replica context.

        Counts, sums and states among `others` keep every bit of theirs.

        Args:
            gradients: [groups][variables].
            others: a structure.
            factors: [groups], by which the sums of gradients are multiplied, or None. Only if `connected`.
        """
        if self._exchange is None:
            return all_reduce((gradients, others))
        factors = [None] * len(gradients) if factors is None else factors
        scales = [factor for group, factor in zip(gradients, factors, strict=True) for _ in group]
        unscaled = [None] * len(tf.nest.flatten(others))
        if self._dtype is None:
            return self._structure((gradients, others), None, scales + unscaled)
        return self._structure(gradients, self._dtype, scales), self._structure(others, None, unscaled)

    def _structure(self, tensors, wire, scales):
        flat = tf.nest.flatten(tensors)
        sums = {}
        for bucket in buckets(flat):
            parts = [flat[index] for index in bucket]
            if len(bucket) == 1:
                pieces = [self._summed(tf.reshape(parts[0], [-1]), wire, scales[bucket[0]])]
            else:
                total = self._summed(tf.concat([tf.reshape(part, [-1]) for part in parts], 0), wire)
                pieces = tf.split(total, [part.shape.num_elements() for part in parts])
                own = zip(pieces, (scales[index] for index in bucket), strict=True)
                pieces = [_scaled(piece, scale) for piece, scale in own]
            sums.update((i, tf.reshape(s, p.shape)) for i, s, p in zip(bucket, pieces, parts, strict=True))
        return tf.nest.pack_sequence_as(tensors, [sums[index] for index in range(len(flat))])

    def _summed(self, flat, wire, scale=None):
        """The sum of a vector over all workers, times `scale`: each adds up a share, and sends that to the others."""
        size, exchange = flat.shape.num_elements(), self._exchange
        inputs = [flat] if scale is None else [flat, tf.cast(scale, flat.dtype)]
        with tf.control_dependencies([self.token.read_value()]):
            if wire is not None and wire != flat.dtype:
                whole = self._rounded_sum(flat, wire, scale)
                # The range of float16 is for gradients as they are on the way, and not for what they are divided to.
                scale = scale if wire == tf.float16 else None
            elif size * flat.dtype.size * (exchange.count - 1) <= _SMALL:
                whole = tf.numpy_function(exchange.sum_small, [flat], flat.dtype, name=OWN_CALL)
            else:
                whole, scale = tf.numpy_function(exchange.sum, inputs, flat.dtype, name=OWN_CALL), None
        whole.set_shape([size])
        with tf.control_dependencies([whole]):
            self.token.assign_add(1)
        return _scaled(tf.cast(whole, flat.dtype), scale)

    def _rounded_sum(self, flat, wire, scale):
        """As `_summed`, in the type `wire`; converted here, where that is fast, and added up in the type of `flat`."""
        size, exchange = flat.shape.num_elements(), self._exchange
        begin, end = exchange.share(size)
        received = tf.numpy_function(exchange.scatter, [tf.cast(flat, wire)], wire, name=OWN_CALL)
        received.set_shape([exchange.count - 1, end - begin])
        total = tf.add_n([flat[begin:end], *(tf.cast(part, flat.dtype) for part in tf.unstack(received))])
        total = _scaled(total, None if wire == tf.float16 else scale)
        return tf.numpy_function(
            functools.partial(exchange.gather, size=size), [tf.cast(total, wire)], wire, name=OWN_CALL
        )


def _scaled(tensor, factor):
    return tensor if factor is None else tensor * tf.cast(factor, tensor.dtype)
