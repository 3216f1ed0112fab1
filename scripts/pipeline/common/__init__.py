"""What all parts of the pipeline share: paths, files, folders, running fairseq, tables."""
