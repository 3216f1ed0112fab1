"""How fairseq is patched: one function replaced, or one module's view of another."""

import functools
import inspect
import pkgutil
import sys
import types

_OF_COMMANDS = []  # (command, name, function), in the order in which they are applied


def patches(owner, name):
    """Replace ``owner.name`` with the decorated function, which is given the original first.

    `owner` is a module or a class, or its dotted name, which is imported. Class methods stay class
    methods: the class comes second. The original stays at ``owner.name.__wrapped__``. What is
    patched already is left alone, as where a module is loaded again. Raises AttributeError if
    fairseq no longer has that name.
    """
    owner = _resolve(owner)
    original = layer = getattr(owner, name)
    of_class = isinstance(vars(owner).get(name), classmethod)
    if of_class:
        original = original.__func__
    present = set()
    while layer is not None:  # several patches may stand on one another
        present.add(getattr(layer, "patched_by", None))
        layer = getattr(layer, "__wrapped__", None)

    def patch(function):
        if function.__name__ in present:
            return function

        @functools.wraps(original, updated=())
        def patched(*args, **kwargs):
            return function(original, *args, **kwargs)

        patched.patched_by = function.__name__
        setattr(owner, name, classmethod(patched) if of_class else patched)
        return function

    return patch


def patches_command(command, name):
    """Replace ``name`` in ``fairseq_cli.<command>``, as `patches` does, now or once it runs.

    It is not imported for that, which would set up logging: see `patch_commands`.
    """

    def patch(function):
        _OF_COMMANDS.append((command, name, function))
        patch_commands()
        return function

    return patch


def patch_commands():
    """Patch the commands that are imported by now; what is patched already stays as it is."""
    for command, name, function in _OF_COMMANDS:
        if module := command_module(command):
            patches(module, name)(function)
            if main := getattr(module, "main", None):
                # A process that ``python -m`` spawns looks names up in a copy of the module's.
                inspect.unwrap(main).__globals__[name] = getattr(module, name)


def command_module(command):
    """Return ``fairseq_cli.<command>`` if it is imported or runs by ``python -m``, else None."""
    name, main = f"fairseq_cli.{command}", sys.modules["__main__"]
    runs = getattr(getattr(main, "__spec__", None), "name", None) == name
    return main if runs else sys.modules.get(name)


def overlay(owner, alias, **names):
    """Let ``owner`` see the module that it calls `alias` with these names replaced.

    The module itself is not touched. Raises AttributeError if ``owner`` no longer has it.
    """
    owner = _resolve(owner)
    module = getattr(owner, alias)
    view = types.ModuleType(module.__name__)
    view.__getattr__ = functools.partial(getattr, module)
    vars(view).update(names)
    setattr(owner, alias, view)


def _resolve(owner):
    return pkgutil.resolve_name(owner) if isinstance(owner, str) else owner
