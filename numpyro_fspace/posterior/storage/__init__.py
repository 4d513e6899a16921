"""Draws in files: a posterior in one file, the files of a checkpoint, and how a run is recognized."""
