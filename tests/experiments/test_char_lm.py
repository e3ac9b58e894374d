"""The character model: its corpus, its n-grams against a plain loop, its windows, and that it beats a unigram."""

import collections
import os

import numpy as np
import pytest
import tensorflow as tf

from looptape import launch
from looptape.experiments.char_lm import Alphabet, Config, build, data, ngram_bits, rows, standard_library, texts
from looptape.trainer.summaries import event_writer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text in which the next character follows from those before it, but not from one alone."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    random = np.random.default_rng(0)
    words = ["abba", "baab", "cab", "bac", "naïve"]
    path.write_text(" ".join(random.choice(words, 6000)), encoding="utf-8")
    return str(path)


def small(corpus, **options):
    defaults = {
        "batch_size": 8,
        "bptt_window": 16,
        "units": 32,
        "probe_every": 0,
        "jit_compile": False,
        "eval_every": None,
    }
    return Config(corpus=corpus, **{**defaults, **options})


def test_the_standard_library_gives_different_files_in_an_order_of_their_own():
    files = standard_library()
    assert len(files) > 100 and len(set(files)) == len(files) and files == standard_library()
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in files)
    assert files != sorted(files)
    train, held_out = texts(Config(characters=30_000, held_out=5000))
    assert (len(train), len(held_out)) == (30_000, 5000)
    assert held_out[:400] not in train and train.startswith(files[len(files) // 10].read_text()[:100])


def test_a_file_is_split_at_nine_tenths(corpus):
    with open(corpus, encoding="utf-8") as file:
        text = file.read()
    train, held_out = texts(small(corpus))
    assert train + held_out == text and len(held_out) == pytest.approx(0.1 * len(text), abs=1)
    train, held_out = texts(small(corpus, characters=900, held_out=50))
    assert train == text[:900] and len(held_out) == 50


def test_characters_that_are_rare_or_new_share_a_number():
    alphabet = Alphabet("hello, world" + "".join(map(chr, range(1000, 1200))) + "hello")
    assert len(alphabet.characters) == 129 and len(set(alphabet.characters)) == 129
    assert alphabet.decode(alphabet.encode("hello\u4e00")) == "hello\N{REPLACEMENT CHARACTER}"
    twice = Alphabet("a\N{REPLACEMENT CHARACTER}")
    assert twice.characters == "\N{REPLACEMENT CHARACTER}a"


def plain_bits(train, held_out, order, size):
    """The same by dictionaries, character by character; and whether the probabilities sum to 1."""
    followers = collections.defaultdict(collections.Counter)
    for length in range(order):
        for end in range(length, len(train)):
            followers[tuple(train[end - length : end])][train[end]] += 1

    def probability(history, character):
        below = 1 / size if not history else probability(history[1:], character)
        seen = followers.get(history, {})
        n, d = sum(seen.values()), len(seen)
        return (seen.get(character, 0) + d * below) / (n + d) if n else below

    total = 0.0
    for end in range(len(held_out)):
        history = tuple(held_out[max(0, end - order + 1) : end])
        total -= np.log2(probability(history, held_out[end]))
        assert sum(probability(history, character) for character in range(size)) == pytest.approx(1.0)
    return total / len(held_out)


@pytest.mark.parametrize("order", [1, 2, 5])
def test_ngrams_against_dictionaries(order):
    random = np.random.default_rng(3)
    train, held_out = (np.repeat(random.integers(0, 6, count), 2) for count in (150, 40))
    train[train == 5] = 0  # one character that is never seen
    assert ngram_bits(train, held_out, order, 6) == pytest.approx(plain_bits(train, held_out, order, 6), rel=1e-9)


def test_rows_go_on_from_batch_to_batch_around_the_text():
    numbers = tf.range(20, dtype=tf.int32)
    found = [[], []]
    for index in range(6):
        inputs, targets = rows(numbers, 2, 4, tf.constant(index, tf.int64))
        np.testing.assert_array_equal((inputs + 1) % 20, targets)
        for row, part in zip(found, inputs.numpy(), strict=True):
            row.extend(part)
    assert found == [[(start + place) % 20 for place in range(24)] for start in (0, 10)]


def test_the_held_out_text_is_evaluated_once_and_in_order(corpus):
    config = small(corpus, batch_size=3, bptt_window=5)
    held_out = np.arange(40, dtype=np.int32)
    _, batches = data(config, np.arange(100, dtype=np.int32), held_out)
    inputs, targets = (np.concatenate(parts, axis=1) for parts in zip(*batches.as_numpy_iterator(), strict=True))
    np.testing.assert_array_equal(inputs, np.arange(39).reshape(3, 13))
    np.testing.assert_array_equal(targets, inputs + 1)


def test_an_untrained_model_that_prefers_nothing_needs_the_logarithm_of_the_alphabet(corpus):
    experiment = build(small(corpus))
    readout = experiment.trainer.model.readout
    for weight in readout.weights:
        weight.assign(tf.zeros_like(weight))
    assert experiment.trainer.evaluate(experiment.eval_dataset)["bits"] == pytest.approx(np.log2(9), rel=1e-5)


def test_it_beats_the_unigram_carries_its_state_and_shows_samples(corpus, tmp_path):
    config = small(corpus, steps=150, learning_rate=0.01, probe_every=75, workdir=str(tmp_path), prompt="ab")
    made = []
    results = launch.run(config, lambda config: made.append(build(config)) or made[0], show=False)
    train, held_out = texts(config)
    alphabet = Alphabet(train)
    train, held_out = alphabet.encode(train), alphabet.encode(held_out)
    shares = np.bincount(train, minlength=9) / len(train)
    unigram = -np.log2(shares[held_out]).mean()
    assert results["bits"] < 0.6 * unigram
    goal = made[0].goals[0]
    assert goal.baseline_name.startswith(f"unigram: {unigram:.3g}") and 0.8 * unigram > goal.baseline
    # The same text by NumPy's hand: one pass over each row from a zero state, without windows.
    rows = (len(held_out) - 1) // 8
    inputs, targets = held_out[: 8 * rows].reshape(8, rows), held_out[1 : 8 * rows + 1].reshape(8, rows)
    model = made[0].trainer.model
    model.reset_states()
    logits = model(inputs).numpy().astype(np.float64)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    whole = -np.take_along_axis(logits, targets[..., None], axis=-1).mean() / np.log(2)
    assert results["bits"] == pytest.approx(whole, rel=1e-3)
    (shown,) = [value for _, value in event_writer.read(os.path.join(tmp_path, "shown")) if value.tag == "sample"]
    sample = shown.tensor.string_val[0].decode()
    assert sample.startswith("    ab") and len(sample) > 500 and set(sample) <= set(" \nabcnïve")
    cut_off = [
        (step, value.tensor.float_val[0])
        for step, value in event_writer.read(os.path.join(tmp_path, "train"))
        if value.tag == "timestep/lstm_0/cut_off"
    ]
    assert [step for step, _ in cut_off] == [1, 2, 5, 10, 20, 75, 150] and all(value > 0 for _, value in cut_off)


def test_a_corpus_that_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(launch.Refused, match="`corpus` is .*none.txt.*No such file or directory. Give the path"):
        build(small(str(tmp_path / "none.txt")))
    with pytest.raises(launch.Refused, match="cannot be read: Is a directory"):
        build(small(str(tmp_path)))
    for text, count in (("", 0), ("short", 4)):
        (tmp_path / "text").write_text(text)
        with pytest.raises(launch.Refused, match=f"text has {count} characters to train on.*8 × 16 need at least 128"):
            build(small(str(tmp_path / "text")))
