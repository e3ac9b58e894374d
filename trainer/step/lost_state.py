"""State of a traced update that no checkpoint can hold: random operations of TensorFlow, tables, Python code."""

import re
import warnings

from looptape.trainer.variables import OWN_CALL

# Random operations that keep their state to themselves, and what they are called in Python.
_RANDOMNESS = re.compile(
    r"Random(?!Dataset)\w*|(Parameterized)?TruncatedNormal|Multinomial|SampleDistorted\w+|\w*CandidateSampler"
)
_CALLED = {
    "RandomStandardNormal": "normal",
    "RandomUniform": "uniform",
    "RandomUniformInt": "uniform",
    "RandomShuffle": "shuffle",
    "TruncatedNormal": "truncated_normal",
    "Multinomial": "categorical",
}
# Operations that change what is not a variable.
_TABLES = re.compile(
    r"LookupTable(Insert|Import|Remove)\w*|Queue(Enqueue|Dequeue)\w*|(Stack|Map|Stage|Barrier)(Push|Insert)\w*"
)


# Operations that call Python. One that is declared stateless keeps nothing.
_PYTHON = {"EagerPyFunc": "`tf.py_function`", "PyFunc": "`tf.numpy_function`"}


def check(graph):
    """Warns of random numbers in the graph of an update that a resumed run draws anew; refuses tables it would lose."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    kinds = sorted({node.op for node in nodes})
    changed = [kind for kind in kinds if _TABLES.fullmatch(kind)]
    if changed:
        raise ValueError(
            f"The update changes a table or a queue ({', '.join(changed)}); a checkpoint holds variables only, so a "
            "resumed run would begin with an empty one. Keep its contents in a `tf.Variable` that is an attribute of "
            "the trainer, or train without `workdir`."
        )
    calls = {_PYTHON[node.op] for node in nodes if node.op in _PYTHON and OWN_CALL not in node.name}
    if calls:
        warnings.warn(
            f"The update calls Python by {' and '.join(sorted(calls))}; a checkpoint holds nothing of what that code "
            "keeps, such as a generator of random numbers or a counter, so a resumed run begins with it anew. Keep it "
            "in a `tf.Variable` that is an attribute of the trainer. For code that keeps nothing use "
            "`tf.numpy_function(…, stateful=False)`.",
            stacklevel=3,
        )
    drawn = [kind for kind in kinds if _RANDOMNESS.fullmatch(kind)]
    if drawn:
        names = ", ".join(f"{kind} (tf.random.{_CALLED[kind]})" if kind in _CALLED else kind for kind in drawn)
        warnings.warn(
            f"The update draws random numbers by {names}; TensorFlow keeps no state of it that a checkpoint could "
            "hold, so a resumed run draws others. Use `keras.random` (`keras.random.normal(shape)`, with or "
            "without a seed generator), a `tf.random.Generator` that is an attribute of the trainer, or "
            "`tf.random.stateless_…` with a seed from `self.step`.",
            stacklevel=3,
        )
