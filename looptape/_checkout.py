"""Short names in the checkout: `import trainer` there gives `looptape.trainer` itself, never a second copy.

The repository keeps `trainer/`, `losses/`, `models/`, `experiments/` and `dashboard/` at its top, where Python also
finds them by their short names. Each of these packages calls `one_package(__name__)` in its `__init__`.
"""

import importlib
import importlib.util
import sys

_PREFIX = "looptape."


def one_package(name):
    """Makes the short name of a package, and of everything below it, an alias of the long one."""
    if name.startswith(_PREFIX):
        return
    sys.modules[name] = importlib.import_module(_PREFIX + name)
    if not any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Aliases())


class _Aliases:
    """Finds `trainer.x` as `looptape.trainer.x`, for packages whose short name is an alias. A finder and a loader.

    It does not inherit from the classes of `importlib.abc`: importing these takes longer than all of `looptape`.
    """

    def find_spec(self, fullname, path=None, target=None):
        top = fullname.partition(".")[0]
        aliased = sys.modules.get(top)
        if aliased is None or getattr(aliased, "__name__", None) != _PREFIX + top:
            return None
        real = importlib.util.find_spec(_PREFIX + fullname)
        if real is None:
            return None
        return importlib.util.spec_from_loader(
            fullname, self, origin=real.origin, is_package=real.submodule_search_locations is not None
        )

    def create_module(self, spec):
        module = importlib.import_module(_PREFIX + spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        """Only takes back the alias's `__spec__`: the module has run under its own name."""
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname):
        """For `python -m experiments.<name>`."""
        spec = importlib.util.find_spec(_PREFIX + fullname)
        return spec.loader.get_code(spec.name)

    def get_filename(self, fullname):
        return importlib.util.find_spec(_PREFIX + fullname).origin
