"""The health of one update, as far as micro-batches add it up: layers' outputs, parts of the noise. Traced."""

import tensorflow as tf

from looptape.trainer.health import layer_outputs, noise_scale


def open_outputs(owner, tape):
    """A `LayerOutputs` to be entered for the forward pass; it watches nothing where nothing was asked for."""
    wanted = owner.health_parts
    return layer_outputs.LayerOutputs(owner.model, tape, "positions" in wanted, "activations" in wanted)


def measure(layers, groups, examples, loss_gradients, noisy):
    """{"layers": totals, "noise": `Parts` if `noisy`} of one micro-batch.

    Args:
        layers: see `LayerOutputs.totals`.
        groups: [groups][variables], of Σ w·l; dense if `noisy`.
        examples: of this micro-batch.
        loss_gradients: [losses][variables] of a probed update, or [].
        noisy: whether the update has several parts, from which noise can be told.
    """
    noise = {"noise": noise_scale.part(groups, examples, loss_gradients)} if noisy else {}
    return {"layers": layers, **noise}


def add(first, second):
    """Two micro-batches together."""
    added = {"layers": layer_outputs.add(first["layers"], second["layers"])}
    if "noise" in second:
        added["noise"] = tf.nest.map_structure(tf.add, first["noise"], second["noise"])
    return added
