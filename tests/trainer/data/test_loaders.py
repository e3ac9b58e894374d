"""Loaders of batches: PyTorch, Grain, and any object that can be iterated over again; arrays of other packages."""

import keras
import numpy as np
import pytest
import scipy.sparse

from looptape import Trainer
from tests.trainer.tools import assert_identical_weights, assert_same_weights, linear_model, regression

X, Y = regression(24)


class Loader:
    """Batches in another order each time, by a seed, as PyTorch's loader gives them: in lists."""

    def __init__(self):
        self._rng = np.random.default_rng(5)

    def __iter__(self):
        for rows in np.split(self._rng.permutation(24), 3):
            yield [X[rows], Y[rows]]


def torch_loader():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(3))


def grain_dataset():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(range(24)).shuffle(seed=4).map(lambda index: (X[index], Y[index])).batch(8)


def grain_loader():
    grain = pytest.importorskip("grain")

    class Row(grain.transforms.Map):
        def map(self, index):
            return X[index], Y[index]

    sampler = grain.samplers.IndexSampler(24, shuffle=True, num_epochs=1, seed=4)
    operations = [Row(), grain.transforms.Batch(8)]
    return grain.DataLoader(data_source=range(24), sampler=sampler, operations=operations)


def make():
    return Trainer(linear_model(), keras.optimizers.SGD(0.05, momentum=0.9), {"error": "mse"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loader", [Loader, torch_loader, grain_dataset, grain_loader], ids=lambda f: f.__name__)
def test_a_loader_trains_like_its_own_batches_and_resumes_exactly(loader, tmp_path):
    """In the middle of the second pass; the position is counted, and a new loader with the same seed runs up to it."""
    same, batches = loader(), []
    for _ in range(3):
        batches += [tuple(np.asarray(part) for part in batch) for batch in same]
    expected, whole, first, second = make(), make(), make(), make()
    expected.fit(lambda: iter(batches), epochs=1, progress=False)
    whole.fit(loader(), epochs=3, progress=False)
    assert_identical_weights(expected.model, whole.model)
    first.fit(loader(), steps=5, workdir=tmp_path, progress=False)
    second.fit(loader(), steps=9, workdir=tmp_path, progress=False)
    assert_identical_weights(expected.model, second.model)


def test_a_loader_evaluates_and_predicts():
    ordered = [(X[:8], Y[:8]), (X[8:], Y[8:])]

    class Ordered:
        def __iter__(self):
            return iter(ordered)

    trainer = make()
    assert trainer.evaluate(Ordered()) == pytest.approx(trainer.evaluate((X, Y)), rel=1e-6)
    np.testing.assert_allclose(trainer.predict(Ordered()), trainer.predict(X), rtol=1e-6)


def test_nested_lists_of_arrays_are_tuples():
    keras.utils.set_random_seed(1)
    inputs = [keras.Input((3,)), keras.Input((1,))]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(inputs)))
    trainer = Trainer(model, "sgd", {"error": "mse"})
    trainer.fit(lambda: iter([[[X[:8], Y[:8]], Y[:8]]]), epochs=1, progress=False)
    assert int(trainer.step) == 1


def test_arrays_of_other_packages():
    trainer = make()
    expected = trainer.evaluate((X, Y))
    given = []
    torch, pandas = (pytest.importorskip(name) for name in ("torch", "pandas"))
    given += [(torch.tensor(X), torch.tensor(Y)), (pandas.DataFrame(X), pandas.DataFrame(Y))]
    for data in given:
        assert trainer.evaluate(data) == pytest.approx(expected, rel=1e-6)


def test_a_sparse_matrix_of_scipy_trains_like_the_dense_one():
    x = np.where(np.abs(X) > 0.7, X, 0).astype("float32")
    dense, sparse = make(), make()
    data = (x, Y), (scipy.sparse.csr_matrix(x), Y)
    for trainer, arrays in zip((dense, sparse), data, strict=True):
        trainer.fit(arrays, epochs=2, batch_size=8, progress=False)
    assert_same_weights(dense.model, sparse.model)


def test_what_is_not_a_loader():
    for data, kind in (({1, 2}, "set"), ("rows.csv", "str")):
        with pytest.raises(TypeError, match=f"The dataset is a {kind}; it must be .* a loader or a list of batches"):
            make().fit(data, epochs=1)

    class Empty:
        def __iter__(self):
            return iter(())

    with pytest.raises(ValueError, match="The dataset is empty: the generator gave no batch"):
        make().fit(Empty(), epochs=1)
