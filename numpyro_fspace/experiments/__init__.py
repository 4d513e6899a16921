"""The papers' experiments. Each run gives one record; the command line is ``fspace run``."""
