"""What tests stand on: analytic targets, exact laws of samplers, broken twins, tiers."""
