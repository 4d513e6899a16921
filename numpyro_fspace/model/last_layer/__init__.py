"""``gp_network``: the last layer of a network, which gives it the distribution of a process, and its exact integral.

``given_features.py`` has the map of the last layer and its distribution, ``integrable.py`` says when it is integrated
out, ``hidden_scale.py`` chooses the scales of the hidden weights.
"""
