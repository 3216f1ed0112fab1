#!/usr/bin/env python3
"""Draw the curves of training runs; --help says how."""

import sys

from pipeline.plots.training import main

if __name__ == "__main__":
    sys.exit(main())
