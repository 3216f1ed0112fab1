#!/usr/bin/env python3
"""Average the parameters of checkpoints; --help says how."""

import sys

from pipeline.recipes.average import main

if __name__ == "__main__":
    sys.exit(main())
