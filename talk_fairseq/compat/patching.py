"""How fairseq is patched: one function replaced, or one module's view of another.

Each patch records itself in `APPLIED`, against which the table of the package is checked.
"""

import functools
import sys
import types

APPLIED = {}  # {name of a patch: the module it is in}


def _record(patch):
    APPLIED[patch.__name__] = patch.__module__
    return patch


def _present(owner, name):
    """``owner.name``. Raises AttributeError where fairseq has lost it."""
    if getattr(owner, name, None) is None:
        raise AttributeError(f"expected {owner.__name__}.{name} in fairseq, got none")
    return getattr(owner, name)


def patches(owner, name):
    """Replace ``owner.name`` with the decorated function, which is given the original first.

    Class methods stay class methods: the class comes second. The original stays at
    ``owner.name.__wrapped__``. What is patched already is left alone, so that the plugin may be
    imported twice. Raises AttributeError where fairseq has lost the name.
    """

    def patch(function):
        original = _present(owner, name)
        of_class = isinstance(vars(owner).get(name), classmethod)
        if of_class:
            original = original.__func__
        if not hasattr(original, "patched_by"):

            @functools.wraps(original, updated=())
            def patched(*args, **kwargs):
                return function(original, *args, **kwargs)

            patched.patched_by = function.__name__
            setattr(owner, name, classmethod(patched) if of_class else patched)
        return _record(function)

    return patch


def replaces(owner, name):
    """Replace ``owner.name`` with the decorated function itself.

    For what TorchScript compiles, which reads the source of a function and would find that of the
    original behind a wrapper. Raises AttributeError where fairseq has lost the name.
    """

    def patch(function):
        original = _present(owner, name)
        _record(function)
        if not hasattr(original, "patched_by"):
            function.patched_by, function.__name__ = function.__name__, name
            setattr(owner, name, function)
        return function

    return patch


def patches_command(command, name):
    """Replace ``name`` in ``fairseq_cli.<command>``, as `patches` does, where that command runs.

    A command that is not imported is left alone: importing it would set up logging.
    """
    module = sys.modules.get(f"fairseq_cli.{command}")
    return _record if module is None else patches(module, name)


def applies(patch):
    """Call the decorated function, a patch that does not replace a single function, at once."""
    patch()
    return _record(patch)


class Overlay(types.ModuleType):
    """A module as one other module sees it: some names are ours, the rest is the original's."""

    def __init__(self, module, **names):
        super().__init__(module.__name__)
        self.__dict__.update(names, __wrapped__=module)

    def __getattr__(self, name):
        return getattr(self.__wrapped__, name)


def overlay(owner, module, **names):
    """Let ``owner`` see ``module`` with these names replaced; ``module`` itself is not touched.

    Raises AttributeError where ``owner`` no longer imports ``module`` under the usual name.
    """
    alias = {"numpy": "np"}.get(module.__name__, module.__name__)
    if _present(owner, alias) is module:
        setattr(owner, alias, Overlay(module, **names))
