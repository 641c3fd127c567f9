"""Measures, tables, analyses, figures and the token viewer."""
