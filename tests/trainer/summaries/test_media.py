"""Histograms, pictures, sounds and texts from inside a step: in the rows that are logged, and of the right update."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.summaries import media
from tests.trainer.tools import assert_identical_weights, linear_model, read_events

# The batch of the update that ends at step s holds the number s.
DATA = tf.data.Dataset.range(1, 1000).map(lambda step: tf.cast(tf.fill([4, 3], step), tf.float32))


class Watched(Trainer):
    watching = True

    def compute_losses(self, batch, training):
        outputs = self.model(batch, training=training)
        if self.watching:
            self.log_histogram("inputs", tf.concat([batch, [[0.0, np.nan, np.inf]]], axis=0))
            self.log_image("picture", tf.reshape(batch[:2] / 1000, [2, 1, 3, 1]))
            sounds = tf.stack([tf.range(4.0) / 8, tf.fill([4], batch[0, 0] / 1000)], axis=1)
            self.log_audio("sound", tf.stack([sounds, 9 * sounds, -sounds]), sample_rate=8000, limit=2)
            self.log_text("note", tf.strings.format("step {}", tf.cast(batch[0, 0], tf.int32)))
        return {"error": tf.square(outputs[:, 0] - 0.001 * batch[:, 0])}


def made(**options):
    return Watched(linear_model(), keras.optimizers.SGD(1e-7), **options)


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"accumulation_steps": 2}], ids=str)
def test_each_row_has_what_its_own_update_saw(options, tmp_path):
    made(**options).fit(DATA, steps=7, log_every=3, workdir=tmp_path, progress=False)
    rows = {}
    for step, values in read_events(tmp_path / "train"):
        rows.setdefault(step, {}).update(values)
    assert [step for step in rows if "note" in rows[step]] == [3, 6, 7]
    for step in (3, 6, 7):
        seen = step * options.get("accumulation_steps", 1)  # the last micro-batch
        assert rows[step]["note"].item() == f"step {seen}".encode()
        # NumPy's histogram of the twelve numbers and a zero.
        found = rows[step]["inputs"]
        counts, edges = np.histogram([0.0] + [seen] * 12, bins=30, range=(0, seen))
        np.testing.assert_array_equal(found[:, 2], counts)
        np.testing.assert_allclose(found[:, :2], np.stack([edges[:-1], edges[1:]], axis=1), rtol=1e-5)
        for index in range(2):
            picture = tf.io.decode_png(rows[step][f"picture/{index}"][2]).numpy()
            sound, rate = tf.audio.decode_wav(rows[step][f"sound/{index}"][0, 0])
            expected = [[number / 8, seen / 1000] for number in range(4)]
            np.testing.assert_allclose(sound, np.clip(np.multiply(expected, [1, 9][index]), -1, 1), atol=1e-4)
            assert int(rate) == 8000
            assert picture.shape == (1, 3, 1) and (picture == round(255 * seen / 1000)).all()


def test_training_is_the_same_and_traced_once():
    trainers = [made(), made()]
    trainers[1].watching = False
    for trainer in trainers:
        trainer.fit(DATA, steps=6, log_every=2, progress=False)
    assert_identical_weights(*(trainer.model for trainer in trainers))
    assert trainers[0]._engine.calls.traces == trainers[1]._engine.calls.traces


def test_the_traced_function_calls_no_host():
    trainer = made()
    trainer.fit(DATA, steps=2, log_every=2, progress=False)
    graph = trainer._engine.calls._graph.as_graph_def()
    found = {node.op for node in [*graph.node, *(n for f in graph.library.function for n in f.node_def)]}
    assert "EncodeWav" not in found and not any("PyFunc" in op for op in found) and "HistogramFixedWidth" in found


def test_the_audio_tab_of_tensorboard_reads_a_sound(tmp_path):
    """By TensorBoard's own plugin."""
    made().fit(DATA, steps=2, log_every=2, workdir=tmp_path, progress=False)
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.audio import audio_plugin

    runs = plugin_event_multiplexer.EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    runs.Reload()
    provider = data_provider.MultiplexerDataProvider(runs, str(tmp_path))
    tab = audio_plugin.AudioPlugin(base_plugin.TBContext(logdir=str(tmp_path), data_provider=provider))
    index = tab._index_impl(RequestContext(), experiment="")
    assert set(index["train"]) == {"sound/0", "sound/1"}
    [entry] = tab._audio_response_for_run(RequestContext(), "", "train", "sound/0", 0)
    assert entry["step"] == 2 and entry["contentType"] == "audio/wav"


def test_where_nothing_can_be_logged_a_warning_says_so():
    class Compiled(Trainer):
        def compute_losses(self, batch, training):
            self.log_histogram("inputs", batch)
            self.log_image("picture", batch[..., tf.newaxis])
            return {"error": tf.square(self.model(batch)[:, 0])}

    with pytest.warns(UserWarning, match="The histogram 'inputs' is not logged: `jit_compile` is set") as caught:
        Compiled(linear_model(), "sgd", jit_compile=True).fit(DATA, steps=2, progress=False)
    assert len([each for each in caught if "is not logged" in str(each.message)]) == 1


