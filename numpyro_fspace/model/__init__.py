"""Models: networks with random weights, priors over their functions, and the analysis of a model's structure."""

from numpyro_fspace.model import measurement
from numpyro_fspace.model.data.on_demand import OnDemand
from numpyro_fspace.model.functional_priors import functional_prior
from numpyro_fspace.model.functions import function_values
from numpyro_fspace.model.gp_network import gp_network
from numpyro_fspace.model.initial_values import init_to_network
from numpyro_fspace.model.networks.convolution import conv_general_dilated
from numpyro_fspace.model.networks.frozen_weights import read_safetensors, weights_by_path
from numpyro_fspace.model.networks.random_module import fan_in, flat, random_function, random_module

__all__ = [
    "OnDemand",
    "conv_general_dilated",
    "fan_in",
    "flat",
    "function_values",
    "functional_prior",
    "gp_network",
    "init_to_network",
    "measurement",
    "random_function",
    "random_module",
    "read_safetensors",
    "weights_by_path",
]
