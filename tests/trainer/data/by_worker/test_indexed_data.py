"""Data by index: the same global batches however many workers share them, and a position that is one integer."""

import itertools
import os
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import looptape
from looptape import IndexedData
from looptape.trainer.data import batches
from looptape.trainer.data.source import open_source
from looptape.trainer.distribution.workers import Alone
from tests.trainer.tools import assert_identical_weights, dense_model, mse, regression, train

X, Y = regression(23)


def indexed(**options):
    x, y = tf.constant(X), tf.constant(Y)
    return IndexedData(len(X), lambda index: (x[index], y[index]), **{"batch_size": 5, **options})


def rows(data, count, **options):
    """[indices of each batch] as the pipeline gives them."""
    made = IndexedData(data.number, lambda index: index, batch_size=data.batch_size, shuffle=data.shuffle)
    made.seed, made.drop_remainder = data.seed, data.drop_remainder
    return [batch.tolist() for batch in itertools.islice(made.dataset(**options).as_numpy_iterator(), count)]


@pytest.mark.parametrize(
    "number, size, drop", [(23, 5, False), (23, 5, True), (12, 4, False), (7, 3, False), (2, 9, False)]
)
def test_the_global_order_is_the_same_for_one_to_four_workers(number, size, drop):
    data = IndexedData(number, lambda index: index, batch_size=size, seed=3, drop_remainder=drop)
    count = 2 * data.batches_per_pass + 1
    expected = [data.indices(batch).tolist() for batch in range(count)]
    for workers in (1, 2, 3, 4):
        shares = [rows(data, count, repeat=True, rank=rank, workers=workers) for rank in range(workers)]
        assert len({repr(data.dataset(rank=rank, workers=workers).element_spec) for rank in range(workers)}) == 1
        assert [sum(parts, []) for parts in zip(*shares, strict=True)] == expected
        # Each worker has the rows that it would have taken of the whole batch.
        for rank, whole in itertools.product(range(workers), (0, data.batches_per_pass - 1)):
            own = batches.slice_for_replica(tf.constant(expected[whole]), rank, workers)
            assert shares[rank][whole] == own.numpy().tolist()


def test_a_pass_has_each_example_once_and_the_next_has_another_order():
    data = IndexedData(1000, lambda index: index, batch_size=64)
    passes = [np.concatenate(rows(data, 16, start=16 * index)) for index in range(3)]
    for order in passes:
        assert sorted(order) == list(range(1000))
    assert all((a != b).mean() > 0.9 for a, b in itertools.combinations(passes, 2))
    # Neither is it close to the order of the examples: the correlation of a random one is below 0.1 (3 sigma).
    assert all(abs(np.corrcoef(order, range(1000))[0, 1]) < 0.1 for order in passes)
    other = IndexedData(1000, lambda index: index, batch_size=64, seed=1)
    assert (np.concatenate(rows(other, 16)) != passes[0]).mean() > 0.9
    plain = IndexedData(1000, lambda index: index, batch_size=64, shuffle=False)
    assert np.concatenate(rows(plain, 16, start=32)).tolist() == list(range(1000))


def test_each_worker_computes_only_its_own_rows():
    made = []

    def note(index):
        made.append(int(index))
        return index

    def function(index):
        return tf.numpy_function(note, [index], tf.int64)

    data = IndexedData(24, function, batch_size=8, num_parallel_calls=1)
    assert len(list(data.dataset(rank=1, workers=4))) == 3
    assert sorted(made) == sorted(np.concatenate([data.indices(batch)[2:4] for batch in range(3)]))


@pytest.mark.parametrize("number, size, drop", [(23, 5, False), (23, 5, True), (12, 4, False), (2, 9, False)])
def test_a_function_of_batches_gives_the_same_batches(number, size, drop):
    """Of one call for each batch, by one to three workers, from the beginning and from the middle of a pass."""
    calls = []

    def function(indices):
        calls.append(indices.shape.as_list())
        return {"index": indices, "square": tf.cast(indices, tf.float32)[:, tf.newaxis] ** 2}

    def one(index):
        return {"index": index, "square": tf.cast(index, tf.float32)[tf.newaxis] ** 2}

    options = {"batch_size": size, "seed": 3, "drop_remainder": drop}
    whole = IndexedData(number, one, **options)
    data = IndexedData(number, function, batched=True, **options)
    for workers, start, repeat in ((1, 0, False), (2, 0, True), (3, 1, True)):
        for rank in range(workers):
            arguments = {"start": start, "rank": rank, "workers": workers, "repeat": repeat}
            assert data.dataset(**arguments).element_spec == whole.dataset(**arguments).element_spec
            pairs = zip(data.dataset(**arguments).take(9), whole.dataset(**arguments).take(9), strict=True)
            for found, expected in pairs:
                tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
    assert all(len(shape) == 1 and shape[0] is not None for shape in calls)
    assert data.samples.draw(2) != 0


