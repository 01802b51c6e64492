"""Rules of operators that reduce, accumulate or order dims."""
