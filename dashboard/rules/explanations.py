"""Why a verdict is given and what to do, for each word: the page behind the tab's links, and the end of the report."""

import html
import re

from looptape.dashboard.rules.findings import ADVICE, CELL_ADVICE, WORDS

WHY = {
    "no update": "A loss or a gradient of every update was not finite, so that none of them was applied: the weights "
    "are the initial ones. The learning rate is not the cause.",
    "NaN/Inf": "A loss or a gradient was not a finite number. From then on a weight that takes it is lost; "
    "the trainer skips such updates. Common causes: a learning rate that is too high, a logarithm or a "
    "division near 0, bad examples.",
    "no gradient": "The gradient of this layer was exactly 0 in the later half of the rows: no loss depends "
    "on it, something stops the gradient on its way, or all units before it are off.",
    "exploding": "Each time step back multiplies the gradient by more than 1, at least a hundred times over "
    "the sequence. Clipping keeps the update small, but its direction is that of the first time steps alone.",
    "vanishing": "Each time step back multiplies the gradient by less than 1. After a tenth of the sequence "
    "less than 1 % of it is left, so the loss cannot teach the layer anything about earlier time steps: it "
    "forgets, whatever the learning rate.",
    "not learning": "The updates of this layer are at least a hundred times smaller, by its own size, than "
    "those of the other layers, or too small for float32.",
    "too large": "Each update changes more than a tenth of the layer's weights: what was learned before is "
    "overwritten.",
    "dead units": "At least half of the units put out 0 for every example. No gradient passes through them, "
    "so most of them stay off.",
    "conflict": "In more than half of the probed updates the gradients of two losses point apart: a step that "
    "lowers one of them raises the other.",
    "spikes": "The loss or the gradient norm of some updates was far above its recent median.",
    "short": "At least 1 % of the gradient reaches no more than half of the time steps. That is enough for a "
    "task whose answer depends on recent time steps only. A gated cell (LSTM, GRU) that reaches even fewer is called "
    "short, too, in the first 1,000 updates and while its loss falls: its gates may still open.",
    "opening": "The horizon is short but grows: gated cells open their gates during training. Wait.",
    "one-sided": "One loss carries less than 5 % of the gradient in the first half of the time steps: what the layer "
    "does there is decided by the others. That is right if this loss is about the last time steps only.",
    "noisy": "The gradient noise scale is more than ten times the batch: most of each update is chance.",
    "not probed": "The layer is recurrent, and the gradient of its time steps was not logged. Whether the loss reaches "
    "early time steps cannot be seen in its weights: they learn from the last time steps alone, too.",
    "too early": "Fewer than three rows, or fewer than 100 updates. Gated cells look as if they forget until "
    "they open.",
    "healthy": "None of the rules applies.",
}
ABOUT_MEMORY = ("vanishing", "short")
GUIDES = "More: `looptape docs`, the guides “Is my RNN forgetting?”, “The health of every layer” and “Debugging”."


def anchor(word):
    """The identifier of a word's section.

    >>> anchor("NaN/Inf"), anchor("not learning")
    ('why-nan-inf', 'why-not-learning')
    """
    return "why-" + re.sub(r"[^a-z]+", "-", word.lower())


def sections(words=tuple(WORDS), heading="h3"):
    """HTML with a section for each of the words, in the order of `WORDS`; `heading` is the element of the titles."""
    parts = []
    for word in WORDS:
        if word in words:
            advice = [ADVICE[word]] if word in ADVICE else []
            if word in ABOUT_MEMORY:
                advice += [f"{name}: {text}." for name, text in _by_cell().items()]
            tried = "".join(f"<li>{html.escape(text[0].upper() + text[1:])}</li>" for text in advice)
            parts.append(
                f"<section id='{anchor(word)}'><{heading}>{html.escape(word)}</{heading}>"
                f"<p>{html.escape(WHY[word])}</p>"
                + (f"<p>What to try:</p><ul>{tried}</ul>" if tried else "")
                + "</section>"
            )
    return "\n".join([*parts, f"<p>{html.escape(GUIDES)}</p>"])


def page():
    """A whole HTML page about all words."""
    style = (
        "body { font: 15px/1.5 system-ui, sans-serif; max-width: 720px; margin: 24px auto; padding: 0 16px; } "
        ":root { color-scheme: light dark; } section:target h2 { text-decoration: underline; }"
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Verdicts: why, and what to do</title>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'><style>{style}</style></head><body><main>"
        f"<h1>Verdicts: why, and what to do</h1>\n{sections(heading='h2')}</main></body></html>\n"
    )


def _by_cell():
    return {"An LSTM": CELL_ADVICE["lstm"], "A GRU": CELL_ADVICE["gru"], "A plain RNN": CELL_ADVICE["rnn"]}
