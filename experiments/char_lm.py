"""A character model of Python source, by truncated back-propagation with a carried state.

    looptape run char_lm --workdir=runs/char
    looptape run char_lm --workdir=runs/novel --corpus=novel.txt --prompt="It was "

The corpus is the source of the Python standard library that runs this program: two million characters for training,
and other files for evaluation. Each row of a batch continues where it ended in the previous batch (`bptt_begins` is
"never"); the trainer cuts the batches into windows, makes one update for each (`bptt_updates`), carries the state, and
ends the gradient at the start of the window. `timestep/lstm_0/cut_off` in TensorBoard shows the loss there: the
gradient that would have continued into the previous window. At the end of training it was 0.048, two thirds of the
0.072 that the Gradient Flow tab shows at the first time step of the window. `trainer.window_advice` names a window that
keeps more.

The experiment also computes baselines on the same text: a unigram and a 5-gram model (interpolated by Witten and Bell).
Samples are in the run `shown`, under Text.

Expect less than 2 `bits` per held-out character in about five minutes on two CPU cores: it reached 1.973, 1.998 and
1.957 with seeds 0 to 2 on the library of Python 3.11, where the unigram has 4.39 and the 5-gram 2.06. Other versions of
Python have another text.
"""

import collections
import dataclasses
import hashlib
import math
import pathlib
import sysconfig

import numpy as np
import tensorflow as tf

from looptape import Trainer, launch
from looptape.experiments.records import media
from looptape.losses import sparse_categorical_cross_entropy
from looptape.models import LanguageModel

OTHER = "\N{REPLACEMENT CHARACTER}"  # stands for all characters that are not among the most common ones
CHARACTERS = 128  # the most common ones
ORDER = 5  # of the n-grams
WINDOWS = 16  # to a batch, which the trainer cuts


@dataclasses.dataclass(frozen=True)
class Config(launch.Config):
    steps: int = 4000
    batch_size: int = 16
    learning_rate: float = 5e-3
    learning_rate_schedule: str = "cosine"
    warmup_steps: int = 50
    clip_norm: float | None = 1.0
    jit_compile: bool = True
    log_every: int = 50
    eval_every: int | None = 500
    checkpoint_every: int | None = 500
    probe_every: int = 100

    corpus: str | None = launch.option(None, "text file; by default the source of the Python standard library")
    characters: int = launch.option(2_000_000, "largest number of characters to train on", least=1)
    held_out: int = launch.option(200_000, "largest number of characters of other files to evaluate on", least=1)
    bptt_window: int | None = launch.option(
        64, "time steps of a window; the gradient ends at its start, the state continues", least=1
    )
    cell: str = launch.option("lstm", "the recurrent cell", choices=("lstm", "gru", "rnn"))
    units: int = launch.option(128, "size of each layer's state", least=1)
    layers: int = launch.option(1, "recurrent layers", least=1)
    prompt: str = launch.option("def ", "beginning of the samples in TensorBoard", resume="accept")
    temperature: float = launch.option(
        0.7, "temperature of the samples; below 1 favours likely characters", above=0, resume="accept"
    )


