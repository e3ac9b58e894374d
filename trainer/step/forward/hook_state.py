"""Variables that hooks assign at once, such as a `tf.Variable` of a subclass: put back after a skipped update.

What a forward pass assigns to Keras variables is written after the check of the update (`forward_state`). All other
assignments happen where the hook makes them, before that check. So each update begins with a copy of their variables.
"""

from collections.abc import Collection

import tensorflow as tf
from tensorflow.python.framework.auto_control_deps_utils import get_read_only_resource_input_indices_graph

from looptape.trainer.variables import creating_variables, is_own, raw, whole


class HookState:
    """Copies of the variables that hooks assign at once; none and no cost for hooks that assign none.

    Args:
        owner: the trainer.
    """

    def __init__(self, owner):
        self._owner = owner
        self._pairs = []  # [(variable, its copy)]

    @property
    def variables(self):
        """The copies."""
        return [copy for _, copy in self._pairs]

    def find(self, graph):
        """Looks for such variables in the graph of an update. Returns whether it has to be traced again with copies."""
        others = {id(variable) for variable in self._written_after_the_check()}
        known = {id(variable) for variable, _ in self._pairs}
        found = {id(variable): variable for variable in assigned(graph) if not is_own(variable)}
        new = [variable for key, variable in found.items() if key not in others | known]
        with creating_variables(self._owner.strategy):
            for variable in new:
                aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
                options = {"shape": variable.shape, "aggregation": aggregation, "name": "kept"}
                self._pairs.append((variable, tf.Variable(tf.convert_to_tensor(variable), trainable=False, **options)))
        return bool(new)

    def _written_after_the_check(self):
        """The variables that belong to an update itself."""
        owner = self._owner
        variables = [*owner.forward_state.variables(), *owner.replica_sums.variables, *owner.media.variables]
        for minimizer in owner.minimizers.values():
            variables += [*minimizer.trained, *minimizer.optimizer.variables, *minimizer.combiner.variables]
        return [raw(variable) for variable in variables]

    def keep(self):
        """The operations that copy the variables, for which an update waits. Traced or eager, outside replicas."""
        return [copy.assign(tf.convert_to_tensor(variable)) for variable, copy in self._pairs]

    def put_back(self):
        """Gives the variables the values with which the latest update began. On the host."""
        for variable, copy in self._pairs:
            variable.assign(tf.convert_to_tensor(copy))


def assigned(graph) -> Collection[tf.Variable]:
    """The variables that the operations of a graph assign, in the functions that it calls, too."""
    # There is no public function that tells a variable that is written from one that is read.
    inputs = {id(tensor): index for index, tensor in enumerate(graph.inputs)}
    places = {id(outside): inputs[id(inside)] for outside, inside in graph.captures if id(inside) in inputs}
    read_only = set(get_read_only_resource_input_indices_graph(graph))
    return [whole(v) for v in graph.variables if places.get(id(v.handle), -1) not in {-1, *read_only}]
