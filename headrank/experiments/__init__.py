"""Studies: cells of methods, collections and orders, planned and run."""