def standard_library():
    """[paths] of the standard library's modules on this machine, tests left out, in an order that only names decide."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = {path.relative_to(root) for path in root.rglob("*.py")}
    names = [name for name in names if not left_out & set(name.parts)]
    return [root / name for name in sorted(names, key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())]


def joined(paths, limit):
    """The first `limit` characters of all files one after the other."""
    parts, count = [], 0
    for path in paths:
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        count += len(parts[-1])
        if count >= limit:
            break
    return "".join(parts)[: int(min(limit, count))]


def texts(config):
    """(text to train on, held-out text): different files of the standard library, or the end of the file given."""
    if config.corpus is None:
        files = standard_library()
        count = len(files) // 10
        train, held_out = joined(files[count:], config.characters), joined(files[:count], config.held_out)
    else:
        try:
            text = joined([pathlib.Path(config.corpus)], math.inf)
        except OSError as error:
            raise launch.Refused(
                f"`corpus` is {config.corpus!r}, which cannot be read: {error.strerror}. Give the path of a text file, "
                "or leave it out for the Python standard library's source."
            ) from error
        end = len(text) * 9 // 10
        train, held_out = text[:end][: config.characters], text[end:][: config.held_out]
    least = config.batch_size * config.bptt_window
    if len(train) < least or len(held_out) <= config.batch_size:
        raise launch.Refused(
            f"{config.corpus or 'The standard library here'} has {len(train):,} characters to train on and "
            f"{len(held_out):,} held out; batches of {config.batch_size} × {config.bptt_window} need at least "
            f"{least:,} and {config.batch_size + 1:,}. Give a longer text by --corpus, or smaller --batch_size and "
            "--bptt_window."
        )
    return train, held_out


class Alphabet:
    """Characters as numbers: the most common ones of a text, and 0 for all others."""

    def __init__(self, text):
        counted = collections.Counter(text.replace(OTHER, "")).most_common(CHARACTERS)
        self.characters = OTHER + "".join(sorted(character for character, _ in counted))
        self._numbers = {character: number for number, character in enumerate(self.characters)}

    def encode(self, text):
        return np.array([self._numbers.get(character, 0) for character in text], np.int32)

    def decode(self, numbers):
        return "".join(self.characters[number] for number in numbers)


def ngram_bits(train, held_out, order, size):
    """Bits per character of the held-out numbers under an n-gram model of the others.

    Interpolated by Witten and Bell: p(c | h) = (n(hc) + d(h) p(c | h')) / (n(h) + d(h)), where n counts, d(h) is how
    many different characters follow h, and h' is h without its first character; under the unigram all are equal.
    """
    probability = np.full(len(held_out), 1.0 / size)
    for length in range(order):  # of the history h
        grams, counts = np.unique(_grams(train, length + 1, size), return_counts=True)
        histories, first = np.unique(grams // size, return_index=True)
        followed, different = np.add.reduceat(counts, first), np.diff(np.append(first, len(grams)))
        asked = _grams(held_out, length + 1, size)
        n_gram = _lookup(asked, grams, counts)
        n, d = (_lookup(asked // size, histories, values) for values in (followed, different))
        # Where the history was never seen the shorter one decides; the first characters have no longer history.
        known = np.where(n > 0, (n_gram + d * probability[length:]) / np.maximum(n + d, 1), probability[length:])
        probability = np.concatenate([probability[:length], known])
    return -np.log2(probability).mean()


def _grams(numbers, length, size):
    """Each run of `length` numbers as one; the last one is its remainder by `size`."""
    grams = np.zeros(len(numbers) - length + 1, np.int64)
    for place in range(length):
        grams = grams * size + numbers[place : place + len(grams)]
    return grams


def _lookup(keys, known, values):
    """The values of keys, 0 for those that are not known; `known` is sorted."""
    index = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[index] == keys, values[index], 0)


def rows(numbers, batch_size, time, index):
    """(inputs, targets) [batch, time]: every row continues that of `index` − 1, in a text without an end."""
    total = numbers.shape[0]
    begin = tf.range(batch_size, dtype=tf.int64) * (total // batch_size) + index * time
    found = tf.gather(numbers, (begin[:, None] + tf.range(time + 1, dtype=tf.int64)) % total)
    return found[:, :-1], found[:, 1:]


def data(config, train, held_out):
    """(endless batches, held-out batches). Each row of a batch is the text after that of the batch before."""
    numbers, time = tf.constant(train), WINDOWS * config.bptt_window
    dataset = tf.data.Dataset.counter().map(lambda i: rows(numbers, config.batch_size, time, i))
    length = (len(held_out) - 1) // config.batch_size
    parts = [held_out[: config.batch_size * length], held_out[1 : config.batch_size * length + 1]]
    inputs, targets = (row.reshape(config.batch_size, length).T for row in parts)
    # Batched over time, so that the last window may be shorter.
    evaluated = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(config.bptt_window)
    return dataset.prefetch(2), evaluated.map(lambda *parts: tuple(map(tf.transpose, parts)))


def bits(targets, outputs):
    """Cross-entropy to the base of 2, [batch, time]."""
    return sparse_categorical_cross_entropy(targets, outputs) / math.log(2)


def build(config):
    train, held_out = texts(config)
    alphabet = Alphabet(train)
    train, held_out = alphabet.encode(train), alphabet.encode(held_out)
    size = len(alphabet.characters)
    model = LanguageModel(size, config.units, config.layers, cell=config.cell, batch_size=config.batch_size)
    options = {**launch.trainer_options(config), "bptt_updates": True, "bptt_begins": "never"}
    trainer = Trainer(model, launch.optimizer(config), {"bits": bits}, **options)
    dataset, evaluated = data(config, train, held_out)

    def sample():
        prompt = alphabet.encode(config.prompt)[None]
        return media.code(config.prompt + alphabet.decode(model.sample(prompt, 500, temperature=config.temperature)[0]))

    unigram, ngram = (ngram_bits(train, held_out, order, size) for order in (1, ORDER))
    goal = launch.Goal("bits", below=2.0, baseline=ngram, baseline_name=f"unigram: {unigram:.4g}, {ORDER}-gram")
    shown = media.Show(trainer, config.workdir, {"sample": sample})
    return launch.Experiment(trainer, dataset, evaluated, goals=(goal,), callbacks=(shown,))


if __name__ == "__main__":
    launch.main(Config, build)
