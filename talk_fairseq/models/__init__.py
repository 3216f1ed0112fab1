"""Models for fairseq, registered by importing the files beside this one."""
