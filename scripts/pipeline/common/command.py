"""How the commands stop: one line on the standard error, and an exit status."""

import argparse
import sys


class BadInput(Exception):
    """Input that the caller can change; the message says what was expected."""


class Failed(Exception):
    """A step that did not do what it should; the message says which and why."""


def run(name, body):
    """Run ``body()`` as the command `name`, such as ``"compare.sh"``, and return its exit status.

    That is what `body` returns (None is 0); 2 for input that cannot be used, 1 for what failed on
    the way, and 130 for Ctrl-C, each with one line that begins with the name.
    """
    try:
        return body() or 0
    except BadInput as error:
        status, said = 2, error
    except (Failed, OSError, ValueError) as error:
        status, said = 1, error
    except KeyboardInterrupt:
        status, said = 130, "interrupted; run it again to go on"
    print(f"{name}: {said}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """Stops as `run` does: with one line and status 2."""

    def parse_args(self, args=None, namespace=None):
        args, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"{unknown[0]}: no such option")
        return args

    def error(self, message):
        message = message.removeprefix("argument ")
        message = message.replace("expected one argument", "expected a value")
        name = self.prog.removeprefix("scripts/")
        self.exit(2, f"{name}: {message} (see --help)\n")


def parser(name, description, epilog=None):
    """Return an argument parser for ``scripts/NAME`` that keeps the lines of its texts.

    Arguments that it does not know end the command with one line and status 2.
    """
    return _Parser(
        prog=f"scripts/{name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
