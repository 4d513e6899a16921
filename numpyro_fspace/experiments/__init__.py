"""The papers' experiments: one run, one record; ``fspace run`` is their command line."""
