"""The rows of the papers' tables: training, averaging, scoring."""
