"""Sequential MNIST on a file made here: how it is read and ordered, what is refused, and that it is learnt."""

import gzip

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import launch
from looptape.experiments.sequential_mnist import Config, build, data, load, sequences, shuffled


def stripes(count, seed):
    """(images, digits): digit d is a bright block at the d-th of ten places in reading order, with noise."""
    random = np.random.default_rng(seed)
    digits = random.integers(0, 10, count).astype(np.uint8)
    images = random.integers(0, 40, (count, 28, 28)).astype(np.uint8)
    for image, digit in zip(images, digits, strict=True):
        row, column = divmod(int(digit), 2)
        image[4 + 4 * row : 8 + 4 * row, 14 * column : 14 * column + 14] = 255
    return images, digits


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "mnist.npz"
    (x_train, y_train), (x_test, y_test) = stripes(600, 0), stripes(200, 1)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return str(path)


def test_pixels_come_in_reading_order():
    images = np.arange(2 * 28 * 28).reshape(2, 28, 28) % 256
    found = sequences(images.astype(np.uint8), Config(pixels=1))
    assert found.shape == (2, 784, 1) and found.dtype == np.float32
    np.testing.assert_allclose(found[1, 30, 0], images[1, 1, 2] / 255, rtol=1e-6)
    rows = sequences(images.astype(np.uint8), Config(pixels=28))
    np.testing.assert_allclose(rows[0], images[0] / 255, rtol=1e-6)


def test_pooling_is_the_mean_of_squares():
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28)).astype(np.uint8)
    found = sequences(images, Config(pool=4, pixels=1))
    assert found.shape == (3, 49, 1)
    np.testing.assert_allclose(found[2, 7 * 3 + 5, 0], images[2, 12:16, 20:24].mean() / 255, rtol=1e-5)


def test_permuted_pixels_are_the_same_ones_in_one_fixed_order():
    images = np.random.default_rng(0).permutation(2 * 784).reshape(2, 28, 28) % 256
    plain = sequences(images.astype(np.uint8), Config(pixels=1))[..., 0]
    permuted = sequences(images.astype(np.uint8), Config(pixels=1, permuted=True, seed=5))[..., 0]
    assert not np.array_equal(plain, permuted)
    np.testing.assert_array_equal(np.sort(plain), np.sort(permuted))
    np.testing.assert_array_equal(permuted, sequences(images.astype(np.uint8), Config(pixels=1, permuted=True))[..., 0])
    # Both images in the same order: pairs of pixels stay together.
    pairs = [{tuple(pair) for pair in both.T.tolist()} for both in (plain, permuted)]
    assert pairs[0] == pairs[1]


def test_every_example_once_per_pass_in_a_new_order():
    numbers = [int(number) for number in shuffled(10, 3).take(20)]
    assert sorted(numbers[:10]) == sorted(numbers[10:]) == list(range(10)) and numbers[:10] != numbers[10:]
    assert numbers[:10] != [int(number) for number in shuffled(10, 4).take(10)]


def test_images_keep_their_digits_and_the_position_is_saved(path, tmp_path):
    arrays = load(path)
    dataset, held_out = data(Config(batch_size=8, pixels=1), arrays)
    iterator = iter(dataset)
    inputs, digits = next(iterator)
    known = {image.tobytes(): digit for image, digit in zip(arrays["x_train"], arrays["y_train"], strict=True)}
    pixels = np.round(255 * inputs.numpy()).astype(np.uint8)
    assert [known[row.tobytes()] for row in pixels] == digits.numpy().tolist()
    assert sum(len(digits) for _, digits in held_out) == 200
    saved = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "position"))
    expected = next(iterator)[0].numpy()
    again = iter(dataset)
    tf.train.Checkpoint(iterator=again).read(saved)
    np.testing.assert_array_equal(next(again)[0].numpy(), expected)


