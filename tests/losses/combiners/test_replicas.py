"""Two replicas of one machine keep equal state, for every combiner. In a process of its own: devices come first."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from tests.losses.combiners.test_conformance import CLASSES, DATA, NAMES, machine, made, one_update

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
for cls in CLASSES:
    with strategy.scope():
        combiner = made(cls)

    @tf.function(autograph=False)
    def step(*batch):
        return strategy.run(lambda *b: one_update(combiner, *b)[0], args=batch)

    seen = []
    for t in range(4):
        both = strategy.experimental_local_results(step(*(tf.constant(x[t]) for x in DATA), tf.ones([3], tf.bool)))
        np.testing.assert_array_equal(*both, cls.name)
        seen.append(both[0].numpy())
    for variable in combiner.variables:
        copies = strategy.experimental_local_results(variable)
        assert len(copies) == 2, cls.name
        np.testing.assert_array_equal(*copies, cls.name)
    np.testing.assert_allclose(seen, machine(cls).run(range(4)), rtol=1e-5, atol=1e-6, err_msg=cls.name)
print("replicas agree:", len(CLASSES))
"""


@pytest.mark.long
def test_replicas_agree():
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split("replicas agree:")[1]) >= 28
