"""Tables for people, in Markdown that is also aligned as plain text."""


def markdown(headers, rows):
    """Return a table of texts: the first column on the left, the others on the right.

    A cell that is None is empty. By hand: scripts/gpu_report.sh runs with torch and cupy alone.
    """
    rows = [["" if cell is None else str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    head, *lines = [f"| {' | '.join(row)} |" for row in rows]
    rule = [":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]
    return "\n".join([head, f"|{'|'.join(rule)}|", *lines])
