"""The output layer in models of other libraries, one module for each library."""
