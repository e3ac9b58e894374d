"""`LanguageModel`: predicts the next token, and can carry its state from batch to batch."""

import keras
import tensorflow as tf

from looptape.models.recurrent.loop_rnn import LoopRNN

_CELLS = {"lstm": keras.layers.LSTMCell, "gru": keras.layers.GRUCell, "rnn": keras.layers.SimpleRNNCell}


@keras.saving.register_keras_serializable(package="looptape")
class LanguageModel(keras.Model):
    """Maps tokens [batch, time] to the logits [batch, time, vocabulary] of the next token.

    With `batch_size` the model is stateful: each batch continues where the last one ended (truncated back-propagation
    through time), until `reset_states`. Otherwise every batch starts from a zero state.

    Args:
        vocabulary_size: number of different tokens.
        units: size of each layer's state, or of each part of it.
        layers: number of recurrent layers.
        embedding_size: size of the token embedding; `units` by default.
        cell: "lstm", "gru" or "rnn".
        dropout: dropout rate on the outputs of every recurrent layer.
        batch_size: fixed number of sequences per batch, to carry the state; or None.

    >>> model = LanguageModel(vocabulary_size=10, units=8)
    >>> tuple(model(tf.zeros([2, 5], tf.int32)).shape)
    (2, 5, 10)
    """

    def __init__(
        self,
        vocabulary_size,
        units=128,
        layers=1,
        embedding_size=None,
        cell="lstm",
        dropout=0.0,
        batch_size=None,
        **options,
    ):
        if cell not in _CELLS:
            raise ValueError(f"`cell` is {cell!r}; it must be one of {list(_CELLS)}.")
        tokens = keras.Input((None,), batch_size=batch_size, dtype="int32", name="tokens")
        embedding = keras.layers.Embedding(vocabulary_size, embedding_size or units, name="embedding")
        values, recurrent = embedding(tokens), []
        for index in range(layers):
            cells = _CELLS[cell](units)
            recurrent.append(
                LoopRNN(cells, return_sequences=True, stateful=batch_size is not None, name=f"{cell}_{index}")
            )
            values = recurrent[-1](values)
            if dropout:
                values = keras.layers.Dropout(dropout, name=f"dropout_{index}")(values)
        readout = keras.layers.Dense(vocabulary_size, dtype="float32", name="logits")
        super().__init__(tokens, readout(values), **options)
        self.embedding, self.recurrent, self.readout = embedding, recurrent, readout
        self._arguments = {
            "vocabulary_size": vocabulary_size,
            "units": units,
            "layers": layers,
            "embedding_size": embedding_size,
            "cell": cell,
            "dropout": dropout,
            "batch_size": batch_size,
        }

    def reset_states(self):
        """Sets every carried state to zero. Eager."""
        for layer in self.recurrent:
            if layer.stateful:
                layer.reset_state()

    def sample(self, prompt, length, *, temperature=1.0, seed=0):
        """Continues prompts [batch, prompt time] by `length` tokens [batch, length]. Does not change carried states.

        Args:
            prompt: tokens, at least one per row; any batch size.
            length: number of tokens to add.
            temperature: values below 1 favour likely tokens.
            seed: the same seed gives the same tokens.
        """
        prompt = tf.convert_to_tensor(prompt, tf.int32)
        states = [layer.cell.get_initial_state(batch_size=prompt.shape[0]) for layer in self.recurrent]
        step = tf.function(self._next_logits, reduce_retracing=True)
        for t in range(prompt.shape[1]):
            logits, states = step(prompt[:, t], states)
        tokens = []
        for index in range(length):
            drawn = tf.random.stateless_categorical(logits / temperature, 1, seed=[seed, index], dtype=tf.int32)
            tokens.append(drawn[:, 0])
            logits, states = step(tokens[-1], states)
        return tf.stack(tokens, axis=1)

    def get_config(self):
        return {**self._arguments, "name": self.name}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(**config)

    def _next_logits(self, tokens, states):
        """Runs one step through the cells, because the layers would carry their state."""
        values, after = self.embedding(tokens), []
        for layer, state in zip(self.recurrent, states, strict=True):
            values, state = layer.cell(values, state)
            after.append(state)
        return self.readout(values), after
