"""The gradients of every time step, of each loss by itself, for notebooks and tests."""

from trainer import inspection, probing


def timestep_gradients_by_loss(owner, batch):
    """({loss: {layer: {quantity: [time]}}}, {layer: {loss: [time]}}); see `Trainer.timestep_gradients_by_loss`."""
    names = []

    def look(tape, session, means, examples):
        each = {name: tape.gradient(mean, session.sources) for name, mean in means.items()}
        each = {name: own for name, own in each.items() if any(gradient is not None for gradient in own)}
        names[:] = each
        totals = [session.totals(own, examples) for own in each.values()]
        return totals, probing.shares(session.products(list(each.values())))

    options = {"reports": lambda found: found[0], "persistent": True, "compiled": False, "full": True}
    (totals, shares), shapes = inspection.look_at(owner, batch, look, **options)
    vectors = {name: probing.present(own, shapes).vectors for name, own in zip(names, totals, strict=True)}
    lengths = {layer: next(iter(values.values())).shape[0] for layer, values in vectors[names[0]].items()}
    return vectors, {
        layer: dict(zip(names, own.numpy()[:, : lengths[layer]], strict=True)) for layer, own in shares.items()
    }