def test_a_function_of_batches_resumes_and_is_evaluated(tmp_path):
    x, y = tf.constant(X), tf.constant(Y)
    rows = {"batched": True, "batch_size": 5}
    data = IndexedData(23, lambda indices: (tf.gather(x, indices), tf.gather(y, indices)), **rows)
    expected = train(dense_model(), indexed(), steps=7)
    for steps in (3, 7):
        trainer = looptape.Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
        trainer.fit(data, steps=steps, workdir=tmp_path, progress=False)
    assert_identical_weights(expected.model, trainer.model)
    assert expected.evaluate(data) == expected.evaluate(indexed())


def test_functions_that_cannot_be_traced_or_lose_rows_are_answered():
    with pytest.raises(
        TypeError, match=r"(?s)such as a NumPy array or a list .*x = tf.constant\(x\), or put the Python"
    ):
        IndexedData(23, lambda index: (X[index], Y[index])).dataset()
    with pytest.raises(TypeError, match="such as a NumPy array or a list"):
        IndexedData(3, lambda index: [1.0, 2.0][index]).dataset()
    x = tf.constant(X)
    with pytest.raises(
        ValueError, match=r"got 5 indices and returned a tensor of the shape \(3,\); it must have a row"
    ):
        IndexedData(23, lambda indices: x[indices[0]], batched=True, batch_size=5).dataset()


@pytest.mark.parametrize("kind", ["random", "generator", "counter"])
def test_a_function_with_a_state_causes_a_warning(kind):
    x, y = tf.constant(X), tf.constant(Y)
    generator, counter = tf.random.Generator.from_seed(1), tf.Variable(0.0)
    made = {
        "random": lambda: tf.random.normal([3], seed=5),
        "generator": lambda: generator.normal([3]),
        "counter": lambda: counter.assign_add(1.0),
    }[kind]
    data = IndexedData(23, lambda index: (x[index] + made(), y[index]))
    source = open_source({}, data, 32, True, Alone())
    match = "The function of the `IndexedData` has operations with a state .* tf.random.stateless_normal"
    with pytest.warns(UserWarning, match=match):
        source.checkpointable()


def test_random_numbers_of_the_index_and_python_code_cause_no_warning():
    def function(index):
        noise = tf.random.stateless_normal([3], [1, index])
        return tf.constant(X)[index] + noise, tf.ensure_shape(
            tf.numpy_function(lambda i: Y[i], [index], tf.float32), [1]
        )

    source = open_source({}, IndexedData(23, function), 32, True, Alone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source.checkpointable()


def test_it_trains_as_a_dataset_of_the_same_batches():
    data = indexed()
    order = [data.indices(batch) for batch in range(12)]
    arrays = tf.data.Dataset.from_generator(
        lambda: ((X[each], Y[each]) for each in order),
        output_signature=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])),
    )
    assert_identical_weights(train(dense_model(), data, steps=12).model, train(dense_model(), arrays, steps=12).model)
    by_epochs, by_steps = (train(dense_model(), data, **total) for total in ({"epochs": 2}, {"steps": 10}))
    assert_identical_weights(by_epochs.model, by_steps.model)


@pytest.mark.parametrize("total", ["steps", "epochs"])
def test_a_resumed_run_is_bit_equal_and_saves_one_integer(total, tmp_path):
    """Off the accumulation boundary of a pass: 5 batches, 2 of them per update."""
    whole, first = ({"steps": 7}, {"steps": 4}) if total == "steps" else ({"epochs": 3}, {"epochs": 1})

    def run(workdir, asked):
        trainer = looptape.Trainer(dense_model(), keras.optimizers.Adam(), {"error": mse()}, accumulation_steps=2)
        trainer.fit(indexed(), **asked, workdir=workdir, progress=False)
        return trainer

    expected = run(tmp_path / "whole", whole)
    run(tmp_path / "parts", first)
    [checkpoint] = (tmp_path / "parts" / "checkpoints").iterdir()
    names = [name for name, _ in tf.train.list_variables(str(next(checkpoint.glob("*.index")))[: -len(".index")])]
    assert not any("iterator" in name for name in names)
    resumed = run(tmp_path / "parts", whole)
    assert int(resumed.step) == int(expected.step)
    assert_identical_weights(expected.model, resumed.model)


def test_a_trainer_continues_with_the_same_data():
    data = indexed()
    trainer = train(dense_model(), data, steps=3)
    trainer.fit(data, steps=8, progress=False)
    assert_identical_weights(trainer.model, train(dense_model(), data, steps=8).model)


def test_the_batches_of_an_update_that_is_not_finite_are_examined():
    bad = X.copy()
    bad[int(indexed().indices(2)[1])] = np.nan
    x, y = tf.constant(bad), tf.constant(Y)
    trainer = looptape.Trainer(dense_model(), "sgd", {"error": mse()})
    trainer.on_nonfinite = "raise"
    data = IndexedData(len(X), lambda index: (x[index], y[index]), batch_size=5)
    with pytest.raises(ArithmeticError, match=r"(?s)step 2 is not finite.*batch\[0\] at example 1,"):
        trainer.fit(data, steps=5, progress=False)


