"""Sequential MNIST: classify a digit from an image read row by row or pixel by pixel, in order or permuted.

    looptape run sequential_mnist --workdir=runs/mnist
    looptape run sequential_mnist --workdir=runs/pixels --pixels=1 --cell=orthogonal --learning_rate=1e-3
    looptape run sequential_mnist --workdir=runs/permuted --pixels=1 --cell=orthogonal --learning_rate=1e-3 --permuted

By default an LSTM reads 28 rows. With `--pixels=1` there are 784 time steps of one pixel each and one answer at the
end, so the gradient has to reach far back to the first pixels; `--permuted` removes the information in neighbouring
pixels. `--pool=2` averages squares of four pixels, which makes sequences a quarter as long.

Keras downloads MNIST once. Offline, `--data_path` takes a copy of `mnist.npz`, or a folder with the four original IDX
files, plain or gzipped.

Expect an `accuracy` above 0.985 row by row, in about two minutes on two CPU cores: seeds 0 to 2 reached 0.990, 0.991
and 0.989; seed 0 with `--cell=gru` 0.989.
"""

import dataclasses
import gzip
import os
import zipfile
import zlib

import keras
import numpy as np
import tensorflow as tf

from looptape import Trainer, launch
from looptape.losses import sparse_categorical_cross_entropy
from looptape.models import IdentityRNNCell, LoopRNN, OrthogonalRNNCell

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
IDX = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
SIDE = 28  # pixels

CELLS = {
    "orthogonal": OrthogonalRNNCell,
    "gru": keras.layers.GRUCell,
    "lstm": keras.layers.LSTMCell,
    "rnn": keras.layers.SimpleRNNCell,
    "identity": IdentityRNNCell,
}


@dataclasses.dataclass(frozen=True)
class Config(launch.Config):
    steps: int = 4000
    batch_size: int = 128
    learning_rate: float = 3e-3
    learning_rate_schedule: str = "cosine"
    clip_norm: float | None = 1.0
    jit_compile: bool = True
    log_every: int = 50
    eval_every: int | None = 500
    checkpoint_every: int | None = 500
    probe_every: int = 200

    data_path: str | None = launch.option(
        None, "mnist.npz, or a folder of the four IDX files (plain or .gz); none to let Keras find or download it"
    )
    permuted: bool = launch.option(False, "read the pixels in a random order, the same for all images and runs")
    pool: int = launch.option(
        1, "side of the squares of pixels to average: 2 makes the sequences a quarter as long", choices=(1, 2, 4, 7, 14)
    )
    pixels: int = launch.option(28, "pixels per time step: 28 for a row of the image, 1 for single pixels", least=1)
    cell: str = launch.option("lstm", "the recurrent cell", choices=CELLS)
    units: int = launch.option(128, "size of the cell's state", least=1)

    def __post_init__(self):
        super().__post_init__()
        side = SIDE // self.pool
        if side**2 % self.pixels:
            raise ValueError(
                f"`pixels` is {self.pixels}; it must divide the {side**2} pixels of an image. Use e.g. {side}."
            )


def load(path):
    """{name: array} of the images [count, 28, 28] and their digits [count], from a file, a folder, or by Keras."""
    if path is None:
        return _by_keras()
    path = os.path.expanduser(path)
    try:
        arrays = _from_folder(path) if os.path.isdir(path) else _from_file(path)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise launch.Refused(
            f"`data_path` is {path!r}, which cannot be used: {error}. It must be Keras's mnist.npz, a file with the "
            f"arrays {', '.join(ARRAYS)}, or a folder with the four files {', '.join(IDX.values())}, plain or gzipped."
        ) from error
    for part in ("train", "test"):
        images, digits = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if images.shape[1:] != (SIDE, SIDE) or digits.shape != images.shape[:1] or not len(images):
            raise launch.Refused(
                f"`data_path` is {path!r}, whose x_{part} has the shape {images.shape} and y_{part} {digits.shape}; "
                f"they must be [count, {SIDE}, {SIDE}] and [count]. Use mnist.npz or the IDX files of MNIST."
            )
    return arrays


