#!/usr/bin/env python3
"""Check a corpus and cut it into pieces; --help says how."""

import sys

from pipeline.data.corpus import main

if __name__ == "__main__":
    sys.exit(main())
