"""The data of a model: arguments of compiled programs, minibatches, data on disk."""
