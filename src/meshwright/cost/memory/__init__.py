"""The bytes a rank holds: parameters, gradients, optimizer state, activations, and the peak over a step."""
