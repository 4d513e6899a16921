"""``gp_network``: the last layer of a network, its distribution given the features, and its exact integral."""
