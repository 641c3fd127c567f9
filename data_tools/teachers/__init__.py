"""Teachers: models that score the passages of a query, behind one small interface; each needs its own package,
imported late.
"""
