"""Passes over graphs: fewer gathers, fewer nodes, and which nodes share memory."""
