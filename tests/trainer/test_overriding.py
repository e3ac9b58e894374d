"""Which hooks a subclass overrides, and how they are called."""

import pytest
import tensorflow as tf

from looptape.trainer.overriding import converted, overrides


class Base:
    def step(self, batch):
        return batch

    def other(self, batch):
        return batch


class Child(Base):
    def step(self, batch):
        total = 0
        for t in tf.range(batch):  # a loop of the graph
            total += t
        return total


class Grandchild(Child):
    pass


def test_a_method_of_any_subclass_overrides():
    for kind, expected in ((Base, False), (Child, True), (Grandchild, True)):
        assert overrides(kind(), Base, "step") is expected
        assert overrides(kind(), Base, "other") is False


def test_python_loops_become_loops_of_the_graph_when_traced():
    hook = converted(Child().step)
    assert int(tf.function(hook, autograph=False)(tf.constant(5))) == 10
    assert int(hook(tf.constant(5))) == 10  # eager, as it is written


def test_a_hook_that_cannot_take_its_arguments_is_named_with_what_it_should_be():
    class Wrong(Base):
        def step(self, batch, labels):
            return batch

    with pytest.raises(TypeError, match=r"`step` of Wrong takes \(batch, labels\).*Define it as step\(self, batch\)"):
        converted(Wrong().step)(tf.constant(1))
