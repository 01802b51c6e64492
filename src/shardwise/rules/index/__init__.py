"""Rules of operators that read or write by index."""