def _by_keras():
    try:
        (x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()
    except Exception as error:  # Keras raises nothing more special
        raise launch.Refused(
            f"MNIST is not on this machine and could not be downloaded: {error}. Get mnist.npz where there is a "
            "network (`python -c 'import keras; keras.datasets.mnist.load_data()'` leaves it in ~/.keras/datasets), or "
            "the four IDX files of MNIST, and give the path of the file or the folder by --data_path."
        ) from error
    return dict(zip(ARRAYS, (x_train, y_train, x_test, y_test), strict=True))


def _from_file(path):
    with np.load(path) as file:
        return {name: file[name] for name in ARRAYS}


def _from_folder(path):
    """The arrays of a folder with the four IDX files; `train-images.idx3-ubyte` is a usual name, too."""
    arrays = {}
    for name, file in IDX.items():
        names = [spelt + end for spelt in (file, file.replace("-idx", ".idx")) for end in ("", ".gz")]
        found = [one for one in names if os.path.isfile(os.path.join(path, one))]
        if not found:
            raise FileNotFoundError(f"there is no {file} or {file}.gz in it")
        arrays[name] = read_idx(os.path.join(path, found[0]))
    return arrays


def read_idx(path):
    """The array of bytes in an IDX file, plain or gzipped: two zero bytes, type 8, rank, sizes, values."""
    with open(path, "rb") as file:
        content = file.read()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(
            f"{os.path.basename(path)} begins with {content[:4].hex()!r}; an IDX file of bytes with 000008"
        )
    values = 4 + 4 * content[3]
    if len(content) < values:
        raise ValueError(f"{os.path.basename(path)} ends within its first {values} bytes")
    shape = np.frombuffer(content[4:values], ">u4").astype(int)
    if len(content) - values != shape.prod():
        raise ValueError(f"{os.path.basename(path)} says shape {shape.tolist()} and has {len(content) - values} values")
    return np.frombuffer(content, np.uint8, offset=values).reshape(shape)


def sequences(images, config):
    """[count, time, pixels] float32 in [0, 1] of images [count, 28, 28] of bytes."""
    side = SIDE // config.pool
    means = images.reshape(-1, side, config.pool, side, config.pool).mean(axis=(2, 4), dtype=np.float32) / 255
    flat = means.reshape(len(images), side * side)
    if config.permuted:
        flat = flat[:, np.random.default_rng(0).permutation(side * side)]
    return flat.reshape(len(images), -1, config.pixels)


def shuffled(count, seed):
    """Numbers of examples without an end: each once per pass, every pass in a new order, and no state but a place."""

    def number(place):
        return tf.random.experimental.index_shuffle(place % count, [seed, place // count], max_index=count - 1)

    return tf.data.Dataset.counter().map(number)


def data(config, arrays):
    """(endless batches, held-out batches): sequences and digits."""
    inputs, digits = tf.constant(sequences(arrays["x_train"], config)), tf.constant(arrays["y_train"], tf.int32)
    numbers = shuffled(len(inputs), config.seed).batch(config.batch_size, drop_remainder=True)
    train = numbers.map(lambda chosen: (tf.gather(inputs, chosen), tf.gather(digits, chosen)))
    test = sequences(arrays["x_test"], config), arrays["y_test"].astype(np.int32)
    return train.prefetch(2), tf.data.Dataset.from_tensor_slices(test).batch(500)


def build(config):
    arrays = load(config.data_path)
    dataset, held_out = data(config, arrays)
    inputs = keras.Input(dataset.element_spec[0].shape[1:])
    state = LoopRNN(CELLS[config.cell](config.units), name=config.cell)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(10, name="digit")(state))
    trainer = Trainer(
        model,
        launch.optimizer(config),
        {"cross_entropy": sparse_categorical_cross_entropy},
        metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy()},
        **launch.trainer_options(config),
    )
    often = np.bincount(arrays["y_test"]).max() / len(arrays["y_test"])
    goal = launch.Goal("accuracy", above=0.985, baseline=often, baseline_name="always the most frequent digit")
    return launch.Experiment(trainer, dataset, held_out, goals=(goal,))


if __name__ == "__main__":
    launch.main(Config, build)
