"""Rules of operators that create tensors, random ones included."""
