"""Rules of products, factorizations, solvers and Fourier transforms."""
