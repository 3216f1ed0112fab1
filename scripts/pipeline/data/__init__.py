"""From published archives, or any corpus, to data that fairseq trains on."""
