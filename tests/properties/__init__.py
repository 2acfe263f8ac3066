"""One property for each invariant, over inputs that nobody thought of."""
