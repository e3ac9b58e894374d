"""The tf.data service, as docs/scale-out.md has it, against the same pipeline without it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer

service = tf.data.experimental.service
UPDATES = 12


@pytest.fixture(scope="module")
def address():
    """Of a dispatcher with one worker."""
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=dispatcher.target.split("://")[1]))
    yield dispatcher.target
    del worker, dispatcher


def pipeline():
    tf.random.set_seed(4)
    x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(40, seed=3).repeat()
    return data.map(lambda x, y: (2.0 * x, y)).batch(7)


def weights(data, tmp_path, *totals):
    for total in totals:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        trainer = Trainer(model, keras.optimizers.Adam(0.01), {"error": "mse"})
        trainer.fit(data(), steps=total, workdir=tmp_path, progress=False)
    return [variable.numpy() for variable in model.variables]


@pytest.mark.filterwarnings("ignore:The position in this dataset cannot be saved")
def test_batches_of_the_service_train_and_resume_as_those_of_the_pipeline(address, tmp_path):
    def served():
        return pipeline().apply(service.distribute(service.ShardingPolicy.OFF, address))

    expected = weights(pipeline, tmp_path / "plain", UPDATES)
    for name, totals in (("served", [UPDATES]), ("resumed", [5, UPDATES])):
        for found, value in zip(weights(served, tmp_path / name, *totals), expected, strict=True):
            np.testing.assert_array_equal(found, value, err_msg=name)
