"""A folder that one run at a time works in, step by step, each step done once."""

import errno
import fcntl
import glob
import time
from collections.abc import Mapping

from pipeline.common.command import BadInput, check_path
from pipeline.common.files import read_json, remove, write_json


class Folder:
    """The folder of a run: a lock, its settings, and steps that are not repeated.

    Args:
        path: the folder, which need not exist yet.
        what: what runs in it, in words: "comparison", "quick start".
        made: patterns (as of ``Path.glob``) of all that such a run makes there, for a restart; the
            settings, and what is not whole yet, are added.
        option: the command's option that names the folder, for messages.

    Attributes:
        lock: the open lock file, once the folder is open. A process that inherits it keeps the
            folder locked for as long as it lives.
    """

    def __init__(self, path, what, made, option="--out"):
        self.path, self.what, self.made, self.option = path, what, made, option
        self.settings, self.lock = path / "settings.json", None

    def check(self):
        """Raise BadInput unless the folder can hold such a run. Makes nothing."""
        check_path(self.option, self.path)
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"{self.option}: expected a folder, got the file {self.path}")
        if self.settings.exists() or not self.path.exists():
            return
        others = {path.name for path in self.path.iterdir()} - {"lock"}
        if any(not name.startswith(self.settings.name) for name in others):
            held = f"files that are not of a {self.what}; choose another folder"
            raise BadInput(f"{self.option}: {self.path} holds {held}")

    def open(self, settings, restart=False, growing=()):
        """Lock the folder for a run with `settings`, a dictionary that JSON can hold.

        Args:
            restart: remove what an earlier run left.
            growing: keys of `settings` whose values are dictionaries that may gain and lose
                entries from run to run; an entry that was there keeps its value. What is made for
                an entry has its name.

        Raises BadInput if another run holds the lock, or the folder is of other settings; the
        message names the first that differs.
        """
        self.check()
        self.acquire()
        grown = [name for key in growing for name in settings[key]]
        try:
            there = dict(read_json(self.settings, {}))
            grown += [name for key in growing for name in dict(there.get(key, {}))]
        except (TypeError, ValueError):
            if not restart:
                held = f"damaged settings of a {self.what}; --restart replaces them"
                raise BadInput(f"{self.option}: {self.settings} holds {held}") from None
            there = {}
        if (kind := there.get("kind", self.what)) != self.what:
            held = f"a {kind}; choose another folder"
            raise BadInput(f"{self.option}: {self.path} holds {held}")
        if restart:
            for pattern in (*self.made, *map(glob.escape, grown), self.settings.name):
                for path in [*self.path.glob(pattern), *self.path.glob(f"{pattern}*.partial")]:
                    remove(path)
            there = {}
        settings = {"kind": self.what, **settings}
        before = {"kind": self.what, **there} if there else settings
        for key in growing:  # what is there stays, beside what is new
            others, ours = before.get(key, {}), settings[key]
            before, settings = before | {key: ours | others}, settings | {key: others | ours}
        old, new = flat(before), flat(settings)
        for key in [*new, *old]:
            if old.get(key) != new.get(key):
                had, given = (str(each.get(key))[:80] for each in (old, new))
                held = f"a {self.what} with other settings ({key}: {had}, not {given})"
                hint = "choose another folder, or --restart to replace it"
                raise BadInput(f"{self.option}: {self.path} holds {held}; {hint}")
        if settings != there:
            write_json(self.settings, settings)

    def acquire(self, name="lock", wait=0):
        """Make the folder, and lock it until `close` where the file system has locks.

        Raises BadInput if another run holds the lock, also after `wait` seconds.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock, end = open(self.path / name, "a"), time.monotonic() + wait
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= end:
                    break
                time.sleep(0.2)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise
                return
        who = f"another {self.what}, or a command of one that was killed"
        hint = f"is running in {self.path}; wait for it or choose another folder"
        raise BadInput(f"{self.option}: {who}, {hint}")

    def close(self):
        """Let go of the lock."""
        if self.lock:
            self.lock.close()

    def once(self, title, made, make):
        """Announce and run ``make(partial)``, unless the path `made` is there.

        `make` writes a file or folder under the name `partial`, which becomes `made` when it is
        whole. Returns whether it ran.
        """
        if made.exists():
            return False
        show(f"\n== {title}")
        partial = made.with_name(made.name + ".partial")
        remove(partial)
        made.parent.mkdir(parents=True, exist_ok=True)
        make(partial)
        partial.rename(made)
        return True


def flat(nested, prefix=""):
    """Return ``{"model.dropout": 0.3}`` of nested dictionaries."""
    found = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def show(text=""):
    """Print `text` in one piece, beside other threads that print."""
    print(text + "\n", end="", flush=True)