def test_evaluate_and_predict_take_every_example_once():
    trainer = looptape.Trainer(dense_model(), "sgd", {"error": mse()})
    found, expected = trainer.evaluate(indexed()), trainer.evaluate((X, Y), batch_size=5)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    np.testing.assert_allclose(trainer.predict(indexed()), trainer.predict(X), atol=1e-6)  # not in a shuffled order
    assert np.isfinite(trainer.fast_dev_run(indexed())["loss"])


# ---- Files of records.


@pytest.fixture
def files(tmp_path):
    """Records of different sizes, one of them empty, in three files, one of which has none."""
    contents = [[b"a", b"bb" * 700, b""], [], [b"c%d" % number for number in range(4)]]
    paths = [tmp_path / f"{number}.tfrecord" for number in range(3)]
    for path, records in zip(paths, contents, strict=True):
        with tf.io.TFRecordWriter(os.fspath(path)) as writer:
            for record in records:
                writer.write(record)
    return paths


def test_records_are_read_by_their_number(files):
    expected = list(tf.data.TFRecordDataset([os.fspath(path) for path in files]).as_numpy_iterator())
    data = IndexedData.from_records(files, lambda record: record, batch_size=3, shuffle=False)
    assert data.number == 7
    assert [record for batch in data.dataset().as_numpy_iterator() for record in batch] == expected
    shuffled = IndexedData.from_records(files, lambda record: record, batch_size=3, seed=5)
    found = [record for batch in shuffled.dataset().as_numpy_iterator() for record in batch]
    assert found == [expected[index] for batch in range(3) for index in shuffled.indices(batch)]


def test_records_are_read_by_the_batch(files):
    options = {"batch_size": 3, "seed": 5}
    one = IndexedData.from_records(files, lambda record: tf.strings.length(record), **options)
    made = IndexedData.from_records(files, lambda records: tf.strings.length(records), batched=True, **options)
    expected, found = ([batch.tolist() for batch in each.dataset().as_numpy_iterator()] for each in (one, made))
    assert found == expected and len(found) == 3


def test_damaged_and_compressed_files_are_refused(files, tmp_path):
    whole = files[2].read_bytes()
    files[2].write_bytes(whole[:-3])
    with pytest.raises(ValueError, match=r"2\.tfrecord' is not a whole, .* record 3, at byte 54, does not end"):
        IndexedData.from_records(files, lambda record: record)
    packed = tmp_path / "packed"
    with tf.io.TFRecordWriter(os.fspath(packed), tf.io.TFRecordOptions("GZIP")) as writer:
        writer.write(b"x" * 100)
    with pytest.raises(ValueError, match="not a whole, uncompressed TFRecord file"):
        IndexedData.from_records(packed, lambda record: record)
    with pytest.raises(ValueError, match="There are no files of records: the list is empty"):
        IndexedData.from_records([], lambda record: record)
    with pytest.raises(FileNotFoundError, match=r"^There is no file 'none' and 1 more in '/.*must be paths .*Correct"):
        IndexedData.from_records([files[0], "none", "neither"], lambda record: record)
    with pytest.raises(ValueError, match=r"The 1 files have no record\. The first one is .*1\.tfrecord"):
        IndexedData.from_records(files[1], lambda record: record)
    with pytest.raises(TypeError, match="it must be a function that parses a serialized record"):
        IndexedData.from_records(files, "parse")


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((0, tf.identity), {}, "`number` is 0; it must be at least 1"),
        ((2.5, tf.identity), {}, "`number` is 2.5; it must be an integer"),
        ((3, [1, 2, 3]), {}, "`function` is [1, 2, 3]; it must be a function that makes an example from its index"),
        ((3, tf.identity), {"batch_size": 0}, "`batch_size` is 0; it must be at least 1"),
        ((3, tf.identity), {"seed": -1}, "`seed` is -1; it must be at least 0"),
        ((3, tf.identity), {"seed": 2**31}, "`seed` is 2147483648; it must be less than 2**31. Use e.g. seed=0."),
        ((3, tf.identity), {"batch_size": 4, "drop_remainder": True}, "with `drop_remainder` no batch is left"),
    ],
)
def test_bad_arguments_are_answered(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        IndexedData(*arguments, **options)


# ---- Checksums, by which workers compare their batches.


def test_a_checksum_tells_contents_order_and_shapes_apart():
    x = np.arange(12, dtype="float32").reshape(4, 3)
    other = [x, x[::-1], x.reshape(3, 4), x + 1e-6, -x, x[:3], x.astype("float64"), x.astype("int32"), x > 3]
    sums = [int(batches.checksum({"x": tf.constant(np.ascontiguousarray(each))})) for each in other]
    assert sums[0] == int(batches.checksum({"x": tf.constant(x)}))
    assert len(set(sums)) == len(sums)
    texts = [int(batches.checksum(tf.constant(text))) for text in (["a", "b"], ["b", "a"], ["a", "c"])]
    assert len(set(texts)) == 3
    large = np.zeros(1_000_000, "float32")
    assert int(batches.checksum(tf.constant(large))) != int(batches.checksum(tf.constant(large + 1)))
    for dtype in (tf.bfloat16, tf.float16, tf.complex64, tf.uint8):
        assert int(batches.checksum(tf.cast(x, dtype))) != int(batches.checksum(tf.cast(x[::-1], dtype)))
