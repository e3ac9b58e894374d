"""Settings of the whole test suite."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf

# Two logical devices, for the tests of replicas; everything else runs on the first.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(7)
    yield


@pytest.fixture(scope="session")
def two_devices():
    """One strategy for all tests: a second one in a process reuses the keys of the first one's collectives."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
