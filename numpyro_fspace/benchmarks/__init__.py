"""Benchmarks of speed, also of other libraries. Each run gives one record; the command line is ``fspace bench``."""
