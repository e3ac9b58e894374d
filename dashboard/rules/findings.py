"""A finding: one sentence about a layer or a run, with a word for the coloured dot and advice. Pure Python."""

import dataclasses
import math

# From bad to good. Tones: what the coloured dot beside the word says.
WORDS = {
    "no update": "bad",
    "NaN/Inf": "bad",
    "no gradient": "bad",
    "exploding": "bad",
    "vanishing": "bad",
    "not learning": "bad",
    "too large": "warn",
    "dead units": "warn",
    "conflict": "warn",
    "spikes": "warn",
    "short": "warn",
    "opening": "warn",
    "one-sided": "none",
    "noisy": "none",
    "not probed": "none",
    "too early": "none",
    "healthy": "good",
}
ADVICE = {
    "no update": "look for NaN in the data, and in the losses for a logarithm or a division near 0; "
    "`on_nonfinite = 'raise'` names the layer and the operation where it begins.",
    "NaN/Inf": "lower the learning rate or set `clip_norm`; look at the first row with NaN or Inf.",
    "no gradient": "check that the loss depends on this layer and that nothing stops the gradient on the way, such as "
    "units that are all off (`health='activations'` shows them).",
    "exploding": "set `clip_norm`, scale the recurrent weights down, or use a gated cell.",
    "vanishing": "use a gated cell, or open the gates of this one; or shorten the way with attention.",
    "short": "use a gated cell, or open the gates of this one, if the task needs longer memory.",
    "not learning": "if its gradient is small, too, add a skip connection or normalise before the layer; else raise "
    "its learning rate (`optimizer={pattern: optimizer}`), or freeze it on purpose.",
    "too large": "lower the learning rate, warm it up, or set `clip_norm`.",
    "dead units": "lower the learning rate, use another activation such as GELU, or a smaller initial scale.",
    "conflict": "use a combiner that resolves conflicts, such as losses.PCGrad(), or fewer shared layers.",
    "one-sided": "if the task needs more of it, raise its weight (`loss_weights`) or use a combiner that balances.",
    "noisy": "use a larger batch or more `accumulation_steps`, or a smaller learning rate.",
    "not probed": "set `probe_every`, e.g. to 50.",
    "spikes": "set `clip_norm`, look at the data of these steps, or set `on_spike` to 'skip'.",
}
# What helps against forgetting depends on the cell. Keys are parts of the names of cell classes, in lower case.
_BIAS = "about log T for T time steps"
_LSTM = f"give the forget gate a bias of {_BIAS} (chrono initialisation; Keras begins with 1), or try a GRU"
_GATED = f"give the update gate a bias of {_BIAS}, so that it keeps the state"
_PLAIN = "use a gated cell (GRU, LSTM) or an orthogonal recurrent matrix"
CELL_ADVICE = {"lstm": _LSTM, "gru": _GATED, "gated": _GATED, "rnn": _PLAIN}
_GATES = ("lstm", "gru", "gated")
OPEN_BY = 1000  # updates: the gates of the cells that we watched had opened by then, if they did (the last at 650)
UNCUT = "set a longer `bptt_window`, or leave out the action that cuts, if the task needs longer memory."
AFTER_CELL = {"vanishing": ", or shorten the way with attention.", "short": ", if the task needs longer memory."}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One sentence about one layer, or about the whole run where `layer` is None."""

    text: str
    layer: str | None
    # The horizon in time steps; growth if exploding; bad rows if NaN/Inf; rows if too early; where the word is about
    # them: the update-to-weight ratio, the share of dead units or of conflicting updates, the noise scale.
    value: float
    word: str  # one of `WORDS`
    advice: str = ""
    source: str = ""  # "state" or "gain": what the horizon was taken from
    time: int = 0  # number of time steps
    steps: tuple = ()  # training steps of `horizons`
    horizons: tuple = ()  # the horizon of each row; None where it is not defined

    @property
    def tone(self):
        return WORDS[self.word]


def finding(text, layer, value, word, *, advise=True, **details):
    """A `Finding` with the advice that belongs to its word."""
    return Finding(text, layer, float(value), word, ADVICE.get(word, "") if advise else "", **details)


def memory_advice(word, cell_class, time):
    """What could help a layer of this cell class that forgets over so many time steps; "" if a word is not about that.

    >>> memory_advice("short", "GRUCell", 100)[:72]
    'give the update gate a bias of about 4.6, the logarithm of 100 time step'
    """
    for part, advice in CELL_ADVICE.items():
        if part in cell_class.lower() and word in AFTER_CELL:
            size = f"about {math.log(max(time, 2)):.1f}, the logarithm of {time} time steps"
            return advice.replace(_BIAS, size) + AFTER_CELL[word]
    return ADVICE.get(word, "")


def softened(found, cell_class, step, falling):
    """The finding, or a milder one about a gated cell that forgets but whose gates may still open.

    Args:
        found: the finding.
        cell_class: name of the class of the layer's cell.
        step: the training step of the last row.
        falling: whether the loss falls.
    """
    gated = any(part in cell_class.lower() for part in _GATES)
    if not gated or found.word not in AFTER_CELL or not (falling or step < OPEN_BY):
        return found
    return dataclasses.replace(found, word="short", text=f"{found.text} Its gates may still open.")


def worst_first(findings):
    order = list(WORDS)
    return sorted(findings, key=lambda one: order.index(one.word))


def as_json(found):
    """Returns a finding as plain JSON data, with its tone, its rank (0 is the worst word) and the horizon it names."""
    extra = {"tone": found.tone, "rank": list(WORDS).index(found.word), "horizon": horizon(found)}
    return {**dataclasses.asdict(found), **extra}


def horizon(found):
    """The horizon that a finding is about: that of its sentence, else that of its last row; None if there is none."""
    if found.time and found.word in ("vanishing", "short", "opening", "healthy"):
        return float(f"{found.value:.0f}")  # rounded as in its sentence
    return next((value for value in reversed(found.horizons) if value is not None), None)
