"""Tables for people, in Markdown that is also aligned as plain text."""

from tabulate import tabulate


def markdown(headers, rows):
    """Return a table of texts: the first column on the left, the others on the right.

    A cell that is None is empty.
    """
    rows = [["" if cell is None else str(cell) for cell in row] for row in rows]
    alignment = ["left"] + ["right"] * (len(headers) - 1)
    return tabulate(
        rows, headers, tablefmt="pipe", disable_numparse=True, colalign=alignment if rows else None
    )