def test_it_is_learnt(path):
    """Nearly all of the ten patterns, by what the model answers; the most frequent one alone is about a tenth."""
    config = Config(
        data_path=path,
        pool=4,
        pixels=1,
        cell="orthogonal",
        batch_size=64,
        units=24,
        steps=200,
        learning_rate=0.01,
        jit_compile=False,
        probe_every=0,
        eval_every=None,
    )
    made = []
    results = launch.run(config, lambda config: made.append(build(config)) or made[0], show=False)
    arrays = load(path)
    answers = made[0].trainer.model(sequences(arrays["x_test"], config)).numpy().argmax(axis=-1)
    accuracy = np.mean(answers == arrays["y_test"])
    assert accuracy > 0.9
    assert results["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert made[0].goals[0].baseline == pytest.approx(np.bincount(arrays["y_test"]).max() / 200)


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(launch.Refused, match="`data_path` is .*missing.npz.*No such file.*mnist.npz, a file with"):
        load(str(tmp_path / "missing.npz"))
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(launch.Refused, match=r"text.npz', which cannot be used"):
        load(str(tmp_path / "text.npz"))
    np.savez(tmp_path / "few.npz", x_train=np.zeros([1, 28, 28]))
    with pytest.raises(launch.Refused, match="y_train is not a file in the archive.*the arrays x_train, y_train"):
        load(str(tmp_path / "few.npz"))
    wrong = {"x_train": np.zeros([3, 28, 28]), "x_test": np.zeros([3, 32, 32])}
    np.savez(tmp_path / "wrong.npz", **wrong, y_train=np.zeros(3), y_test=np.zeros(3))
    with pytest.raises(launch.Refused, match=r"x_test has the shape \(3, 32, 32\).*they must be \[count, 28, 28\]"):
        load(str(tmp_path / "wrong.npz"))


def idx(values):
    """The bytes of an IDX file, by the format's definition."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()


@pytest.mark.parametrize("spelling", ["{}-idx{}-ubyte", "{}-idx{}-ubyte.gz", "{}.idx{}-ubyte"])
def test_a_folder_of_idx_files_is_read(tmp_path, spelling):
    made = dict(zip(("x_train", "y_train", "x_test", "y_test"), (*stripes(5, 0), *stripes(3, 1)), strict=True))
    for name, values in made.items():
        part = {"train": "train", "test": "t10k"}[name[2:]] + {"x": "-images", "y": "-labels"}[name[0]]
        content = idx(values)
        (tmp_path / spelling.format(part, values.ndim)).write_bytes(
            gzip.compress(content) if spelling.endswith("gz") else content
        )
    for name, values in load(str(tmp_path)).items():
        np.testing.assert_array_equal(values, made[name])


def test_a_folder_that_cannot_be_used_says_which_file(tmp_path):
    with pytest.raises(launch.Refused, match="there is no train-images-idx3-ubyte or train-images-idx3-ubyte.gz in it"):
        load(str(tmp_path))
    images = tmp_path / "train-images-idx3-ubyte"
    for content, problem in (
        (b"<html>", "begins with '3c68746d'; an IDX file of bytes with 000008"),
        (idx(np.zeros([2, 28, 28], np.uint8))[:-1], r"says shape \[2, 28, 28\] and has 1567 values"),
        (gzip.compress(b"\0" * 99)[:-9], "which cannot be used: Compressed file ended"),
        (b"\0\0\x08\x03\0\0", "ends within its first 16 bytes"),
    ):
        images.write_bytes(content)
        with pytest.raises(launch.Refused, match=problem):
            load(str(tmp_path))


def test_without_a_network_the_error_says_how_to_get_the_file(monkeypatch):
    def fails():
        raise Exception("URL fetch failure")

    monkeypatch.setattr(keras.datasets.mnist, "load_data", fails)
    with pytest.raises(launch.Refused, match="could not be downloaded: URL fetch failure.*by --data_path"):
        load(None)


def test_pixels_per_time_step_have_to_divide_the_image():
    with pytest.raises(ValueError, match="`pixels` is 5; it must divide the 784 pixels of an image. Use e.g. 28."):
        Config(pixels=5)
