"""Publishing: tables, figures, pages and the token viewer."""
