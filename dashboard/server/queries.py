"""Reading a request's query. What is wrong raises InvalidArgumentError, which TensorBoard answers as 400."""

from tensorboard import errors


def text(request, name):
    value = request.args.get(name)
    if not value:
        raise errors.InvalidArgumentError(f"The query lacks `{name}`. It needs `run` and `tag`.")
    return value


def choice(request, name, choices):
    """Returns one of `choices`; the first where the query does not say."""
    value = request.args.get(name, choices[0])
    if value not in choices:
        raise errors.InvalidArgumentError(f"`{name}` is {value!r}; it must be one of {list(choices)}.")
    return value


def integer(request, name, lowest, highest, default=None):
    """Returns a whole number; without a `default` it must be given."""
    given = request.args.get(name)
    if given is None and default is not None:
        return default
    try:
        value = int(given)
    except (TypeError, ValueError):
        value = None
    if value is None or not lowest <= value <= highest:
        raise errors.InvalidArgumentError(
            f"`{name}` is {given!r}; it must be a whole number from {lowest} to {highest}."
        )
    return value
