"""The page at /: a query and passages in, the ranking with its words shaded out."""
