"""The DTensor, and the functions on DTensors that both rules and dispatch use."""
