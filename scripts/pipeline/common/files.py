"""Text files that are written whole or not at all."""

import os


def write_whole(path, text):
    """Write ``text`` to ``path``: other processes, and runs after a killed one, see all or nothing.

    Several may write it at once, also on several nodes; the last one stays.
    """
    part = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.partial")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
