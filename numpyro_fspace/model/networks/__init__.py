"""Networks as parts of a model: adapters of libraries, weights and their priors, weights that are fixed."""
