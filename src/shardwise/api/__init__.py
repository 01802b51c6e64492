"""Functions that make DTensors and lay out modules, and optimizers of DTensors."""
