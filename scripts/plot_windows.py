#!/usr/bin/env python3
"""Draw the windows that a model chooses; --help says how."""

import sys

from pipeline.plots.windows import main

if __name__ == "__main__":
    sys.exit(main())