def test_edges_of_histograms():
    assert media.buckets(tf.constant([np.nan, np.inf])).shape == (0, 3)
    same = media.buckets(tf.fill([5], 2.0)).numpy()
    assert same[:, 2].sum() == 5 and (same[:, 1] > same[:, 0]).all()
    assert media.buckets(tf.constant([[1, 2], [3, 4]])).numpy()[:, 2].sum() == 4
    ragged, sparse = tf.ragged.constant([[1.0, 2.0], [3.0]]), tf.sparse.from_dense([[0.0, 2.0], [3.0, 0.0]])
    assert [media.check_numbers("a", each).numpy().tolist() for each in (ragged, sparse)] == [[1, 2, 3], [2, 3]]


def test_what_cannot_be_logged_is_answered():
    class Wrong(Trainer):
        action = None

        def compute_losses(self, batch, training):
            self.action()
            return {"error": self.model(batch)[:, 0]}

    def several(trainer):
        trainer.log_text("a", "x")
        trainer.log_histogram("a", tf.ones([2]))

    for action, message in (
        (lambda t: t.log_image("a", tf.ones([2, 2])), r"The image 'a' has shape \(2, 2\); it must be \[height"),
        (lambda t: t.log_image("a", None), r"`log_image` of 'a' got None \(NoneType\); it needs pixels as a tensor, "),
        (lambda t: t.log_text("a", 3), r"`log_text` of 'a' got 3 \(int\); it needs a str or a scalar tf.string tensor"),
        (lambda t: t.log_text("a", t.step), "`log_text` of 'a' got .*; it needs a str or a scalar tf.string tensor"),
        (lambda t: t.log_histogram("a", None), "`log_histogram` of 'a' got None .*; it needs a tensor of real numbers"),
        (lambda t: t.log_audio("a", {}, 8000), r"`log_audio` of 'a' got \{\} \(dict\); it needs samples as a tensor"),
        (lambda t: t.log("a", None), r"`log` of 'a' got None \(NoneType\); it needs a number or a tensor of numbers"),
        (lambda t: t.log_text("a", ["x", "y"]), r"The text 'a' has shape \(2,\); it must be one string"),
        (lambda t: t.log_audio("a", tf.ones([4, 1]), 8000.5), "The audio 'a' has sample_rate=8000.5; it must be"),
        (lambda t: t.log_audio("a", tf.ones([4]), 8000), r"The audio 'a' is float32 of shape \(4,\); it must be real"),
        (lambda t: t.log_audio("a", tf.ones([4, 1], tf.int16), 8000), "The audio 'a' is int16 of shape"),
        (lambda t: t.log_histogram("", tf.ones([2])), "`log_histogram` was called with the name ''; it must be a"),
        (lambda t: t.log_text(None, "x"), "`log_text` was called with the name None; it must be a non-empty string"),
        (lambda t: t.log_histogram("a", tf.constant(["x"])), "The histogram 'a' got a tensor of type string"),
        (lambda t: t.log_image("a", tf.ones([2, 2, 1]), limit=0), "`limit` is 0; it must be at least 1"),
        (lambda t: t.log_audio("a", tf.ones([4, 1]), 8000, limit="1"), "`limit` is '1'; it must be an integer of at"),
        (several, "'a' is logged as text and as histogram; a name has one kind"),
    ):
        trainer = Wrong(linear_model(), "sgd")
        trainer.action = lambda trainer=trainer, action=action: action(trainer)
        with pytest.raises((ValueError, TypeError), match=message):
            trainer.fit(DATA, steps=1, progress=False)


LOGGED = {
    "log": lambda trainer: trainer.log("number", 1.0),
    "log_histogram": lambda trainer: trainer.log_histogram("histogram", tf.ones([2])),
    "log_image": lambda trainer: trainer.log_image("image", tf.ones([2, 2, 1])),
    "log_audio": lambda trainer: trainer.log_audio("audio", tf.ones([2, 1]), 8000),
    "log_text": lambda trainer: trainer.log_text("text", "x"),
}


def test_logging_outside_the_hooks_is_an_error_that_names_them():
    class Logging(Trainer):
        def compute_losses(self, batch, training):
            for log in LOGGED.values():
                log(self)
            return {"error": self.model(batch)[:, 0]}

    class Outside(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            LOGGED["log"](trainer)

    trainer = Logging(linear_model(), "sgd")
    for moment in ("before", "after"):
        for method, log in LOGGED.items():
            with pytest.raises(
                RuntimeError, match=rf"^`{method}` was called outside the hooks of Logging; .*Call it in co"
            ):
                log(trainer)
        trainer.compute_losses(next(iter(DATA)), True)  # by hand: nothing to log to, and no error
        if moment == "before":
            trainer.evaluate(DATA, steps=1)
            trainer.fit(DATA, steps=1, progress=False)
    with pytest.raises(RuntimeError, match="`log` was called outside the hooks"):
        trainer.fit(DATA, steps=2, callbacks=[Outside()], progress=False)


def test_a_text_that_is_not_utf_8_does_not_end_the_training(tmp_path):
    class Broken(Trainer):
        def compute_losses(self, batch, training):
            self.log_text("note", b"a\xff")
            return {"error": self.model(batch)[:, 0]}

    Broken(linear_model(), "sgd").fit(DATA, steps=1, workdir=tmp_path, progress=False)
    [values] = [values for _, values in read_events(tmp_path / "train") if "note" in values]
    assert values["note"].item() == "a\ufffd".encode()
