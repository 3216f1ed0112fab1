"""Criterions for fairseq; ``--user-dir talk_fairseq`` registers them."""
