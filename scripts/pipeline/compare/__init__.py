"""TaLK and its peers, trained on the same text and compared."""
