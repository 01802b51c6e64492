"""Rules of operators that change the shape or the order of elements."""
