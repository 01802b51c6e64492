"""Examples: ordinary models, how to lay them out on a mesh, and how to train them."""
