"""Programs of JAX: what they show of a function, and where compiled ones are kept."""
