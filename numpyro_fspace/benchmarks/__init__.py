"""Benchmarks of speed beside other libraries: one run, one record; ``fspace bench`` is their command line."""
