"""Several sets of data to evaluate on, by name."""

from looptape.trainer.data.adapters import is_array

_BATCH_KEYS = ({"inputs", "targets"}, {"x", "y"})


def named_sets(data):
    """{name: data} where `data` names several sets; None where it is one.

    A dict of arrays, or one with the keys of a batch (`inputs` and `targets`, `x` and `y`), is one set.
    """
    if not isinstance(data, dict) or any(keys <= set(data) for keys in _BATCH_KEYS):
        return None
    if any(map(is_array, data.values())):
        return None
    if not data:
        raise ValueError("The dict of datasets to evaluate on is empty. Name at least one, as {'clean': dataset}.")
    strange = [name for name in data if not isinstance(name, str) or not name]
    if strange:
        raise TypeError(f"A dataset to evaluate on is named {strange[0]!r}; names must be non-empty strings.")
    return data


def evaluate_sets(sets, evaluate):
    """({result: number}, {result: tag}) of all sets: `<set>_<result>`, and as `loss` that of the first set.

    Args:
        sets: {name: data}.
        evaluate: function of data that returns ({result: number}, {result: tag}).
    """
    results, tags, first = {}, {}, None
    for name, data in sets.items():
        found, own_tags = evaluate(data)
        first = found["loss"] if first is None else first
        for result, value in found.items():
            key = f"{name}_{result}"
            if key in results:
                raise ValueError(
                    f"Two evaluation sets have a result named {key!r}; one would hide the other. Rename the set "
                    f"{name!r}."
                )
            results[key], tags[key] = value, f"{name}/{own_tags[result]}"
    return {"loss": first, **results}, {"loss": "loss/sum", **tags}
